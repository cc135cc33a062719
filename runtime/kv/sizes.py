"""The bytes of KV caches of any architecture, counted from their tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def storages(cache: object) -> dict[int, int]:
    """Return the bytes of every storage that a cache object holds, by the storage's identity, in the object's order."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(cache)}


def cache_bytes(cache: object) -> int:
    """Return the bytes of a cache object: its `held_bytes` if it has them, else the bytes of all its storages."""
    counted = getattr(cache, "held_bytes", None)
    return int(counted) if counted is not None else sum(storages(cache).values())


def tensors(cache: object) -> Iterator[Tensor]:
    """Yield the tensors that a cache object holds, at any depth."""
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


def static_length(cache: object) -> int:
    """Return the tokens for which a static cache allocates memory at its first token; 0 for a cache that grows."""
    return max((int(getattr(layer, "max_cache_len", 0) or 0) for layer in getattr(cache, "layers", ())), default=0)


def sliding_window(cache: object) -> int:
    """Return the longest sliding window of a cache's layers; 0 if none has a window."""
    return max((int(getattr(layer, "sliding_window", 0) or 0) for layer in getattr(cache, "layers", ())), default=0)
