"""Executors: they run tasks in this process, or on a Ray cluster."""
