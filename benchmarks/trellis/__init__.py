"""Trellis codes beside moepack's versions; see `python -m benchmarks.trellis --help`."""
