"""Affine encodings: value = scale * (code - zero), a scale for each group of columns of a row, and a zero point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import Kind
from ..sections import BLOCK_ROWS, GROUPS, Matrix, plane_words
from .base import Part, Stored, Version, codec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..codec.bits import Buffer


@dataclass(frozen=True, eq=False)
class Blocks(Version):
    """A version whose extents have the same bytes in memory and in their file, by blocks of rows."""

    decoder: ClassVar[str] = "affine"  # the module of codec/ that decodes it

    def encode(
        self, matrices: Sequence[Matrix], values: Sequence[Stored], threads: int | None = None
    ) -> tuple[Buffer, int]:
        """See Version. It uses one thread."""
        return codec("affine").encode(matrices, self, values), sum(s.size for s in self.sections(matrices))

    def decode(self, matrices: Sequence[Matrix], extent: Buffer) -> Sequence[Stored]:
        """See Version. Biases are views of the extent."""
        return codec(self.decoder).decode(matrices, self, extent)  # type: ignore[no-any-return]

    def dequantise(self, value: Stored) -> npt.NDArray[np.float32]:
        """See Version."""
        return value.dequantise(self)  # type: ignore[no-any-return]

    def check(self, matrices: Sequence[Matrix], extent: Buffer) -> Iterator[tuple[Kind, str]]:
        """See Version."""
        return codec("checks").check_affine(matrices, self, extent)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Planes(Blocks):
    """A version of codes in planes, with scales by group."""

    def parts(self, matrix: Matrix) -> Iterator[Part]:
        """Planes, scales (of a byte: with an outer one a block), stored zero points, and the bias if there is one."""
        blocks = -(-matrix.rows // BLOCK_ROWS)
        by_group = -(-matrix.cols // self.group_size)
        for p, bits in enumerate(self.planes):
            yield f"plane{p}", (blocks, plane_words(matrix.cols, bits), BLOCK_ROWS), 4
        yield "scale", (blocks, by_group, BLOCK_ROWS), self.scale_bits // 8
        if self.scale_bits == 8:
            yield "outer", (blocks,), 4
        if self.stores_zeros:
            yield "zero", (blocks, by_group, BLOCK_ROWS), 1
        if matrix.bias:
            yield "bias", (matrix.rows,), 2


@dataclass(frozen=True, eq=False)
class Affine(Planes):
    """An affine version (FORMAT.md, "Affine extents")."""


def affine(name: str, bits: int, planes: tuple[int, ...], zero: str = "stored") -> Affine:
    """Describe an affine encoding. Its number in kernels is its bits."""
    return Affine(name, "affine", bits, bits, planes, zero, GROUPS)


# One bit has no room for a zero point: its levels are -scale/2 and +scale/2.
ENCODINGS = (
    affine("w8", 8, (8,)),
    affine("w4", 4, (4,)),
    affine("w3", 3, (2, 1)),
    affine("w2", 2, (2,)),
    affine("w1", 1, (1,), "midpoint"),
)
