"""Norms and routers of a model on a GPU by one launch each, in place of torch's seven and more operations.

As on a CPU (norms.py), a module's name does not tell its arithmetic: when a model is loaded, each form of the kernel is
compared with the module on random rows. A form that agrees replaces the module's code; else the code stays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moepack.pack.spec import ExpertLayer
from moepack.runtime.experts.gpu import launch, takes
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.routing_triton import choose, fits, route
from moepack.runtime.kernels.step_triton import norm
from moepack.runtime.step.context import step_of

from .linears import FamilyModule, in_place_of, learns
from .norms import form_of, replace_norms
from .routers import RouterForm, router_of, routers_of
from .values import Trials

ROWS = 16  # random rows per kernel trial, and tokens that one launch routes in a trial
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
APART = {
    torch.float32: 16
}  # units in the last place by which a norm's numbers may differ; 2 of the others, as on a CPU


_norms: dict[Hashable, int | None] = {}  # forms of norms and routers that were tried in this process
_routers: dict[Hashable, RouterForm | None] = {}


def serve_norms(model: nn.Module) -> dict[str, int]:
    """Let the kernel compute the normalisations that it reproduces; return the number of modules changed, by class."""
    return replace_norms(model, FLOATS, _norms, _norm_form, _served_norm)


def _served_norm(kind: type[nn.Module], form: int, epsilon: float) -> type[nn.Module]:
    plain = kind.forward

    def forward(self: FamilyModule, x: Tensor) -> Tensor:
        weight = self.weight
        if torch.compiler.is_compiling() or x.dtype != weight.dtype or not x.numel() or learns(x, weight):
            made: Tensor = plain(self, x)
            return made
        with current(x.device):
            return norm(x.contiguous(), weight.detach(), form, epsilon)

    return in_place_of(kind, forward)


def _norm_form(module: FamilyModule, epsilon: float) -> int | None:
    with current(module.weight.device):
        return form_of(module, ROWS, lambda x, weight, form: norm(x, weight, form, epsilon), _same)


def _same(made: Tensor, wanted: Tensor) -> bool:
    """Whether a norm's numbers are the wanted ones, up to a few units in the last place."""
    apart = (made.double() - wanted.double()).abs()
    last = torch.finfo(made.dtype).eps * wanted.double().abs()
    # torch adds the squares in another order, so a number at the border of two may be rounded to the other one
    share = max(0.02, 1 / apart.numel())
    few = float((apart > last / 4).double().mean()) <= share or made.dtype == torch.float32
    return bool((apart <= APART.get(made.dtype, 2) * last + 1e-30).all()) and few


def serve_routers(model: nn.Module, layers: Sequence[ExpertLayer]) -> dict[str, int]:
    """Let one launch choose experts, count them and sort their slots; return the number of routers changed, by class.

    Routers are siblings of the modules of experts that `layers` name.
    """
    trials_of = Trials(_routers)
    for layer in layers:
        experts = model.get_submodule(layer.module)
        for module in routers_of(model, layer.module):
            if len(module.weight) != layer.experts:
                continue
            router = trials_of.result(module, functools.partial(router_of, module, _tries))
            if trials_of.count(module, router is not None):
                module.__class__ = _served_router(type(module), router, weakref.ref(experts))  # type: ignore[arg-type]
    return trials_of.done()


def _tries(router: RouterForm, logits: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield which tokens the launches choose experts for, and these with their gates: one token, a few and many."""
    tokens, experts = logits.shape
    if not fits(ROWS, router.form.top_k, experts):
        raise ValueError(f"{router.form.top_k} of {experts} experts")
    table = torch.ones(experts, dtype=torch.int64, device=logits.device)
    with current(logits.device):
        for part in (slice(0, 1), *(slice(i, i + ROWS) for i in range(0, tokens, ROWS))):
            made = route(router.form, table, ROWS, logits[part], bias, dtype=router.gates)
            yield part, made.index, made.gates
        yield slice(None), *choose(router.form, logits, bias, router.gates)


def _served_router(kind: type[nn.Module], router: RouterForm, of: Callable[[], nn.Module | None]) -> type[nn.Module]:
    plain = kind.forward

    def forward(self: FamilyModule, x: Tensor) -> object:
        experts: Any = getattr(of(), "_moepack", None)
        step = None if experts is None else step_of(experts.model)
        tokens = x.numel() // x.shape[-1]
        if step is None or not tokens or torch.compiler.is_compiling() or learns(x, self.weight):
            return plain(self, x)
        logits = router.linear(self, x.reshape(tokens, -1))
        bias = router.bias(self)
        if not takes(experts, step, tokens, router.form.top_k):
            with current(x.device):
                index, gates = choose(router.form, logits, bias, router.gates)
            return logits.to(router.logits), gates, index
        count = bool(experts.passes_on)
        made = launch(experts, step, router.form, count, logits=logits, bias=bias, dtype=router.gates)
        step.routed = experts.position, made, count
        return logits.to(router.logits), made.gates, made.index

    return in_place_of(kind, forward)
