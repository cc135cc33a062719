"""Streams a checkpoint layer by layer: routing statistics, second moments, quantised experts and what each width costs.

It uses transformers' own modules and conversion mapping, so a model family needs no code here.
"""
