"""What quantised matrices cost an expert: its output against its output in BF16, on given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .experts import finish, hidden


@dataclass(frozen=True, slots=True)
class Loss:
    """What a version costs an expert.

    Attributes:
        mse: mean squared error of the expert's output against its BF16 output.
        relative: squared error over squared output.
        gated: mean of gate**2 times squared error: the error as the layer's output sees it.
    """

    mse: float
    relative: float
    gated: float


def output(module: Any, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """An expert's output [tokens, hidden] for x [tokens, hidden], with these matrices."""
    return finish(module, hidden(module, x, weights[0], biases[0]), weights[1], biases[1])


def loss(exact: Tensor, got: Tensor, gates: Tensor) -> Loss:
    """The losses of outputs [tokens, hidden] against the exact ones, with gate weights [tokens]."""
    error = (exact - got).square()
    total = exact.square().sum()
    relative = error.sum() / total if total > 0 else error.sum()
    gated = (gates.square()[:, None] * error).mean()
    return Loss(float(error.mean()), float(relative), float(gated))
