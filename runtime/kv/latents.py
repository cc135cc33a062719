"""How many heads' keys and values a latent layer expands at a time; dense/latent.py does so, and plans count by it."""

from __future__ import annotations

EXPANDED = 64 << 20  # bytes of expanded keys and values at a time; one head's at least
# New tokens up to which latents are not expanded, as a share of those for which both ways multiply as often. With BF16
# products both take as long at 0.75 of them over 512 tokens and at 1.5 over 4,096; with AVX2 alone at 0.5 to 0.7.
SHARE_BF16 = 1.0
SHARE = 0.5
MAP = "kv_b_proj"  # the name of the map from latents to keys and values


def wide(first: int, rotated: int, second: int) -> int:
    """Return the numbers of a head's keys and of its values, which get zeros up to the width of keys."""
    return max(first + rotated, second)


def expanded_bytes(tokens: int, first: int, rotated: int, second: int, itemsize: int) -> int:
    """Return the bytes of one head's product with `tokens` latents, and of the keys and values copied from it."""
    return tokens * (first + second + 2 * wide(first, rotated, second)) * itemsize


def heads_at_once(heads: int, size: int) -> int:
    """Return how many of `heads` heads are expanded at a time, of `size` bytes each."""
    return max(1, min(heads, EXPANDED // max(1, size)))


def most_absorbed(rank: int, first: int, rotated: int, second: int, share: float) -> int:
    """Return the most new tokens for which latents are not expanded.

    `share` is their part of the tokens for which both ways multiply as often.
    """
    absorbed = 2 * rank + rotated
    expanded = first + second + rotated
    if absorbed <= expanded:
        return 1 << 30
    return int(share * rank * (first + second) / (absorbed - expanded))
