"""Experts from their packed bytes: layers, the GPU, the whole model."""
