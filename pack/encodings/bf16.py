"""Lossless BF16: exponents are Huffman-coded in the file, and matrices are plain in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Kind
from ..sections import MEMORY_PAGE, SECTION, Matrix
from .base import EntropyCoded, Part, codec

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
class LosslessBf16(EntropyCoded):
    """The checkpoint's weights as BF16 (FORMAT.md, "Lossless extents").

    In memory each matrix begins on a page of the machine's, so that runtime/paging can bind and free it alone.
    """

    holds = EXPERT_DTYPES
    coder = "lossless"
    plain = True
    matrix_boundary = MEMORY_PAGE
    extent_boundary = SECTION

    def parts(self, matrix: Matrix) -> Iterator[Part]:
        """The matrix row by row, and its bias if it has one."""
        yield "weight", (matrix.rows, matrix.cols), 2
        if matrix.bias:
            yield "bias", (matrix.rows,), 2

    def dequantise(self, value: LosslessMatrix) -> npt.NDArray[np.uint16]:
        """See Version."""
        return value.weight

    def check(self, matrices: Sequence[Matrix], extent: Buffer) -> Iterator[tuple[Kind, str]]:
        """See Version."""
        self.decode(matrices, extent)
        yield from codec("checks").check_lossless(matrices, extent)


ENCODINGS = (LosslessBf16("bf16", "exponent-huffman", 16, 16),)
