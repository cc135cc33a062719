"""A full-depth model larger than memory, beside llama.cpp in one memory limit: `python -m benchmarks.limited`."""
