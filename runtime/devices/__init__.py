"""Memory, a migration stream and events: what the runtime needs of a device, on a CPU and with CUDA."""
