"""Forms of a KV cache: the bits of its numbers. Imports nothing, so that a wrong one is refused before torch loads."""

from __future__ import annotations

PLAIN_KV = "16"
PLAIN = 16  # bits of numbers that are kept as they are
Bits = tuple[int, int]  # of a layer's keys and values, or of a latent's two parts
FORMS: dict[str, Bits] = {PLAIN_KV: (16, 16), "8": (8, 8), "4": (4, 4), "k8v4": (8, 4)}
