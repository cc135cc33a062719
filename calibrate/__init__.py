"""Stream a checkpoint layer by layer: routing statistics, second moments, quantised experts, and each width's loss.

It uses transformers' own modules and conversion mapping, so a model family needs no code here.
"""
