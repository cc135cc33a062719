"""What a decoder layer's code does around its parts, found by running it with stand-ins for them.

A stand-in returns random numbers and notes what it was given. So a trial needs no weights, and shows whether the layer
adds attention of its normalised input, and experts of the sum's, and what it hands on.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .linears import FamilyModule
from .routers import ROUTERS

MIXERS = ("self_attn", "linear_attn")
SHARED = ("shared_expert", "shared_experts")
SHARED_GATE = "shared_expert_gate"
EXPERTS = ("hidden_states", "top_k_index", "top_k_weights")  # what a module of experts is given


@dataclass(frozen=True, slots=True)
class Structure:
    """What a trial found of a layer's code: h = x + mixer(norm(x)), and h + block(norm(h))."""

    mixer: str  # the name of attention, or of what stands in its place
    given: frozenset[str]  # what it is given of the layer's own named arguments
    router: str | None  # the name of the router in a block of a router, experts, and perhaps a shared one
    shared: str | None = None  # the name of the shared expert


def named_arguments(forward: Callable[..., object]) -> dict[str, object]:
    """Return the arguments that a layer's code names, with their defaults; none of code that takes any positions."""
    found = [p for p in inspect.signature(forward).parameters.values() if p.name != "self"]
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in found):
        return {}
    return {p.name: p.default for p in found if p.kind is not p.VAR_KEYWORD}


class _StandIn(nn.Module):
    """Returns something, and notes what it was given."""

    made: Callable[[Tensor], object]
    args: tuple[Any, ...] = ()
    given: Mapping[str, Any] = {}

    @staticmethod
    def of(module: nn.Module, made: Callable[[Tensor], object]) -> _StandIn:
        """Return a stand-in for a module, of a class derived from the module's: code may ask for it."""
        kind: Any = type(module)
        found: _StandIn = object.__new__(type(kind.__name__, (_StandIn, kind), {}))
        nn.Module.__init__(found)
        found.train(module.training)
        found.made = made
        return found

    def forward(self, *args: Any, **given: Any) -> object:
        """Return what is made for the input."""
        self.args = args
        self.given = given
        return self.made(self.input)

    @property
    def input(self) -> Tensor:
        """The hidden states that it was given."""
        found: Tensor = self.args[0] if self.args else self.given["hidden_states"]
        return found


def _returned(made: Tensor, pair: bool, given: Tensor) -> object:
    return (made, None) if pair else made


def _with(module: nn.Module, stand_ins: dict[str, _StandIn], run: Callable[[], Any]) -> Any:
    """Return what `run` returns while parts of a module are replaced."""
    own = {name: module._modules[name] for name in stand_ins}
    try:
        module._modules.update(stand_ins)
        with torch.no_grad():
            return run()
    finally:
        module._modules.update(own)


def structure_of(module: FamilyModule, cache_name: str) -> Structure | None:
    """Return what a layer's code does around its parts; None if it is anything else than DecoderLayer says."""
    kind: Any = type(module)
    name = next(name for name in MIXERS if name in module._modules)
    generator = torch.Generator().manual_seed(0)
    x, y, z = torch.randn(3, 1, 2, len(module.input_layernorm.weight), generator=generator).bfloat16()
    own = {*inspect.signature(kind.forward).parameters}
    other = "output_router_logits"  # is handed on as any argument that the layer does not name
    names = ("attention_mask", "position_ids", cache_name, "position_embeddings", "use_cache")
    # Each is handed on as it is, or not at all: code that looks into one fails
    given: dict[str, Any] = {name: object() for name in names} | {other: False}
    for pairs in itertools.product((True, False), (False, True)):
        try:
            mixer = _StandIn.of(module._modules[name], functools.partial(_returned, y, pairs[0]))
            mlp = _StandIn.of(module.mlp, functools.partial(_returned, z, pairs[1]))
            out = _with(module, {name: mixer, "mlp": mlp}, functools.partial(kind.forward, module, x, **given))
            handed = mixer.given.keys() - {"hidden_states"}
            with torch.no_grad():
                h = x + y
                wanted = (module.input_layernorm(x), module.post_attention_layernorm(h), h + z)
            alike = all(map(_equal, wanted, (mixer.input, mlp.input, out)))
        except Exception:  # of any kind, from a family's code
            continue
        alone = len(mlp.args) + len(mlp.given) == 1 and not mixer.args
        alone = alone and all(mixer.given[n] is given[n] for n in handed & given.keys())
        if alike and alone and given.keys() - own <= handed <= given.keys():
            blocks = {_block(module.mlp, x, pairs[1], gated) for gated in (torch.bfloat16, torch.float32)}
            block = blocks.pop() if len(blocks) == 1 else None
            return Structure(name, frozenset(handed), *(block or (None, None)))
    return None


def _block(mlp: FamilyModule, x: Tensor, pairs: bool, gated: torch.dtype) -> tuple[str, str | None] | None:
    """Return the names of a block's router and shared expert, if it adds what they and the experts return, no more.

    The router's gates are in the dtype `gated`.
    """
    router = next((name for name in ROUTERS if name in mlp._modules), None)
    shared = next((name for name in SHARED if name in mlp._modules), None)
    gate = SHARED_GATE if SHARED_GATE in mlp._modules else None
    if router is None or set(mlp._modules) != {router, "experts"} | ({shared, gate} - {None}):
        return None
    rows = x[0]
    generator = torch.Generator().manual_seed(1)
    made, added = torch.randn(2, *rows.shape, generator=generator).bfloat16()
    weight = torch.randn(len(rows), 1, generator=generator).bfloat16()
    index = torch.zeros(2, 2, dtype=torch.int64)
    gates = torch.ones(2, 2, dtype=gated)
    makes: dict[str, Callable[[Tensor], object]] = {
        router: lambda _: (torch.ones(2, 4), gates, index),
        "experts": lambda _: made,
        shared or "": lambda given: added.view(given.shape),
        gate or "": lambda given: weight.view(*given.shape[:-1], 1),
    }
    try:
        parts = {name: _StandIn.of(mlp._modules[name], make) for name, make in makes.items() if name}
        out = _with(mlp, parts, functools.partial(mlp, x))
        found = {**dict(zip(EXPERTS, parts["experts"].args, strict=False)), **parts["experts"].given}
        alone = all(len(part.args) == 1 and not part.given for name, part in parts.items() if name != "experts")
        handed_on = alone and found.keys() == {*EXPERTS} and found["top_k_index"] is index
        handed_on = handed_on and found["top_k_weights"] is gates
        inputs = all(_equal(part.input.reshape(rows.shape), rows) for part in parts.values())
        wanted = made
        if shared is not None:
            wanted = made + (added if gate is None else weight.sigmoid() * added)
        alike = _equal(out[0] if pairs else out, wanted.view(x.shape))
    except Exception:  # of any kind, from a family's code
        return None
    return (router, shared) if handed_on and inputs and alike else None


def _equal(a: object, b: object) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
