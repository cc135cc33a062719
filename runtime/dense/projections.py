"""Queries, keys and values of a few tokens by one kernel call, in attention modules whose code does just that.

Such a module projects its input by three maps, normalises and rotates queries and keys, appends keys and values to the
cache, and calls attention. The steps before the cache become one call here. A module is known by the names that its
code reads: a name beyond KNOWN may be a step that the kernel lacks, and the module stays as it is. So it does if its
results on random input differ by more than rounding: of a prompt, of one token and of a few after it, without a mask
and with that of two padded sequences. Modules that differ in nothing but weights share a trial (values.py).
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moepack.families.arguments import CACHE_NAMES, REGISTRY
from moepack.runtime.kernels.forms import Norm
from moepack.runtime.kernels.token_native import LatentProjection, Projection, is_turn

from .borrowed import Attention
from .linears import FEW, FamilyModule, Uncopied, in_place_of, is_observed, learns
from .norms import described
from .packed import matrices_of
from .values import Trials, near

if TYPE_CHECKING:
    from transformers import Cache

MAPS = ("q_proj", "k_proj", "v_proj")
NORMS = ("q_norm", "k_norm")
ATTENDS = {"get_interface", "o_proj", "scaling", "update"}
PLAIN = {
    REGISTRY,
    "_attn_implementation",
    "attention_dropout",
    "config",
    "contiguous",
    "eager_attention_forward",
    "layer_idx",
    "reshape",
    "shape",
    "training",
    "transpose",
    "view",
}
NEEDED = ATTENDS | {*MAPS, "apply_rotary_pos_emb", "head_dim"}
KNOWN = NEEDED | PLAIN | {"getattr", "k_norm", "q_norm", "sinks", "sliding_window", "use_qk_norm"}
NUMBER = "layer_idx"
TOKENS = (5, 1, 3)  # random tokens of a trial's passes, one after another


@dataclass(eq=False)
class Projections(Uncopied):
    """What a kernel reads of one module's projections, and what it makes of them."""

    modules: dict[str, FamilyModule]  # the maps and norms; if one is replaced or hooked, the module's own code runs
    most: int  # tokens
    device: torch.device
    dtype = torch.bfloat16
    angles = 0  # numbers of a token's rotation with which the module was tried
    writes_static = False  # whether a launch, not a static cache's own code, writes keys and values into it

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's maps and norms are as they were: the same, at their addresses, frozen, without hooks."""
        return not _has_any_global_hook() and all(
            not is_observed(m) and module._modules[name] is m and self._reads(name, m)
            for name, m in self.modules.items()
        )

    def _reads(self, name: str, module: FamilyModule) -> bool:
        """Whether the weights of a map or norm are those that the kernel reads."""
        raise NotImplementedError

    def follows(self, module: FamilyModule) -> bool:
        """Whether what the module's code asks for, beside weights, is still what it was when it was tried."""
        return True

    def run(
        self, module: FamilyModule, x: Tensor, turn: Any, cache: Cache | None, others: dict[str, object]
    ) -> tuple[Any, ...]:
        """Return queries, keys and values of `x`; these two are all that the module's layer of the cache then holds.

        Of a latent layer, `Latents` (latent.py) stand for both.
        """
        raise NotImplementedError

    def takes(self, turn: object, tokens: int) -> bool:
        """Whether the kernel takes a rotation, cosines and sines, of so many tokens."""
        if not isinstance(turn, tuple) or len(turn) != 2:
            return False
        return all(is_turn(t, self.dtype, tokens, self.angles) for t in turn)

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask of attention as it is to be given on."""
        return mask

    def attention(self, plain: Attention, cache: object, number: int) -> Attention:
        """Return the function that computes attention over layer `number` of a cache, in place of torch's."""
        return plain


@dataclass(eq=False)
class CpuProjections(Projections):
    """What the kernels read of a module on a CPU."""

    projection: Projection | LatentProjection
    addresses: dict[str, int]  # of the norms' weights

    def _reads(self, name: str, module: FamilyModule) -> bool:
        place = getattr(module, "_moepack_place", None)
        if place is not None and not place.holds(module):
            return False
        at = self.addresses.get(name)
        weight = module._parameters.get("weight")
        if at is not None and (weight is None or weight.data_ptr() != at or weight.dtype != self.dtype):
            return False
        return not torch.is_grad_enabled() or not learns(*module.parameters(False))

    def run(
        self, module: FamilyModule, x: Tensor, turn: Any, cache: Cache | None, others: dict[str, object]
    ) -> tuple[Any, ...]:
        """Project by one call."""
        assert isinstance(self.projection, Projection)
        query, key, value = self.projection.run(x, *turn)
        return query, *((key, value) if cache is None else cache.update(key, value, module.layer_idx, kwargs=others))


