"""What is said of a bundle or of a machine: inspect, verify, evaluate, plan, doctor."""
