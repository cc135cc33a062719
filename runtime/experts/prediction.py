"""What routers are asked: logits, and the next layer's routing for this layer's hidden states (dymoe, equation 6).

Calling the router itself keeps the family's scores, groups, biases and corrections.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer
from moepack.runtime.policies.reducers import Floats, Ints, Reducer, RouterOutput
from moepack.runtime.step.context import step_of
from moepack.runtime.step.counters import Counters


@dataclass(frozen=True, slots=True)
class Router:
    """A layer's router, by its parent module and name, so that a router replaced by an adapter is found."""

    parent: Any
    name: str
    experts: int
    beside: tuple[str, ...]  # the router's further arguments after hidden states, as attributes of the parent
    normed: bool = False  # whether it returns probabilities in place of logits

    @property
    def module(self) -> Any:
        """The router."""
        return getattr(self.parent, self.name)

    def logits(self, out: Any) -> Tensor | None:
        """Return the logits [tokens, experts] of what the router returned, or `None` if they are not among it."""
        found = [x for x in _tensors(out) if x.is_floating_point() and x.shape[-1] == self.experts]
        if not found:
            return None
        made = found[0].detach().reshape(-1, self.experts)
        return made.log() if self.normed else made

    def ask(self, hidden: Tensor, top_k: int) -> RouterOutput:
        """The router's choice for `hidden` [tokens, hidden].

        Hooks on the router are not called, because transformers collects routers' outputs by them.
        """
        router = self.module
        out = type(router).forward(router, hidden, *(getattr(self.parent, name) for name in self.beside))
        parts = _tensors(out)
        logits = self.logits(out)
        index = next((x for x in parts if not x.is_floating_point()), None)
        if index is None:  # logits alone
            if logits is None:
                raise ValueError("it returns nothing that is known")
            gates, index = logits.float().softmax(-1).topk(top_k, dim=-1)
            return RouterOutput(index, gates, logits)
        index = index.reshape(len(hidden), -1)
        floats = [x.reshape(len(hidden), -1) for x in parts if x.is_floating_point()]
        gates = next((x for x in floats[::-1] if x.shape == index.shape), floats[0])
        return RouterOutput(index, gates if gates.shape == index.shape else gates.gather(1, index), logits)


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]


def tell_logits(model: Any, layers: Sequence[ExpertLayer], key: object) -> None:
    """Have every layer's router tell the running step of the model with this `key` its logits (`Step.logits`).

    Raises InputError when a router is missing, cannot be called, or returns no logits.
    """
    for position, layer in enumerate(layers):
        router = _router_of(model, layer, reads_logits=True)
        router.module.register_forward_hook(partial(_tell, router, position, key))


def _tell(router: Router, position: int, key: object, module: Any, args: Any, out: Any) -> None:
    step = None if torch.compiler.is_compiling() else step_of(key)
    if step is not None:
        step.logits = position, router.logits(out)


class Prediction:
    """Predictions of the next layer's routing, and their accuracy. Serves one pass at a time."""

    def __init__(self, model: Any, layers: Sequence[ExpertLayer], sums: Sequence[Reducer]) -> None:
        """Find the routers; predict `sums` too. Raises InputError when a router is missing or cannot be called."""
        self._routers = [_router_of(model, layer) for layer in layers]
        devices = (next(router.module.parameters()).device for router in self._routers)
        self._counters = [Counters((x.experts,), sums, device) for x, device in zip(layers, devices, strict=True)]
        self._last: tuple[int, Tensor] | None = None
        # [layers], expert choices of tokens other than padding: those predicted correctly, and all with a prediction
        self.hits = np.zeros(len(layers), np.int64)
        self.choices = np.zeros(len(layers), np.int64)

    @torch.no_grad()
    def ahead(
        self, position: int, hidden: Tensor, index: Tensor, mask: Tensor | None
    ) -> tuple[Ints | None, dict[Reducer, Floats]]:
        """Predict the routing of the layer after `position`: counts and sums, [experts].

        Waits for the device. Returns `None` and no sums at the last layer.

        Args:
            position: the layer that is reached.
            hidden: [tokens, hidden], the input of its experts.
            index: [tokens, top_k], the choice of its router, which is compared with the earlier prediction.
            mask: [tokens], 0 for padding, which is not counted.
        """
        mine = slice(None) if mask is None or len(mask) != len(index) else mask != 0
        self._score(position, index, mine)
        if position + 1 == len(self._routers):
            return None, {}
        routing = self._routers[position + 1].ask(hidden, index.shape[1])
        self._last = position + 1, routing.index
        counters = self._counters[position + 1]
        counters.clear()
        counters.mask = mask
        counters.add(0, routing)
        return counters.layer(0)

    def _score(self, position: int, index: Tensor, mine: Any) -> None:
        last = self._last
        self._last = None
        if last is None or last[0] != position or last[1].shape != index.shape:
            return
        hit = (index[mine].unsqueeze(2) == last[1][mine].unsqueeze(1)).any(-1)
        self.hits[position] += int(hit.sum())
        self.choices[position] += hit.numel()

    def rates(self) -> list[float | None]:
        """For each layer, the share of choices that were predicted; `None` without predictions."""
        return [h / n if n else None for h, n in zip(self.hits.tolist(), self.choices.tolist(), strict=True)]


def _router_of(model: Any, layer: ExpertLayer, reads_logits: bool = False) -> Router:
    """Find a layer's router: a sibling of the experts with a matrix [experts, hidden]; gate and router come first."""
    above, _, own = layer.module.rpartition(".")
    parent = model.get_submodule(above)
    width = layer.matrices[0].cols
    found = [
        name
        for name, module in parent.named_children()
        if name != own and any(tuple(p.shape) == (layer.experts, width) for p in module.parameters())
    ]
    found.sort(key=lambda name: name not in ("gate", "router"))
    where = f"{type(model).__name__}'s {layer.module}"
    if not found:
        raise _refused(where, "has no router beside it")
    router = getattr(parent, found[0])
    needed = [
        p.name
        for p in list(inspect.signature(type(router).forward).parameters.values())[2:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if any(not hasattr(parent, name) for name in needed):
        raise _refused(where, f"has a router that takes {', '.join(needed)}")
    made = Router(parent, found[0], layer.experts, tuple(needed))
    parameter = next(router.parameters())
    try:
        with torch.no_grad():
            told = made.ask(torch.zeros(2, width, dtype=parameter.dtype, device=parameter.device), 1)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _refused(where, f"has a router that cannot be asked ({str(error).splitlines()[0]})") from None
    if len(told.index) != 2 or told.index.shape != told.gates.shape:
        raise _refused(where, "has a router whose answer is not understood")
    if told.logits is None:
        if reads_logits:
            raise _refused(where, "has a router that returns no logits")
        return made
    normed = bool((told.logits >= 0).all() and (told.logits.sum(-1) - 1).abs().max() < 1e-2)
    return replace(made, normed=normed)


def _refused(where: str, why: str) -> InputError:
    return InputError(
        f"the next layer cannot be predicted: {where} {why}: give the policy the option prefetch=no, or name another"
    )
