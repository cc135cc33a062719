"""Norms and routers of a model on a GPU by one launch each, in place of torch's seven and more operations.

As on a CPU (norms.py), a module's name does not tell its arithmetic: when a model is loaded, each form of the kernel is
compared with the module on random rows. A form that agrees replaces the module's code; else the code stays.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moepack.pack.spec import ExpertLayer
from moepack.runtime.experts.gpu import launch, takes
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.routing_triton import Routing, choose, fits, route
from moepack.runtime.kernels.step_triton import norm
from moepack.runtime.step.context import step_of

from .linears import FamilyModule, in_place_of, learns
from .norms import FORMS, replace_norms, trials
from .values import Trials

ROWS = 16  # random rows per kernel trial
TRIALS = 4  # trials per router
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
APART = {
    torch.float32: 16
}  # units in the last place by which a norm's numbers may differ; 2 of the others, as on a CPU
CLOSE = 2.0**-6  # the greatest difference of two gates, as a share of the greatest; more than BF16's last place


_norms: dict[Hashable, int | None] = {}  # forms of norms and routers that were tried in this process
_routers: dict[Hashable, _Router | None] = {}


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
    """The kernel's form that agrees with the module on random weights and rows; `None` if no form does."""
    with current(module.weight.device):
        found = list(trials(module, ROWS))
        agree = (f for f in FORMS if all(_same(norm(x, p.weight, f, epsilon), wanted) for p, x, wanted in found))
        return next(agree, None)


def _same(made: Tensor, wanted: Tensor) -> bool:
    """Whether a norm's numbers are the wanted ones, up to a few units in the last place."""
    apart = (made.double() - wanted.double()).abs()
    last = torch.finfo(made.dtype).eps * wanted.double().abs()
    # torch adds the squares in another order, so a number at the border of two may be rounded to the other one
    share = max(0.02, 1 / apart.numel())
    few = float((apart > last / 4).double().mean()) <= share or made.dtype == torch.float32
    return bool((apart <= APART.get(made.dtype, 2) * last + 1e-30).all()) and few


@dataclass(frozen=True, slots=True)
class _Router:
    """How the launch makes what a router makes."""

    form: Routing
    wide: bool  # whether logits are computed in float32
    correction: str | None  # the name of a bias of the choice, float32 [experts]
    logits: torch.dtype  # of the logits and gates that the router returns
    gates: torch.dtype

    def linear(self, module: FamilyModule, x: Tensor) -> Tensor:
        """Compute logits, [tokens, experts]."""
        weight = module.weight
        bias = getattr(module, "bias", None)
        if self.wide:
            x = x.float()
            weight = weight.float()
            bias = None if bias is None else bias.float()
        return nn.functional.linear(x, weight, bias)


def serve_routers(model: nn.Module, layers: Sequence[ExpertLayer]) -> dict[str, int]:
    """Let one launch choose experts, count them and sort their slots; return the number of routers changed, by class.

    Routers are siblings of the modules of experts that `layers` name.
    """
    trials_of = Trials(_routers)
    for layer in layers:
        parent = model.get_submodule(layer.module.rpartition(".")[0])
        experts = model.get_submodule(layer.module)
        for last, module in parent.named_children():
            weight = getattr(module, "weight", None)
            top_k = getattr(module, "top_k", None)
            if last not in ("gate", "router") or not isinstance(weight, Tensor) or not isinstance(top_k, int):
                continue
            if "forward" in module.__dict__ or weight.dim() != 2 or len(weight) != layer.experts:
                continue
            router = trials_of.result(module, functools.partial(_router_of, module, layer.experts))
            if trials_of.count(module, router is not None):
                module.__class__ = _served_router(type(module), router, weakref.ref(experts))  # type: ignore[arg-type]
    return trials_of.done()


def _router_of(module: FamilyModule, experts: int) -> _Router | None:
    """Return the first candidate that makes what a router makes."""
    trial = _Trial.of(module)
    return next(filter(trial.agrees, _candidates(module, experts)), None)


