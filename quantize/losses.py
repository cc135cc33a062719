"""What quantised matrices cost an expert: its output against its output in BF16, on given tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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


def loss(exact: Tensor, got: Tensor, gates: Tensor) -> Loss:
    """The losses of outputs [tokens, hidden] against the exact ones, with gate weights [tokens]."""
    error = (exact - got).square()
    total = exact.square().sum()
    relative = error.sum() / total if total > 0 else error.sum()
    gated = (gates.square()[:, None] * error).mean()
    return Loss(float(error.mean()), float(relative), float(gated))