@dataclass(frozen=True, slots=True)
class Ways:
    """How kernels may make the projections of modules of a kind."""

    needed: Collection[str]  # names that the code of such a module reads
    known: Collection[str]  # all names that it may read
    # What may make a module's results by way number `n`; None where the kernel does not fit
    place: Callable[[FamilyModule, int], Projections | None]
    count: int


def serve_projections(model: nn.Module, ways: Ways | None = None) -> dict[str, int]:
    """Replace the modules whose projections the kernel reproduces; return how many were changed, by class.

    The model's linear maps, norms and attention are served already. `ways` are those of another kind, or device.
    """
    of = ways or Ways(NEEDED, KNOWN, _place, 2)
    trials = Trials[tuple[int, int]]()
    rotary = next((m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)), None)
    for module in model.modules():
        kind: Any = type(module)
        cache = cache_argument(module, of.needed, of.known)
        if cache is None:
            continue
        trial = functools.partial(_trial, module, of, cache, rotary)
        found = trials.result(module, trial, without=NUMBER if _only_for_the_cache(module) else "")
        place = None if found is None else of.place(module, found[0])
        if trials.count(module, place is not None):
            assert place is not None and found is not None
            place.angles = found[1]
            module._moepack_projection = place  # type: ignore[assignment]
            module.__class__ = _served(kind, cache)
    return trials.done()


def cache_argument(module: nn.Module, needed: Collection[str], known: Collection[str]) -> str | None:
    """Return by which name a module's own code is given a cache; None for code that reads other names than these."""
    kind: Any = type(module)
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or "forward" in module.__dict__ or not set(needed) <= {*code.co_names} <= set(known):
        return None
    return next((name for name in CACHE_NAMES if name in inspect.signature(kind.forward).parameters), None)


def _only_for_the_cache(module: nn.Module) -> bool:
    """Whether a module's code reads the layer's number only once: to give it to the cache that it calls."""
    code = inspect.unwrap(type(module).forward)
    return [step.argval for step in dis.get_instructions(code)].count(NUMBER) == 1


def _place(module: FamilyModule, shared: int) -> CpuProjections | None:
    """Return what a projection reads, with `shared` angles or not; `None` for a module that the kernel does not fit."""
    of = matrices_of(module, *MAPS)
    norms = norms_of(module, *NORMS)
    if of is None or norms is None:
        return None
    try:
        projection = Projection(of, module.head_dim, norms, bool(shared))
    except ValueError:
        return None
    return place_of(CpuProjections, module, projection, (*MAPS, *NORMS), of.limits[torch.bfloat16])


def norms_of(module: FamilyModule, *names: str) -> list[Norm | None] | None:
    """Return the normalisations of these names as kernels read them, None for each that is not there.

    Return None if one of them is no kernel's.
    """
    modules = [module._modules.get(name) for name in names]
    found = [None if m is None else described(m) for m in modules]
    return None if any(m is not None and f is None for m, f in zip(modules, found, strict=True)) else found


P = TypeVar("P", bound=CpuProjections)


def place_of(kind: type[P], module: FamilyModule, projection: Any, names: Sequence[str], limits: Sequence[int]) -> P:
    """Return what `projection` reads: the module's maps and norms of these `names`. `limits` are tokens."""
    read = {name: m for name in names if (m := module._modules.get(name)) is not None}
    at = {name: found.weight.data_ptr() for name, m in read.items() if (found := described(m)) is not None}
    return kind(read, min(FEW, *limits), torch.device("cpu"), projection, at)


@functools.cache
def _served(kind: type[nn.Module], cache_name: str) -> type[nn.Module]:
    """Make a subclass of `kind` that projects by the kernel when its arguments allow it."""
    plain = kind.forward
    names = inspect.unwrap(kind.forward).__globals__
    own = {*inspect.signature(plain).parameters} - {"kwargs"}
    code = inspect.unwrap(plain).__code__
    reads = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}  # some by `getattr(self.config, name)`
    older = {*CACHE_NAMES} - {cache_name}  # names of the cache that a decorator of `plain` may translate

    @functools.wraps(plain)
    def forward(self: FamilyModule, *args: object, **kwargs: Any) -> object:
        x = kwargs.get("hidden_states")
        turn = kwargs.get("position_embeddings")
        place: Projections | None = self._moepack_projection
        if args or place is None or torch.compiler.is_compiling() or not older.isdisjoint(kwargs):
            return plain(self, *args, **kwargs)
        cache = kwargs.get(cache_name)
        if not _fits(x, turn, place) or not place.holds(self) or not place.follows(self):
            return plain(self, *args, **kwargs)
        assert x is not None
        others = {name: given for name, given in kwargs.items() if name not in own}
        query, key, value = place.run(self, x, turn, cache, others)
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