def _candidates(module: FamilyModule, experts: int) -> Iterator[_Router]:
    groups = next(
        (g for n in ("num_group", "n_group", "num_groups") if isinstance(g := getattr(module, n, None), int)), 1
    )
    kept = getattr(module, "topk_group", None)
    scale = getattr(module, "routed_scaling_factor", None)
    tensors = {**module._parameters, **module._buffers}
    correction = next((n for n in tensors if "correction" in n and tensors[n] is not None), None)
    if correction is not None and (tensors[correction].shape, tensors[correction].dtype) != ((experts,), torch.float32):
        return
    if groups > 1 and (not isinstance(kept, int) or experts % groups or experts // groups < 2 or groups > 16):
        groups = 1
    dtypes = dict.fromkeys((module.weight.dtype, torch.float32))
    grouping = [(1, 1, "max")] if groups == 1 else [(groups, kept, "max"), (groups, kept, "two"), (1, 1, "max")]
    for wide, score, normed, (n, of, by) in itertools.product(
        (False, True), ("softmax", "sigmoid", "top"), (True, False), grouping
    ):
        if score == "top" and normed:
            continue
        form = Routing(module.top_k, score, normed, float(scale or 1.0), correction is not None, n, of or 1, by)
        for logits, gates in itertools.product(dtypes, dtypes):
            yield _Router(form, wide, correction, logits, gates)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Return the routing of random tokens by a router with random weights."""

    module: FamilyModule
    x: Tensor
    logits: Tensor
    gates: Tensor
    index: Tensor

    @staticmethod
    def of(module: FamilyModule) -> _Trial:
        """Run a copy of a router; raise if it is not understood."""
        generator = torch.Generator().manual_seed(0)
        probe = copy.deepcopy(module)
        for tensor in (*probe.parameters(), *probe.buffers()):
            spread = 0.2 if tensor.dim() == 1 else 2 * tensor.shape[-1] ** -0.5
            tensor.data = (torch.randn(tensor.shape, generator=generator) * spread).to(tensor.device, tensor.dtype)
        like = {"device": probe.weight.device, "dtype": probe.weight.dtype}
        x = torch.randn(ROWS * TRIALS, probe.weight.shape[1], generator=generator).to(**like)
        with torch.no_grad(), current(probe.weight.device):
            logits, gates, index = probe(x)
        if index.dtype != torch.int64 or not index.shape == gates.shape == (len(x), probe.top_k):
            raise ValueError(f"{type(module).__name__} does not choose {probe.top_k} experts")
        return _Trial(probe, x, logits, gates, index)

    def agrees(self, router: _Router) -> bool:
        """Whether the launch makes the same of one token, of a few and of many."""
        module = self.module
        device = self.x.device
        experts = len(module.weight)
        if not fits(ROWS, router.form.top_k, experts) or len(inspect.signature(module.forward).parameters) != 1:
            return False
        if (self.logits.dtype, self.gates.dtype) != (router.logits, router.gates):
            return False
        table = torch.ones(experts, dtype=torch.int64, device=device)
        bias = None if router.correction is None else getattr(module, router.correction)
        with torch.no_grad(), current(device):
            mine = router.linear(module, self.x)
            if not _near(mine, self.logits):
                return False
            logits = self.logits.to(mine.dtype)
            for part in (slice(0, 1), *(slice(i, i + ROWS) for i in range(0, len(self.x), ROWS))):
                try:
                    made = route(router.form, table, ROWS, logits[part], bias, dtype=router.gates)
                except Exception:  # of any kind, from a compiler
                    return False
                if not self._agrees(part, made.index, made.gates):
                    return False
            return self._agrees(slice(None), *choose(router.form, logits, bias, router.gates))

    def _agrees(self, part: slice, index: Tensor, gates: Tensor) -> bool:
        """Whether these are the choices of some tokens, and their gates; some routers do not sort their choices."""
        order = self.index[part].argsort(-1)
        own = index.argsort(-1)
        same = torch.equal(self.index[part].gather(1, order), index.gather(1, own))
        return same and _near(gates.gather(1, own), self.gates[part].gather(1, order))


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a.float() - b.float()).abs().max() <= CLOSE * b.float().abs().max())


def _served_router(kind: type[nn.Module], router: _Router, of: Callable[[], nn.Module | None]) -> type[nn.Module]:
    plain = kind.forward

    def forward(self: FamilyModule, x: Tensor) -> object:
        experts: Any = getattr(of(), "_moepack", None)
        step = None if experts is None else step_of(experts.model)
        tokens = x.numel() // x.shape[-1]
        if step is None or not tokens or torch.compiler.is_compiling() or learns(x, self.weight):
            return plain(self, x)
        logits = router.linear(self, x.reshape(tokens, -1))
        bias = None if router.correction is None else getattr(self, router.correction)
        if not takes(experts, step, tokens, router.form.top_k):
            with current(x.device):
                index, gates = choose(router.form, logits, bias, router.gates)
            return logits.to(router.logits), gates, index
        count = bool(experts.passes_on)
        made = launch(experts, step, router.form, count, logits=logits, bias=bias, dtype=router.gates)
        step.routed = experts.position, made, count
        return logits.to(router.logits), made.gates, made.index

    return in_place_of(kind, forward)
