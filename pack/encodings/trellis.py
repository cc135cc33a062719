"""Trellis encodings: a weight depends on the last eight codes of its row (FORMAT.md, "Trellis extents").

Neighbouring codes share most of what they are computed from, so a search chooses whole sequences of codes. At two bits
a sequence of normal numbers keeps 0.085 of their variance as error, where single codes keep 0.117 (QTIP, Tseng et al.,
2024, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .affine import Planes
from .mixed import PLANES

GROUPS = (128,)  # kernels' sums of 32 bits hold the levels of so many columns times integers of 16 bits


@dataclass(frozen=True, eq=False)
class Trellis(Planes):
    """Codes of 2 or 3 bits in the planes of an affine version, scales, and no zero points."""

    trellis: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class MixedTrellis(Trellis):
    """Trellis codes of `bits` bits, in `down` of one more."""

    by_matrix: ClassVar[bool] = True

    def at(self, matrix: int) -> Trellis:
        """See Version."""
        return trellis(self.bits + (matrix > 0), self)


def trellis(bits: int, of: Trellis | None = None) -> Trellis:
    """Describe a trellis encoding of `bits` bits, or one matrix of a mixed one."""
    if of is None:
        return Trellis(f"t{bits}", "trellis", bits, KERNEL + bits, PLANES[bits], "none", GROUPS)
    args = "none", of.group_sizes, of.group_size, of.scale_bits
    return Trellis(of.name, of.encoding, bits, KERNEL + bits, PLANES[bits], *args)


KERNEL = 26  # less than kernels' numbers of trellis codes by their bits: 28 for two, 29 for three
ENCODINGS = (
    trellis(3),
    MixedTrellis("t2d3", "trellis-mixed", 2, 30, PLANES[2], "none", GROUPS),
    trellis(2),
)