def _fits(x: object, turn: object, place: Projections) -> bool:
    """Whether the kernel takes a pass's input and rotation."""
    if not isinstance(x, Tensor) or x.device != place.device:
        return False
    tokens = x.numel() // x.shape[-1]
    return (
        x.dtype == place.dtype
        and x.dim() == 3
        and 0 < tokens <= place.most
        and x.is_contiguous()
        and not learns(x)
        and place.takes(turn, tokens)
    )


def _trial(module: FamilyModule, ways: Ways, cache_name: str, rotary: nn.Module | None) -> tuple[int, int] | None:
    """Return by which way a module's own results come, and how many angles a token has; None if by none."""
    for way in range(ways.count):
        place = ways.place(module, way)
        if place is not None and _agrees(module, place, cache_name, rotary):
            return way, place.angles
    return None


def _agrees(module: FamilyModule, place: Projections, cache_name: str, rotary: nn.Module | None) -> bool:
    """Whether a module's own results, and what it leaves in a cache, are those of `place`; its `angles` are set."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

    kind: Any = type(module)
    module._moepack_projection = place
    total = sum(TOKENS)
    config = module.config
    cases: list[tuple[Callable[[], Cache], int]] = [(lambda: DynamicCache(config=config), n) for n in (1, 2)]
    if place.writes_static and type(DynamicCache(config=config).layers[module.layer_idx]) is DynamicLayer:
        cases.append((lambda: StaticCache(config=config, max_cache_len=total), 2))
    generator = torch.Generator().manual_seed(0)
    try:
        for make, batch in cases:
            x = torch.randn(batch, total, module.o_proj.out_features, generator=generator).to(place.device, place.dtype)
            first = torch.arange(batch, device=x.device)[:, None]  # the second sequence begins with padding
            turn = None
            if rotary is not None:
                turn = rotary(x, (torch.arange(total, device=x.device) - first).clamp(min=0))
                place.angles = turn[0].shape[-1]
            if not place.takes(turn, batch * total):
                return False
            wanted, got = (
                _passes(module, run, x, turn, make(), cache_name, None if batch == 1 else first)
                for run in (kind.forward, _served(kind, cache_name).forward)
            )
            # where all numbers are zero, as of weights of zeros, any code would agree
            if not all(near(b, a) and a.dtype == b.dtype and bool(a.any()) for a, b in zip(wanted, got, strict=True)):
                return False
    except Exception:  # of any kind, from a family's code
        return False
    finally:
        del module._moepack_projection
    return True


def _passes(
    module: FamilyModule,
    run: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    turn: Tensor | Sequence[Tensor] | None,
    cache: Cache,
    cache_name: str,
    first: Tensor | None,
) -> list[Tensor]:
    """Return what a module's passes make of `x`, and the keys and values that the cache then holds.

    `first` is the number of each sequence's first token that is no padding, [batch, 1]; None for passes without a mask.
    """
    layer = cache.layers[module.layer_idx]
    out = []
    start = 0
    for tokens in TOKENS:
        part = slice(start, start + tokens)
        mask = None if first is None else _mask(layer, part, first)
        given: dict[str, Any] = {"hidden_states": x[:, part].contiguous(), "attention_mask": mask, cache_name: cache}
        if isinstance(turn, Tensor):
            given["position_embeddings"] = turn[:, part].contiguous()
        elif turn is not None:
            given["position_embeddings"] = tuple(t[:, part].contiguous() for t in turn)
        with torch.no_grad():
            out.append(run(module, **given)[0])
        start += tokens
    return [*out, layer.keys, layer.values]


def _mask(layer: object, part: slice, first: Tensor) -> Tensor:
    """Return which of a layer's keys the tokens of a pass see, bool [batch, 1, tokens, keys]."""
    window = getattr(layer, "sliding_window", None) or sum(TOKENS)
    seen = range(max(0, part.start - window + 1), part.stop)
    if hasattr(layer, "max_cache_len"):
        seen = range(sum(TOKENS))
    keys, queries = (torch.tensor(list(of), device=first.device) for of in (seen, range(part.start, part.stop)))
    ago = queries[:, None] - keys
    mask = (ago >= 0) & (ago < window) & (keys >= first[:, :, None]) | (ago == 0)  # padding sees itself
    return mask[:, None]
