"""Prediction of the next layer's routing: the next router is called on this layer's hidden states (dymoe, equation 6).

Calling the router itself keeps the family's scores, groups, biases and corrections.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer


@dataclass(frozen=True, slots=True)
class Router:
    """A layer's router, by its parent module and name, so that a router replaced by an adapter is found."""

    parent: Any
    name: str
    beside: tuple[str, ...]  # the router's further arguments after hidden states, as attributes of the parent

    def ask(self, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The router's choice for `hidden` [tokens, hidden]: experts and their weights, [tokens, top_k].

        Hooks on the router are not called, because transformers collects routers' outputs by them.
        """
        router = getattr(self.parent, self.name)
        out = type(router).forward(router, hidden, *(getattr(self.parent, name) for name in self.beside))
        parts = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        index = next((x for x in parts if not x.is_floating_point()), None)
        if index is None:  # logits alone
            gates, index = parts[0].reshape(len(hidden), -1).float().softmax(-1).topk(top_k, dim=-1)
            return index, gates
        index = index.reshape(len(hidden), -1)
        floats = [x.reshape(len(hidden), -1) for x in parts if x.is_floating_point()]
        gates = next((x for x in floats[::-1] if x.shape == index.shape), floats[0])
        return index, gates if gates.shape == index.shape else gates.gather(1, index)


class Prediction:
    """Predictions of the next layer's routing, and their accuracy. Serves one pass at a time."""

    def __init__(self, model: Any, layers: Sequence[ExpertLayer]) -> None:
        """Find the routers. Raises InputError when a router is missing or cannot be called."""
        self._layers = tuple(layers)
        self._routers = [_router_of(model, layer) for layer in layers]
        self._last: tuple[int, Tensor] | None = None
        # [layers], expert choices of tokens other than padding: those predicted correctly, and all with a prediction
        self.hits = np.zeros(len(layers), np.int64)
        self.choices = np.zeros(len(layers), np.int64)

    @torch.no_grad()
    def ahead(
        self, position: int, hidden: Tensor, index: Tensor, mask: Tensor | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | tuple[None, None]:
        """Predict the routing of the layer after `position`: counts and sums of gate weights, [experts].

        Waits for the device. Returns (None, None) at the last layer.

        Args:
            position: the layer that is reached.
            hidden: [tokens, hidden], the input of its experts.
            index: [tokens, top_k], the choice of its router, which is compared with the earlier prediction.
            mask: [tokens], 0 for padding, which is not counted.
        """
        mine = slice(None) if mask is None or len(mask) != len(index) else mask != 0
        self._score(position, index, mine)
        if position + 1 == len(self._routers):
            return None, None
        chosen, gates = self._routers[position + 1].ask(hidden, index.shape[1])
        self._last = position + 1, chosen
        experts = self._layers[position + 1].experts
        flat = chosen[mine].reshape(-1).clamp(max=experts).cpu().numpy()
        weights = gates[mine].reshape(-1).double().cpu().numpy()
        counts = np.bincount(flat, minlength=experts + 1)[:experts].astype(np.int64)
        return counts, np.bincount(flat, weights, minlength=experts + 1)[:experts].astype(np.float64)

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


def _router_of(model: Any, layer: ExpertLayer) -> Router:
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
    made = Router(parent, found[0], tuple(needed))
    parameter = next(router.parameters())
    try:
        with torch.no_grad():
            index, gates = made.ask(torch.zeros(2, width, dtype=parameter.dtype, device=parameter.device), 1)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _refused(where, f"has a router that cannot be asked ({str(error).splitlines()[0]})") from None
    if len(index) != 2 or index.shape != gates.shape:
        raise _refused(where, "has a router whose answer is not understood")
    return made


def _refused(where: str, why: str) -> InputError:
    return InputError(f"the next layer cannot be predicted: {where} {why}: give the policy the option prefetch=no")
