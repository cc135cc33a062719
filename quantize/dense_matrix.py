"""A dense matrix at every width, some rows at a time, and what each width costs: mathematics on given tensors.

The rows of a matrix that reads x with second moments M are quantised each for itself, so that a slice of them is all
that is in memory in float32. With the moments of tokens that were not learnt from, the error of the output is exact
without one: the mean of |D x|^2 over tokens is tr(D M D^T). Where rows come from and where codes go is the caller's to
say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.spec import BLOCK_ROWS, Version

from .grid import Quantised, dequantise
from .methods import method_for, quantise_all

ROW_SHARD = 1 << 26  # bytes of the rows that are quantised together, in float32


@dataclass(frozen=True)
class DenseLoss:
    """What a width costs a slice of a matrix.

    Attributes:
        error, power: of its output on tokens not learnt from, mean over tokens of the squares' sum over rows.
        method: what made it.
    """

    method: str
    error: float
    power: float


def row_shards(rows: int, cols: int) -> list[range]:
    """A matrix' rows quantised together: whole blocks of BLOCK_ROWS but for the last."""
    step = max(1, ROW_SHARD // (4 * cols * BLOCK_ROWS)) * BLOCK_ROWS
    return [range(first, min(first + step, rows)) for first in range(0, rows, step)]


def quantise_rows(
    weight: Tensor, moments: Tensor, held: Tensor, method: str, versions: Sequence[Version]
) -> dict[Version, tuple[Quantised, DenseLoss]]:
    """Quantise a slice of a matrix.

    Args:
        weight: float32 [rows of the slice, cols], on the device that computes.
        moments: E[x x^T] over what the matrix reads, float32 [cols, cols], there too.
        held: the same over tokens that are not learnt from, for the losses.
        method: a method's name.
        versions: affine versions.

    Returns:
        The slice at every version, a batch of one, and what that costs.
    """
    power = _trace(weight, held)
    return {
        v: (q, DenseLoss(method_for(method, v).name, _trace(dequantise(q, v)[0] - weight, held), power))
        for v, q in quantise_all(method, weight[None], moments[None], versions).items()
    }


def _trace(matrix: Tensor, moments: Tensor) -> float:
    """tr(A M A^T), not below 0."""
    return max(0.0, float(torch.sum((matrix @ moments) * matrix, dtype=torch.float64)))
