"""Sizes of a latent layer, and how many heads are expanded at a time, as dense/latent.py does it and plans count it."""

from __future__ import annotations

from dataclasses import dataclass

EXPANDED = 64 << 20  # bytes of expanded keys and values at a time; one head's at least
# New tokens up to which latents are not expanded, as a share of those for which both ways multiply as often. With BF16
# products both take as long at 0.75 of them over 512 tokens and at 1.5 over 4,096; with AVX2 alone at 0.5 to 0.7.
SHARE_BF16 = 1.0
SHARE = 0.5
MAP = "kv_b_proj"  # the name of the map from latents to keys and values


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Numbers of a token's latent and of its part with positions, and of a head's key from the latent and its value."""

    rank: int
    rotated: int
    first: int
    second: int

    @property
    def wide(self) -> int:
        """Numbers of a head's key and of its value, which gets zeros up to the width of keys."""
        return max(self.first + self.rotated, self.second)

    def expanded_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of one head's product with `tokens` latents, and of the keys and values copied from it."""
        return tokens * (self.first + self.second + 2 * self.wide) * itemsize

    def most_absorbed(self, share: float) -> int:
        """Return the most new tokens for which latents are not expanded.

        `share` is their part of the tokens for which both ways multiply as often.
        """
        absorbed = 2 * self.rank + self.rotated
        expanded = self.first + self.second + self.rotated
        if absorbed <= expanded:
            return 1 << 30
        return int(share * self.rank * (self.first + self.second) / (absorbed - expanded))


def heads_at_once(heads: int, size: int) -> int:
    """Return how many of `heads` heads are expanded at a time, of `size` bytes each."""
    return max(1, min(heads, EXPANDED // max(1, size)))
