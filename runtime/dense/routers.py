"""Routers of a served model: what a family's router computes is found by trial, and computed by a kernel.

A router multiplies by its weights, scores experts, chooses the best and weighs them. A module's name does not tell how,
so a copy of it with random weights is compared with each candidate on random tokens. The kernels are those of
borrowed.py on a CPU, and of gpu_modules.py on a GPU.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.forms import Routing

from .linears import FamilyModule
from .values import near

ROUTERS = ("gate", "router")  # their names beside experts
ROWS = 64  # random tokens of a trial


@dataclass(frozen=True, slots=True)
class RouterForm:
    """How experts and gates are made as a family's router makes them."""

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

    def bias(self, module: FamilyModule) -> Tensor | None:
        """Return what is added to scores for the choice alone, if anything is."""
        return None if self.correction is None else getattr(module, self.correction)


# What a router's choices are for some tokens of a trial, by logits and bias: which tokens, experts, gates
Tries = Callable[[RouterForm, Tensor, Tensor | None], Iterable[tuple[slice, Tensor, Tensor]]]


def routers_of(model: nn.Module, experts: str) -> Iterator[FamilyModule]:
    """Yield the routers beside a module of experts, given by its name."""
    for last, module in model.get_submodule(experts.rpartition(".")[0]).named_children():
        weight = getattr(module, "weight", None)
        known = last in ROUTERS and isinstance(weight, Tensor) and weight.dim() == 2
        if known and "forward" not in module.__dict__:
            yield module


def router_of(module: FamilyModule, tries: Tries, in_order: bool = False) -> RouterForm | None:
    """Return the first candidate by which `tries` makes what a router makes; None if there is none.

    With `in_order` a token's experts are in the router's own order, and of equal scores the same are chosen.
    """
    if not isinstance(getattr(module, "top_k", None), int) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    trial = _Trial.of(module)
    for router in _candidates(module, len(module.weight)):
        if trial.agrees(router, tries, in_order):
            return router
        if in_order:
            unordered = replace(router, form=replace(router.form, ordered=False))
            if trial.agrees(unordered, tries, in_order):
                return unordered
    return None


def _candidates(module: FamilyModule, experts: int) -> Iterator[RouterForm]:
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
    # weights in float32 are multiplied by tokens of any dtype in float32
    widths = (True,) if module.weight.dtype == torch.float32 else (False, True)
    grouping = [(1, 1, "max")] if groups == 1 else [(groups, kept, "max"), (groups, kept, "two"), (1, 1, "max")]
    for wide, score, normed, (n, of, by) in itertools.product(
        widths, ("softmax", "sigmoid", "top"), (True, False), grouping
    ):
        if score == "top" and normed:
            continue
        form = Routing(module.top_k, score, normed, float(scale or 1.0), correction is not None, n, of or 1, by)
        for logits, gates in itertools.product(dtypes, dtypes):
            yield RouterForm(form, wide, correction, logits, gates)


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
        x = torch.randn(ROWS, probe.weight.shape[1], generator=generator).to(**like)
        with torch.no_grad():
            logits, gates, index = probe(x)
        if index.dtype != torch.int64 or not index.shape == gates.shape == (len(x), probe.top_k):
            raise ValueError(f"{type(module).__name__} does not choose {probe.top_k} experts")
        return _Trial(probe, x, logits, gates, index)

    def agrees(self, router: RouterForm, tries: Tries, in_order: bool) -> bool:
        """Whether a candidate's choices are the router's own."""
        if (self.logits.dtype, self.gates.dtype) != (router.logits, router.gates):
            return False
        with torch.no_grad():
            mine = router.linear(self.module, self.x)
            if not near(mine, self.logits) or not _as_exact(mine, self.logits):
                return False
            try:
                made = tries(router, self.logits.to(mine.dtype), router.bias(self.module))
                return all(self._agrees(*some, in_order) for some in made)
            except Exception:  # of any kind, from a compiler
                return False

    def _agrees(self, part: slice, index: Tensor, gates: Tensor, in_order: bool) -> bool:
        """Whether these are the choices of some tokens, and their gates; some routers do not sort their choices."""
        wanted = self.index[part]
        if in_order:
            return torch.equal(wanted, index) and near(gates, self.gates[part])
        order = wanted.argsort(-1)
        own = index.argsort(-1)
        same = torch.equal(wanted.gather(1, order), index.gather(1, own))
        return same and near(gates.gather(1, own), self.gates[part].gather(1, order))


def _as_exact(mine: Tensor, wanted: Tensor) -> bool:
    """Whether most logits are the same, if a router keeps them in float32: both compute in it, or neither."""
    if wanted.dtype != torch.float32:
        return True
    apart = (mine.float() - wanted).abs()
    return float((apart <= 2.0**-12 * wanted.abs()).float().mean()) > 0.9
