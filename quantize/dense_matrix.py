"""Quantise a dense matrix at every width, some rows at a time, and measure the error of each width.

Rows are quantised independently, so only a slice is in memory in float32. With the second moments M of held-out
inputs x, the output error of a weight error D is exact without outputs: the mean of |D x|^2 is tr(D M D^T).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.spec import BLOCK_ROWS, Version

from .grid import Quantised, dequantise
from .methods import FREE, method_for, quantise_all

ROW_SHARD = 1 << 26  # bytes of the rows that are quantised together, in float32


@dataclass(frozen=True)
class DenseLoss:
    """The loss of a slice of a matrix at one width."""

    method: str  # the method that made it
    # `error`, `power`: the output's squared error and square on held-out tokens, summed over rows, mean over tokens.
    error: float
    power: float


def row_shards(rows: int, cols: int) -> list[range]:
    """The slices of rows that are quantised together: whole blocks of BLOCK_ROWS, except in the last."""
    step = max(1, ROW_SHARD // (4 * cols * BLOCK_ROWS)) * BLOCK_ROWS
    return [range(first, min(first + step, rows)) for first in range(0, rows, step)]


def quantise_rows(
    weight: Tensor, moments: Tensor, held: Tensor, method: str, versions: Sequence[Version], zeros: str = FREE
) -> dict[Version, tuple[Quantised, DenseLoss]]:
    """Quantise a slice of a matrix, float32 [rows, cols], at every version, as a batch of one, and measure its loss.

    `moments` are E[x x^T] over the matrix's inputs, float32 [cols, cols], and `held` the same over held-out tokens, all
    on the compute device.
    """
    power = _trace(weight, held)
    return {
        v: (q, DenseLoss(method_for(method, v).name, _trace(dequantise(q, v)[0] - weight, held), power))
        for v, q in quantise_all(method, weight[None], moments[None], versions, zeros).items()
    }


def _trace(matrix: Tensor, moments: Tensor) -> float:
    """tr(A M A^T), at least 0."""
    return max(0.0, float(torch.sum((matrix @ moments) * matrix, dtype=torch.float64)))
