"""Affine encodings whose `down` matrix has one bit more than the matrix before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from . import affine
from .base import Version

PLANES = {e.bits: e.planes for e in affine.ENCODINGS} | {5: (4, 1)}


@dataclass(frozen=True, eq=False)
class MixedAffine(affine.Affine):
    """Affine codes of `bits` bits, in `down` of one more (FORMAT.md, "Affine extents").

    The inputs of `down` are gated activations, nearly uncorrelated, so that one column's error mends less of another's
    than in the first matrix. Of the divergence of a trained model at two bits, `down` makes two thirds, with a third of
    the bytes (docs/design/studies.md).
    """

    by_matrix: ClassVar[bool] = True

    def at(self, matrix: int) -> Version:
        """See Version."""
        bits = self.bits + (matrix > 0)
        zero = self.zero if bits > 1 else "midpoint"
        args = PLANES[bits], zero, self.group_sizes, self.group_size, self.scale_bits
        return affine.Affine(self.name, self.encoding, bits, bits, *args)


def mixed(bits: int) -> MixedAffine:
    """Describe a mixed encoding. Its number in kernels only names their limits: they read each matrix by its bits."""
    name = f"w{bits}d{bits + 1}"
    return MixedAffine(name, "affine-mixed", bits, 23 + bits, PLANES[bits], "stored", (128,))


# With zero points: without them a matrix takes as many bits for its error on trained models, but 2.4 times the error
# where some inputs are much larger than others (docs/design/studies.md).
ENCODINGS = (mixed(4), mixed(3), mixed(2), mixed(1))
