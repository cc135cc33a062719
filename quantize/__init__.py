"""Weights and second moments to codes: one file a method, all behind the table in methods.py.

Knows nothing of models, of routing or of files. Every method works on a batch of experts that share a shape.
"""
