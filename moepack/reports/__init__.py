"""Reports on a bundle or a machine: inspect, verify, evaluate, plan, doctor."""
