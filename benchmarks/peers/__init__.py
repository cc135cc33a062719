"""moepack beside llama.cpp and ik_llama.cpp on a CPU: `python -m benchmarks.peers`."""
