"""Streams a checkpoint layer by layer: routing statistics, second moments, quantised experts and what each width costs.

Works through transformers' own modules and conversion mapping, so that a model family needs no code here. Knows nothing
of bundles' directories or of serving.
"""
