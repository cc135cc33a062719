"""Quantise weights with second moments: a file for each method, listed in methods.py.

Every method works on a batch of experts of one shape, independent of models, routing and files.
"""
