"""How many tokens a cache holds, without waiting for a device, on which transformers' static caches count theirs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor


def cached_tokens(cache: object) -> int | None:
    """Return the tokens that a cache holds; None if only a device knows."""
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    return None if isinstance(length, Tensor) and length.device.type != "cpu" else int(length)


def emptied(cache: object) -> bool:
    """Whether a static cache was emptied since the last call; the first call for a cache only begins to watch it."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(getattr(layer, "cumulative_length", None), Tensor):
            kind: Any = type(layer)
            if not hasattr(kind, "moepack_watched"):
                layer.__class__ = _watched(kind)
            return bool(vars(layer).pop("moepack_emptied", False))
    return False


@lru_cache
def _watched(kind: type[Any]) -> type:
    """The class of a layer that notes when it is emptied. Its updates are transformers' own, and compile as they do."""

    def reset(self: Any) -> None:
        self.moepack_emptied = True
        kind.reset(self)

    def reduce(self: object, _: object) -> tuple[object, ...]:
        # Pickles and copies are of transformers' own class, as pickle asks by name
        made: Any = object.__reduce_ex__(self, 0)
        return made[0], (kind, *made[1][1:]), *made[2:]

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"reset": reset, "__reduce_ex__": reduce, "moepack_watched": True}
    return type(kind.__name__, (kind,), {**names, **own})
