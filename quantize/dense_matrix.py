"""A dense matrix at every width, some rows at a time, and what each width costs: mathematics on given tensors.

The rows of a matrix that reads x with second moments M are quantised each for itself, so that a slice of them is all
that is in memory in float32. With the moments of tokens that were not learnt from, the error of the output is exact
without one: the mean of |D x|^2 over tokens is tr(D M D^T). Where rows come from and where codes go is the caller's to
say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.spec import BLOCK_ROWS, Version

from .grid import Quantised, dequantise
from .methods import method_for, quantise_all

SLICE = 1 << 26  # bytes of the rows that are quantised together, in float32


@dataclass
class DenseLoss:
    """What a width costs a matrix, summed over rows as they are made.

    Attributes:
        error, power: of its output on tokens not learnt from, mean over tokens of the squares' sum over rows.
        method: what made it.
    """

    method: str
    error: float = 0.0
    power: float = 0.0

    @property
    def relative(self) -> float:
        """Squared error over squared output."""
        return self.error / self.power if self.power > 0 else self.error


def quantise_rows(
    rows: Callable[[int, int], Tensor],
    shape: tuple[int, int],
    moments: Tensor,
    held: Tensor,
    method: str,
    versions: Sequence[Version],
    losses: dict[Version, DenseLoss],
) -> Iterator[tuple[int, dict[Version, Quantised]]]:
    """Quantise a matrix slice by slice.

    Args:
        rows: (first, last) to these rows of the weight, float32 [last - first, cols], on the device that computes.
        shape: of the matrix.
        moments: E[x x^T] over what it reads, float32 [cols, cols], there too.
        held: the same over tokens that are not learnt from, for the losses.
        method: a method's name.
        versions: affine versions.
        losses: filled as slices are made.

    Yields:
        The first row of a slice, a multiple of BLOCK_ROWS, and the slice at every version, a batch of one.
    """
    losses.update((v, DenseLoss(method_for(method, v).name)) for v in versions)
    count, cols = shape
    step = max(1, SLICE // (4 * cols * BLOCK_ROWS)) * BLOCK_ROWS
    for first in range(0, count, step):
        weight = rows(first, min(first + step, count))
        made = quantise_all(method, weight[None], moments[None], versions)
        power = _trace(weight, held)
        for version, q in made.items():
            losses[version].error += _trace(dequantise(q, version)[0] - weight, held)
            losses[version].power += power
        yield first, made


def _trace(matrix: Tensor, moments: Tensor) -> float:
    """tr(A M A^T), not below 0."""
    return max(0.0, float(torch.sum((matrix @ moments) * matrix, dtype=torch.float64)))
