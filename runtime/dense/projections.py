"""Queries, keys and values of a few tokens by one kernel call, in attention modules whose code does just that.

Such a module projects its input by three maps, normalises and rotates queries and keys, appends keys and values to the
cache, and calls attention. The steps before the cache become one call here. A module is known by the names that its
code reads: a name beyond KNOWN may be a step that the kernel lacks, and the module stays as it is. So it does if its
results on random input differ by more than rounding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moepack.families.arguments import CACHE_NAMES
from moepack.runtime.kernels.token_native import Projection

from .borrowed import CLOSE, REGISTRY
from .linears import FEW, ServedLinear, in_place_of, learns
from .norms import described
from .packed import PackedLinear

MAPS, NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
NEEDED = {*MAPS, "apply_rotary_pos_emb", "get_interface", "head_dim", "o_proj", "scaling", "update"}
KNOWN = NEEDED | {
    REGISTRY, "_attn_implementation", "attention_dropout", "config", "contiguous", "eager_attention_forward", "getattr",
    "k_norm", "layer_idx", "q_norm", "reshape", "shape", "sinks", "sliding_window", "training", "transpose",
    "use_qk_norm", "view",
}  # fmt: skip
PROMPT = 5  # random tokens of the trial's first pass; its second has one


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """What a module's projection reads."""

    projection: Projection
    modules: dict[str, nn.Module]  # the maps and norms; if one is replaced or hooked, the module's own code runs
    addresses: dict[str, int]  # of the norms' weights
    most: int  # tokens
    device: torch.device
    dtype = torch.bfloat16

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's maps and norms are as they were: the same, at their addresses, frozen, without hooks."""
        if _has_any_global_hook():
            return False
        for name, m in self.modules.items():
            if module._modules[name] is not m or m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__:
                return False
            if type(m) is ServedLinear and not m._moepack_place.holds(m):  # type: ignore[operator, union-attr]
                return False
            if (at := self.addresses.get(name)) is not None:
                weight = m._parameters.get("weight")
                if weight is None or weight.data_ptr() != at or weight.dtype != self.dtype:
                    return False
        return not torch.is_grad_enabled() or not learns(
            *(p for m in self.modules.values() for p in m.parameters(False))
        )

    def run(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: Any, number: int, others: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values of `x`; these two are all that layer `number` of the cache then holds."""
        query, key, value = self.projection.run(x, *turn)
        return query, *((key, value) if cache is None else cache.update(key, value, number, kwargs=others))

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask of attention as it is to be given on."""
        return mask

    def attention(self, plain: Any, cache: Any, number: int) -> Any:
        """Return the function that computes attention over layer `number` of a cache, in place of torch's."""
        return plain

    def __deepcopy__(self, memo: object) -> None:
        return None


Places = Callable[[Any, bool], Any]  # from a module, and whether angles are shared, to its `_Place`, or None


def serve_projections(model: nn.Module, of: Places | None = None) -> dict[str, int]:
    """Let the kernel project what it reproduces; return the number of modules changed, by class.

    The model's linear maps, norms and attention are served already. A class is tried once for each shape of its maps.
    `of` makes the places of another device's kernel.
    """
    place_of = of or _place
    tried: dict[tuple[Any, ...], bool | None] = {}  # whether angles are shared; None where the kernel does not agree
    done: dict[str, int] = {}
    rotary = next((m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)), None)
    for module in model.modules():
        kind: Any = type(module)
        names = getattr(getattr(inspect.unwrap(kind.forward), "__code__", None), "co_names", ())
        cache = next((name for name in CACHE_NAMES if name in inspect.signature(kind.forward).parameters), None)
        if "forward" in module.__dict__ or not NEEDED <= set(names) <= KNOWN or cache is None or rotary is None:
            continue
        key = kind, *(m.out_features for m in map(module._modules.get, MAPS) if m is not None)
        if key not in tried:
            agree = (s for s in (False, True) if _agree(module, place_of(module, s), cache, rotary))
            tried[key] = next(agree, None)
        if (shared := tried[key]) is not None and (place := place_of(module, shared)) is not None:
            module._moepack_projection = place  # type: ignore[assignment]
            module.__class__ = _served(kind, cache)
            done[kind.__name__] = done.get(kind.__name__, 0) + 1
    return done


