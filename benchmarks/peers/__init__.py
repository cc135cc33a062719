"""moepack beside llama.cpp and kt-kernel on a CPU: `python -m benchmarks.peers`."""
