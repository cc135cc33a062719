"""ggml's types as numbers: what blocks they have, what they take. Needs neither ggml nor torch; reads no files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One of ggml's types.

    Attributes:
        name, number: as in ggml.h.
        block: weights of a block; a row is whole blocks.
        size: bytes of a block.
    """

    name: str
    number: int
    block: int
    size: int

    @property
    def bits(self) -> float:
        """Bits a weight."""
        return 8 * self.size / self.block

    def fits(self, cols: int) -> bool:
        """Whether rows of so many weights can be in it."""
        return cols % self.block == 0

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row.

        Raises:
            ValueError: when rows are not whole blocks.
        """
        if not self.fits(cols):
            raise ValueError(f"{self.name}: rows of {cols:,} weights are not whole blocks of {self.block}")
        return cols // self.block * self.size


TYPES = {
    t.name: t
    for t in (
        GgmlType("F32", 0, 1, 4),
        GgmlType("Q4_0", 2, 32, 18),
        GgmlType("Q5_0", 6, 32, 22),
        GgmlType("Q8_0", 8, 32, 34),
        GgmlType("Q2_K", 10, 256, 84),
        GgmlType("Q3_K", 11, 256, 110),
        GgmlType("Q4_K", 12, 256, 144),
        GgmlType("Q5_K", 13, 256, 176),
        GgmlType("Q6_K", 14, 256, 210),
        GgmlType("IQ2_XXS", 16, 256, 66),
        GgmlType("IQ2_XS", 17, 256, 74),
        GgmlType("IQ3_XXS", 18, 256, 98),
        GgmlType("IQ1_S", 19, 256, 50),
        GgmlType("IQ4_NL", 20, 32, 18),
        GgmlType("IQ3_S", 21, 256, 110),
        GgmlType("IQ2_S", 22, 256, 82),
        GgmlType("IQ4_XS", 23, 256, 136),
        GgmlType("BF16", 30, 1, 2),
        GgmlType("MXFP4", 39, 32, 17),
        GgmlType("NVFP4", 40, 64, 36),
    )
}
