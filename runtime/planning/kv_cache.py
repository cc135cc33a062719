"""Cache objects of any architecture, seen as the tensors they hold: their bytes, and how those grow with tokens.

Knows no formula of any architecture: what a cache takes is what its storages take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvShape:
    """How the cache of one sequence grows.

    Attributes:
        parts: of each tensor in it: bytes at no tokens, bytes a token, and the bytes at which it stops growing (a
            sliding window's), or None.
    """

    parts: tuple[tuple[int, int, int | None], ...] = ()

    def bytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the caches of `batch` sequences of `tokens` tokens."""
        if tokens <= 0:
            return 0
        grown = ((constant + slope * tokens, cap) for constant, slope, cap in self.parts)
        return batch * sum(size if cap is None else min(size, cap) for size, cap in grown)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds to a short cache."""
        return sum(slope for _, slope, _ in self.parts)

    def tokens(self, size: int, batch: int, most: int) -> int:
        """The most tokens, up to `most`, of `batch` sequences whose caches fit `size` bytes."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle, batch) <= size else (low, middle - 1)
        return low


def storages(cache: Any) -> dict[int, int]:
    """The storages of the tensors that a cache object holds, wherever they stand in it: their bytes by identity."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(cache)}


def cache_bytes(cache: Any) -> int:
    """Bytes of all storages that a cache object holds; one that counts itself says so as `held_bytes`."""
    counted = getattr(cache, "held_bytes", None)
    return int(counted) if counted is not None else sum(storages(cache).values())


def tensors(cache: Any) -> Iterator[Tensor]:
    """The tensors that a cache object holds."""
    seen: set[int] = set()
    left = [cache]
    while left:
        thing = left.pop()
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, (list, tuple, dict)) or (
            hasattr(thing, "__dict__") and not isinstance(thing, (type, torch.nn.Module))
        ):
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if not isinstance(thing, (list, tuple)):
                thing = list((thing if isinstance(thing, dict) else vars(thing)).values())
            left.extend(reversed(thing))


def static_length(cache: Any) -> int:
    """Tokens for which a cache sets memory aside at once, with its first token; 0 for one that grows as it is used."""
    return max((int(getattr(layer, "max_cache_len", 0) or 0) for layer in getattr(cache, "layers", ())), default=0)


def sliding_window(cache: Any) -> int:
    """The longest window of a cache that forgets what lies before it; 0 where it forgets nothing."""
    return max((int(getattr(layer, "sliding_window", 0) or 0) for layer in getattr(cache, "layers", ())), default=0)
