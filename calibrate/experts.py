"""Read a transformers experts module of any layout as matrices [rows, cols], and compute with such matrices.

Layouts differ: transposed, gate and up interleaved, biases, no gate. Rows keep the module's order, so that the module's
own `_apply_gate` works on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from moepack.pack.codec.bits import Bf16Bits
from moepack.pack.spec import ExpertLayer, Matrix

if TYPE_CHECKING:
    from moepack.families.interface import ExpertsModule


def is_experts_module(module: nn.Module) -> TypeGuard[ExpertsModule]:
    """Whether a module has transformers' experts interface."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "config"))


def parameter_names(module: ExpertsModule) -> dict[str, tuple[str, str | None]]:
    """Map each matrix's name to the parameter names of its weight and bias."""
    first = "gate_up" if module.has_gate else "up"
    return {m: (f"{m}_proj", f"{m}_proj_bias" if module.has_bias else None) for m in (first, "down")}


def describe(index: int, name: str, module: ExpertsModule) -> ExpertLayer:
    """Describe an experts module, whose parameters may be on the meta device."""
    matrices = []
    for matrix, (weight, _) in parameter_names(module).items():
        experts, rows, cols = getattr(module, weight).shape
        if module.is_transposed:
            rows, cols = cols, rows
        matrices.append(Matrix(matrix, rows, cols, bool(module.has_bias)))
    return ExpertLayer(index, name, experts, tuple(matrices))


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one layer as in the checkpoint."""

    layer: ExpertLayer  # the descriptor
    # A tensor for each matrix, [experts, rows, cols], or [experts, cols, rows] if `transposed`.
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]  # a tensor for each matrix, [experts, rows], or None
    transposed: bool  # whether the module keeps its matrices transposed

    @staticmethod
    def of(layer: ExpertLayer, module: ExpertsModule, tensors: Mapping[str, Tensor]) -> ExpertWeights:
        """Select a module's experts from tensors by parameter name."""
        names = list(parameter_names(module).values())
        return ExpertWeights(
            layer,
            tuple(tensors[w] for w, _ in names),
            tuple(None if b is None else tensors[b] for _, b in names),
            bool(module.is_transposed),
        )

    def select(self, experts: range) -> ExpertWeights:
        """Some of the experts, as views."""
        return self._map(lambda t: t[experts.start : experts.stop], len(experts))

    def copied(self) -> ExpertWeights:
        """A copy, for pickling: a pickled view would hold the whole tensor behind it."""
        return self._map(torch.clone, self.layer.experts)

    def _map(self, function: Callable[[Tensor], Tensor], experts: int) -> ExpertWeights:
        weights = tuple(function(w) for w in self.weights)
        biases = tuple(None if b is None else function(b) for b in self.biases)
        return replace(self, layer=replace(self.layer, experts=experts), weights=weights, biases=biases)

    def matrix(self, expert: int, matrix: int) -> Tensor:
        """One matrix in BF16, [rows, cols], contiguous; other dtypes are rounded to nearest."""
        weight = self.weights[matrix][expert]
        return (weight.T if self.transposed else weight).to(torch.bfloat16).contiguous()

    def bias(self, expert: int, matrix: int) -> Tensor | None:
        """One bias in BF16, [rows]."""
        bias = self.biases[matrix]
        return None if bias is None else bias[expert].to(torch.bfloat16)


@contextmanager
def replaced(module: ExpertsModule, matrices: Sequence[Tensor]) -> Iterator[None]:
    """Compute with other matrices, [experts, rows, cols] each, in a loaded experts module inside the context."""
    parameters = [getattr(module, weight) for weight, _ in parameter_names(module).values()]
    own = [p.data for p in parameters]
    for p, matrix in zip(parameters, matrices, strict=True):
        turned = matrix.transpose(1, 2) if module.is_transposed else matrix
        p.data = turned.to(p.device, p.dtype).contiguous()
    try:
        yield
    finally:
        for p, weight in zip(parameters, own, strict=True):
            p.data = weight


def bits_of(tensor: Tensor) -> Bf16Bits:
    """The bits of a BF16 tensor, uint16 of the same shape."""
    return tensor.cpu().contiguous().view(torch.uint16).numpy()


def hidden(module: ExpertsModule, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The input of an expert's down projection: the gated activation of its first projection of x [tokens, cols]."""
    out = torch.nn.functional.linear(x, weight, bias)
    act: Tensor = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    return act


def finish(module: ExpertsModule, act: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """An expert's output [tokens, rows] from its gated activation."""
    out = torch.nn.functional.linear(act, weight, bias)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return out