def _place(module: Any, shared: bool) -> _Place | None:
    """Return what a projection reads, with `shared` angles or not; `None` for a module that the kernel does not fit."""
    maps = [module._modules.get(name) for name in MAPS]
    norms = [module._modules.get(name) for name in NORMS]
    places = [m if isinstance(m, PackedLinear) else getattr(m, "_moepack_place", None) for m in maps]
    group = getattr(places[0], "group", None)
    found = [None if m is None else described(m) for m in norms]
    if group is None or [(getattr(p, "group", None), getattr(p, "which", -1)) for p in places] != [
        (group, i) for i in range(len(MAPS))
    ]:
        return None
    if any(m is not None and norm is None for m, norm in zip(norms, found, strict=True)):
        return None  # a norm that the kernel does not reproduce
    of = group.matrices(tuple(range(len(MAPS))))
    try:
        projection = Projection(of, module.head_dim, found, shared)
    except ValueError:
        return None
    read = {name: m for name, m in zip((*MAPS, *NORMS), (*maps, *norms), strict=True) if m is not None}
    at = {name: norm.weight.data_ptr() for name, norm in zip(NORMS, found, strict=True) if norm is not None}
    return _Place(projection, read, at, min(FEW, *of.limits[torch.bfloat16]), of.matrices[0].data.device)


@functools.cache
def _served(kind: Any, cache_name: str) -> Any:
    """Make a subclass of `kind` that projects by the kernel when its arguments allow it."""
    plain, names = kind.forward, inspect.unwrap(kind.forward).__globals__
    own = {*inspect.signature(plain).parameters} - {"kwargs"}
    code = inspect.unwrap(plain).__code__
    reads = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}  # some by `getattr(self.config, name)`
    older = {*CACHE_NAMES} - {cache_name}  # names of the cache that a decorator of `plain` may translate

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x, turn = kwargs.get("hidden_states"), kwargs.get("position_embeddings")
        place: _Place | None = self._moepack_projection
        if args or place is None or torch.compiler.is_compiling() or not older.isdisjoint(kwargs):
            return plain(self, *args, **kwargs)
        cache = kwargs.get(cache_name)
        if not _fits(x, turn, place) or not place.holds(self):
            return plain(self, *args, **kwargs)
        assert x is not None and turn is not None
        others = {name: given for name, given in kwargs.items() if name not in own}
        query, key, value = place.run(x, turn, cache, self.layer_idx, others)
        if "sliding_window" in reads:
            of = self if hasattr(self, "sliding_window") else self.config
            others["sliding_window"] = getattr(of, "sliding_window", None)
        if "sinks" in reads:
            others["s_aux"] = self.sinks
        named = self.config._attn_implementation
        attention = names[REGISTRY].get_interface(named, names["eager_attention_forward"])
        if named == "sdpa":
            attention = place.attention(attention, cache, self.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attention(
            self,
            query,
            key,
            value,
            place.mask(kwargs.get("attention_mask")),
            dropout=dropout,
            scaling=self.scaling,
            **others,
        )
        return self.o_proj(out.reshape(*x.shape[:-1], -1).contiguous()), weights

    return in_place_of(kind, forward)


def _fits(x: Any, turn: Any, place: _Place) -> bool:
    """Whether the kernel takes a pass's input and rotation."""
    if not isinstance(x, Tensor) or not isinstance(turn, tuple) or len(turn) != 2 or x.device != place.device:
        return False
    tokens = x.numel() // x.shape[-1]
    return (
        x.dtype == place.dtype
        and x.dim() == 3
        and 0 < tokens <= place.most
        and x.is_contiguous()
        and not learns(x)
        and all(t.dtype == place.dtype and t.is_contiguous() and t.numel() == tokens * t.shape[-1] for t in turn)
    )


def _agree(module: Any, place: _Place | None, cache_name: str, rotary: Any) -> bool:
    """Whether a module projects by `place` to the same numbers and the same cache, except for rounding."""
    from transformers.cache_utils import DynamicCache

    if place is None:
        return False
    kind: Any = type(module)
    generator = torch.Generator().manual_seed(0)
    outs: list[list[Tensor]] = [[], []]
    x = torch.randn(1, PROMPT + 1, module.q_proj.in_features, generator=generator).to(place.device, place.dtype)
    module._moepack_projection = place
    try:
        turn = rotary(x, torch.arange(PROMPT + 1, device=x.device)[None])
        for made, run in zip(outs, (kind.forward, _served(kind, cache_name).forward), strict=True):
            cache = DynamicCache(config=module.config)
            for part in (slice(0, PROMPT), slice(PROMPT, None)):
                given = {"hidden_states": x[:, part], "attention_mask": None, cache_name: cache}
                with torch.no_grad():
                    made.append(
                        run(module, **given, position_embeddings=tuple(t[:, part].contiguous() for t in turn))[0]
                    )
            made += [cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values]
    except Exception:  # of any kind, from a family's code
        return False
    finally:
        del module._moepack_projection
    pairs = list(zip(*outs, strict=True))
    same = all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return same and all(bool((a - b).abs().max() <= CLOSE * a.abs().max()) for a, b in pairs)
