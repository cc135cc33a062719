"""Forms of a KV cache: the bits of its numbers. Imports nothing, so that a wrong one is refused before torch loads."""

from __future__ import annotations

PLAIN_KV = "16"
PLAIN = 16  # bits of numbers that are kept as they are
Bits = tuple[int, int]  # of a layer's keys and values, or of a latent's two parts
FORMS: dict[str, Bits] = {PLAIN_KV: (16, 16), "8": (8, 8), "k8v4": (8, 4), "4": (4, 4)}  # the most precise first
AUTO_KV = "auto"  # in a budget, the form with which experts and cache together lose least
CONTEXT = 4096  # tokens of the cache that AUTO_KV weighs where none are reserved
# What a form costs, as the mean relative loss of experts that adds as much divergence: the larger of what
# `python -m benchmarks.cache` measured on two trained models, in windows of 2,048 tokens, rounded up.
LOSS = {PLAIN_KV: 0.0, "8": 0.0004, "k8v4": 0.005, "4": 0.011}
