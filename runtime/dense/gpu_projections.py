"""Queries, keys and values of one token of each sequence on a GPU: one product and one launch, static caches included.

The three maps' weights become parts of one matrix, whose product is torch's. The launch normalises and rotates the
heads, and writes keys and values where a static cache keeps them. Modules are found and tried as by projections.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.routing_triton import TOKENS
from moepack.runtime.kernels.step_triton import rotate

from .gpu_modules import FLOATS, described
from .linears import learns
from .projections import MAPS, NORMS, serve_projections


class GpuPlace:
    """What a module's launch reads."""

    several = False

    def __init__(self, module: Any, modules: dict[str, Any], norms: Any, shared: bool) -> None:
        """Move the maps' weights into one matrix; their modules keep views of it."""
        maps = [modules[name] for name in MAPS]
        self.most, self._modules, self._norms, self._shared = TOKENS, modules, norms, shared
        with torch.no_grad(), torch.inference_mode(False):
            self._weight = _joined([m.weight for m in maps])
            self._bias = None if maps[0].bias is None else _joined([m.bias for m in maps])
        self.device, self.dtype = self._weight.device, self._weight.dtype
        self._heads = maps[0].out_features // module.head_dim, maps[1].out_features // module.head_dim
        self._at = {name: m.weight.data_ptr() for name, m in modules.items()}

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's maps and norms are as they were: the same, at their addresses, frozen, without hooks."""
        if _has_any_global_hook():
            return False
        for name, of in self._modules.items():
            m: Any = module._modules[name]
            if m is not of or m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__:
                return False
            weight = m._parameters.get("weight")
            if weight is None or weight.data_ptr() != self._at[name] or weight.dtype != self.dtype or learns(weight):
                return False
        return True

    def run(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: Any, number: int, others: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values of `x`; these two are all that layer `number` of the cache then holds."""
        made = nn.functional.linear(x.view(len(x), -1), self._weight, self._bias)
        cos, sin = (t.reshape(len(x), -1) for t in turn)
        layer = _static(cache, number, made.dtype)
        place = None if layer is None else (layer.keys, layer.values, layer.cumulative_length)
        with current(x.device):
            query, key, value = rotate(made, cos, sin, self._heads, self._norms, self._shared, place)
        if layer is not None:
            layer.cumulative_length.add_(1)
            return query, key, value
        return query, *((key, value) if cache is None else cache.update(key, value, number, kwargs=others))

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask of attention as numbers to add, made once a step: torch would make them in every layer."""
        if mask is None or mask.dtype != torch.bool:
            return mask
        made: Tensor | None = getattr(mask, "_moepack_added", None)
        if made is None:
            made = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, float("-inf"))
            mask._moepack_added = made  # type: ignore[attr-defined]
        return made

    def __deepcopy__(self, memo: object) -> None:
        return None


def _joined(parts: list[Any]) -> Tensor:
    """Return the parts one below the other, in one tensor, of which they become views."""
    whole = torch.cat([p.detach() for p in parts])
    for part, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        part.data = view
    return whole


def _static(cache: Any, number: int, dtype: torch.dtype) -> Any:
    """The layer of a static cache into which a launch may write; `None` for another cache, whose own code must run."""
    from transformers.cache_utils import StaticLayer

    layers = getattr(cache, "layers", ())
    layer = layers[number] if number < len(layers) else None
    kind = type(layer)
    plain = kind is StaticLayer or (hasattr(kind, "moepack_watched") and kind.__mro__[1] is StaticLayer)
    if layer is None or not plain or not layer.is_initialized or not layer.keys.is_contiguous():
        return None
    return layer if layer.keys.dtype == dtype and layer.values.shape == layer.keys.shape else None


def _place(module: Any, shared: bool) -> GpuPlace | None:
    """Return what a module's launch reads; `None` for a module that it does not fit."""
    maps = [module._modules.get(name) for name in MAPS]
    norms = [module._modules.get(name) for name in NORMS]
    found = tuple(None if m is None else described(m) for m in norms)
    if any(type(m) is not nn.Linear or m.weight.dtype not in FLOATS for m in maps):
        return None
    if any(m is not None and f is None for m, f in zip(norms, found, strict=True)):
        return None  # a norm that the kernel does not reproduce
    weights = [m.weight for m in (*maps, *(m for m in norms if m is not None))]
    if len({(w.dtype, w.device) for w in weights}) != 1 or len({m.bias is None for m in maps}) != 1:
        return None
    if len({m.in_features for m in maps}) != 1 or maps[1].out_features != maps[2].out_features:
        return None
    if any(f is not None and len(f.weight) != module.head_dim for f in found):
        return None  # of all heads together
    read = {name: m for name, m in zip((*MAPS, *NORMS), (*maps, *norms), strict=True) if m is not None}
    return GpuPlace(module, read, found, shared)


def serve_gpu_projections(model: nn.Module) -> dict[str, int]:
    """Let the launch project what it reproduces; return the number of modules changed, by class."""
    return serve_projections(model, _place)
