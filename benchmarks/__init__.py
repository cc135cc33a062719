"""Measurements. Each module prints a table with both sides measured in one run: `python -m benchmarks.NAME --help`."""
