"""moepack beside llama.cpp on a CPU: `python -m benchmarks.peers`."""
