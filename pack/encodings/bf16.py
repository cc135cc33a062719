"""Lossless BF16: exponents are Huffman-coded in the file, and matrices are plain in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Kind
from ..sections import MEMORY_PAGE, SECTION, Matrix
from .base import Part, Version, codec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..codec.bits import Buffer
    from ..codec.lossless import LosslessMatrix

# The version's contents, by the dtype of the checkpoint's experts.
EXPERT_DTYPES = {
    "BF16": "the checkpoint's own bits",
    "F16": "the checkpoint's FP16 weights rounded to BF16",
    "F32": "the checkpoint's FP32 weights rounded to BF16",
    "F8_E4M3": "the bits of the checkpoint's FP8 codes times their blocks' scales, rounded to BF16",
    "MXFP4": "the checkpoint's MXFP4 values, which BF16 holds exactly",
    "MXFP8": "the checkpoint's MXFP8 values, which BF16 holds exactly",
    "NVFP4": "the checkpoint's NVFP4 values rounded to BF16",
    "INT8": "the checkpoint's INT8 values rounded to BF16",
    "INT4": "the checkpoint's INT4 values rounded to BF16",
}


@dataclass(frozen=True, eq=False)
class LosslessBf16(Version):
    """The checkpoint's weights as BF16 (FORMAT.md, "Lossless extents").

    In memory each matrix begins on a page of the machine's, so that runtime/paging can bind and free it alone.
    """

    holds = EXPERT_DTYPES
    entropy_coded = True
    plain = True
    matrix_boundary = MEMORY_PAGE
    extent_boundary = SECTION

    def parts(self, matrix: Matrix) -> Iterator[Part]:
        """The matrix row by row, and its bias if it has one."""
        yield "weight", (matrix.rows, matrix.cols), 2
        if matrix.bias:
            yield "bias", (matrix.rows,), 2

    def stored_sizes(self, matrices: Sequence[Matrix]) -> None:
        """Return None: the sizes depend on the values."""

    def encode(
        self, matrices: Sequence[Matrix], values: Sequence[LosslessMatrix], threads: int | None = None
    ) -> tuple[Buffer, int]:
        """See Version."""
        return codec("lossless").encode(matrices, values, threads)  # type: ignore[no-any-return]

    def decode(self, matrices: Sequence[Matrix], extent: Buffer) -> Sequence[LosslessMatrix]:
        """See Version. Biases are views of the extent."""
        return codec("lossless").decode(matrices, extent)  # type: ignore[no-any-return]

    def dequantise(self, value: LosslessMatrix) -> npt.NDArray[np.uint16]:
        """See Version."""
        return value.weight

    def restore(
        self,
        matrices: Sequence[Matrix],
        extent: Buffer,
        out: Buffer,
        threads: int | None = None,
        before: Callable[[int], None] = lambda matrix: None,
    ) -> None:
        """See Version."""
        parts = codec("lossless").directory(matrices, extent)
        for section in self.sections(matrices):
            (data, bias), room = parts[section.matrix], out[section.offset : section.end].view("uint16")
            if section.kind == "bias":
                room[:] = bias
            else:
                before(section.matrix)
                codec("exponent_fast").decode_into(data, room, threads)

    def check(self, matrices: Sequence[Matrix], extent: Buffer) -> Iterator[tuple[Kind, str]]:
        """See Version."""
        self.decode(matrices, extent)
        yield from codec("checks").check_lossless(matrices, extent)

    def payload(self, matrices: Sequence[Matrix], extent: Buffer) -> int:
        """See Version."""
        return int(codec("lossless").payload(len(matrices), extent))


ENCODINGS = (LosslessBf16("bf16", "exponent-huffman", 16, 16),)
