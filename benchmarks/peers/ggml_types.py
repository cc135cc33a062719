"""ggml's types as numbers: what blocks they have, what they take. Needs neither ggml nor torch."""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES


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


TYPES = {kind.name: GgmlType(kind.name, kind.value, *size) for kind, size in GGML_QUANT_SIZES.items()}
