"""Attention on a GPU: queries, keys and values by one product and one launch.

The three maps' weights become parts of one matrix. Its product is torch's, or, where they are packed, that of packed
matrices. The launch normalises and rotates the heads. Of one token of each sequence it also writes keys and values
where a static cache, or a table of sequences' own memory, has them; attention over these has a kernel, too. Modules
are found and tried as by projections.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.attend_triton import attend, takes
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.step_triton import rotate
from moepack.runtime.step.context import PackedCache

from .borrowed import SPECIAL, Attention
from .gpu_modules import FLOATS
from .linears import FamilyModule, learns
from .packed import PackedLinear, joined
from .projections import KNOWN, MAPS, NEEDED, NORMS, Projections, Ways, norms_of, serve_projections

if TYPE_CHECKING:
    from transformers import Cache


class GpuProjections(Projections):
    """The arguments of a module's kernel launch."""

    writes_static = True  # of one token

    def __init__(
        self, module: FamilyModule, modules: dict[str, FamilyModule], norms: Any, shared: bool, dtype: torch.dtype
    ) -> None:
        """Move the maps' weights into one matrix, of which their modules keep their rows."""
        maps = [modules[name] for name in MAPS]
        super().__init__(modules, sys.maxsize, _weight_of(maps[0]).device)
        self._norms = norms
        self._shared = shared
        with torch.no_grad(), torch.inference_mode(False):
            self._map = _joined(maps)
        self.dtype = dtype
        self._heads = maps[0].out_features // module.head_dim, maps[1].out_features // module.head_dim
        self._at = {name: _weight_of(m).data_ptr() for name, m in modules.items()}

    def _reads(self, name: str, module: FamilyModule) -> bool:
        weight = _weight_of(module)
        if weight is None or weight.data_ptr() != self._at[name] or learns(weight):
            return False
        return weight.dtype == self.dtype or isinstance(module, PackedLinear)

    def run(
        self, module: FamilyModule, x: Tensor, turn: Any, cache: Cache | None, others: dict[str, object]
    ) -> tuple[Any, ...]:
        """Project by a product and a launch, which writes keys and values where it can."""
        batch, tokens = x.shape[:2]
        number: int = module.layer_idx
        made = self._map(x.view(batch * tokens, -1))
        cos, sin = (t.reshape(batch * tokens, -1) for t in turn)
        rows = cache.written(number) if isinstance(cache, PackedCache) else None
        layer = _static(cache, number, made.dtype) if tokens == 1 else None
        place = rows if layer is None else (layer.keys, layer.values, layer.cumulative_length)
        with current(x.device):
            query, key, value = rotate(made, cos, sin, self._heads, self._norms, self._shared, place)
        if rows is not None:
            return query.transpose(0, 2), key, value
        if tokens > 1:
            query, key, value = (y.view(batch, tokens, -1, y.shape[3]).transpose(1, 2) for y in (query, key, value))
        if layer is not None:
            layer.cumulative_length.add_(1)
            return query, key, value
        return query, *((key, value) if cache is None else cache.update(key, value, number, kwargs=others))

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Return one token's mask as numbers to add, made once a step: torch would make them in every layer."""
        if mask is None or mask.dtype != torch.bool or mask.shape[-2] > 1:
            return mask
        made: Tensor | None = getattr(mask, "_moepack_added", None)
        if made is None:
            made = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, float("-inf"))
            mask._moepack_added = made  # type: ignore[attr-defined]
        return made

    def attention(self, plain: Attention, cache: object, number: int) -> Attention:
        """Return the function that computes attention: over a static cache, the kernel's where it takes the case."""
        layer = _static(cache, number, self.dtype)
        return plain if layer is None else functools.partial(_one_token, plain, layer.cumulative_length)


def _one_token(
    plain: Attention,
    length: Tensor,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one new token of each sequence over all that a static cache holds."""
    special = any(named.get(name) is not None for name in (*SPECIAL, "sliding_window"))
    if special or named.get("dropout") or not takes(query, key, value, mask):
        return plain(module, query, key, value, mask, **named)
    scaling = named.get("scaling")
    with current(query.device):
        return attend(query, key, value, length, mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _weight_of(module: nn.Module) -> Any:
    """The tensor that a map or a norm reads; None if it has lost it."""
    return module.packed if isinstance(module, PackedLinear) else module._parameters.get("weight")


def _joined(maps: list[FamilyModule]) -> Callable[[Tensor], Tensor]:
    """One product in place of the maps' own, over their weights in one matrix."""
    if isinstance(maps[0], PackedLinear):
        whole = joined(maps)
        return whole if whole is not None else lambda x: torch.cat([m(x) for m in maps], dim=-1)
    weight = _one([m.weight for m in maps])
    bias = None if maps[0].bias is None else _one([m.bias for m in maps])
    return lambda x: nn.functional.linear(x, weight, bias)


def _one(parts: list[Tensor]) -> Tensor:
    """Return the parts one below the other, in one tensor, of which they become views."""
    whole = torch.cat([p.detach() for p in parts])
    for part, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        part.data = view
    return whole


def _static(cache: object, number: int, dtype: torch.dtype) -> Any:
    """The layer of a static cache into which a launch may write; `None` for another cache, whose own code must run."""
    from transformers.cache_utils import StaticLayer

    layers = getattr(cache, "layers", ())
    layer = layers[number] if number < len(layers) else None
    kind = type(layer)
    plain = kind is StaticLayer or (hasattr(kind, "moepack_watched") and kind.__mro__[1] is StaticLayer)
    if layer is None or not plain or not layer.is_initialized or not layer.keys.is_contiguous():
        return None
    return layer if layer.keys.dtype == dtype and layer.values.shape == layer.keys.shape else None


def _place(module: FamilyModule, shared: int) -> GpuProjections | None:
    """Return what a module's launch reads; `None` for a module that it does not fit."""
    maps = [module._modules.get(name) for name in MAPS]
    norms = [module._modules.get(name) for name in NORMS]
    found = norms_of(module, *NORMS)
    kinds = {type(m) for m in maps}
    dtype = next((m.weight.dtype for m in (*norms, *maps) if hasattr(m, "weight")), module.config.dtype)
    if kinds not in ({nn.Linear}, {PackedLinear}) or dtype not in FLOATS or found is None:
        return None
    weights = [_weight_of(m) for m in (*maps, *(m for m in norms if m is not None))]
    if any(w is None for w in weights) or len({w.device for w in weights}) != 1:
        return None
    if {w.dtype for w in weights} - {dtype, torch.uint8} or len({_biased(m) for m in maps}) != 1:
        return None
    if len({m.in_features for m in maps}) != 1 or maps[1].out_features != maps[2].out_features:
        return None
    if any(f is not None and len(f.weight) != module.head_dim for f in found):
        return None  # of all heads together
    read = {name: m for name, m in zip((*MAPS, *NORMS), (*maps, *norms), strict=True) if m is not None}
    return GpuProjections(module, read, tuple(found), bool(shared), dtype)


def _biased(module: FamilyModule) -> bool:
    return bool(module.matrix.bias if isinstance(module, PackedLinear) else module.bias is not None)


def serve_gpu_projections(model: nn.Module) -> dict[str, int]:
    """Replace the modules whose projections the launch reproduces; return how many were changed, by class."""
    return serve_projections(model, Ways(NEEDED, KNOWN, _place, 2))
