"""Continuous batching: the scheduler, the engine that runs passes, packed KV caches, sampling, tokens and text."""
