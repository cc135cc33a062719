"""Encodings that keep a released checkpoint's codes and scales as they are: FP4 and FP8 with scales, and integers.

An extent has the same blocks and planes as an affine one. Its bytes in its file are those in memory, but for E4M3
codes, which are entropy-coded there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Kind
from ..sections import BLOCK_ROWS, GROUPS, Matrix, plane_words
from .affine import Affine, Blocks
from .base import EntropyCoded, Part, codec

if TYPE_CHECKING:
    from ..codec.bits import Buffer


def own(dtype: str) -> Mapping[str, str]:
    """Describe a released version; `dtype` is the checkpoint's dtype, by its name in the manifest."""
    return {dtype: "the checkpoint's own codes and scales"}


@dataclass(frozen=True, eq=False)
class ReleasedFloat(Blocks):
    """Floating-point codes with scales (FORMAT.md, "Released extents")."""

    decoder = "released"
    released = True

    def parts(self, matrix: Matrix) -> Iterator[Part]:
        """The codes, the scales, and the bias if the matrix has one."""
        blocks = -(-matrix.rows // BLOCK_ROWS)
        groups = -(-matrix.cols // self.group_size) if self.group_size else 1
        yield "plane0", (blocks, plane_words(matrix.cols, self.bits), BLOCK_ROWS), 4
        yield from self.scales(blocks, groups)
        if matrix.bias:
            yield "bias", (matrix.rows,), 2

    def scales(self, blocks: int, groups: int) -> Iterator[Part]:
        """The sections of scales: by default a byte for each row and group."""
        yield "scale", (blocks, groups, BLOCK_ROWS), 1


class Mxfp4(ReleasedFloat):
    """E2M1 codes, an E8M0 scale for 32 of a row."""

    holds = own("MXFP4")
    scale_dtype = "F8_E8M0"


class ReleasedCoded(EntropyCoded, ReleasedFloat):
    """E4M3 codes, entropy-coded in the file where that gains (FORMAT.md, "Coded released extents")."""

    coder = "released"

    def check(self, matrices: Sequence[Matrix], extent: Buffer) -> Iterator[tuple[Kind, str]]:
        """See Version."""
        return codec("checks").check_released(matrices, self, extent)  # type: ignore[no-any-return]


class Mxfp8(ReleasedCoded):
    """E4M3 codes, an E8M0 scale for 32 of a row."""

    holds = own("MXFP8")
    scale_dtype = "F8_E8M0"


class Nvfp4(ReleasedFloat):
    """E2M1 codes, an E4M3 scale for 16 of a row, and a float32 scale of a whole matrix, kept by blocks of 16 rows."""

    holds = own("NVFP4")
    scale_dtype = "F8_E4M3"

    def scales(self, blocks: int, groups: int) -> Iterator[Part]:
        """See ReleasedFloat."""
        yield "scale", (blocks, groups, BLOCK_ROWS), 1
        yield "outer", (blocks,), 4


class Fp8(ReleasedCoded):
    """E4M3 codes, a float32 scale for blocks of rows and columns; kept by blocks of 16 rows."""

    holds = own("F8_E4M3")
    scale_dtype = "F32"

    def scales(self, blocks: int, groups: int) -> Iterator[Part]:
        """See ReleasedFloat."""
        yield "scale", (blocks, groups), 4


class Fp8Row(ReleasedCoded):
    """E4M3 codes, a float32 scale for each row: checkpoints with a scale a channel or a tensor."""

    holds = own("F8_E4M3")
    scale_dtype = "F32"

    def scales(self, blocks: int, groups: int) -> Iterator[Part]:
        """See ReleasedFloat."""
        yield "scale", (blocks, groups, BLOCK_ROWS), 4


@dataclass(frozen=True, eq=False)
class ReleasedInteger(Affine):
    """Integer codes with zero points and BF16 scales. An extent is that of w8 or w4."""

    released = True


class Int8(ReleasedInteger):
    """Codes of 8 bits."""

    holds = own("INT8")


class Int4(ReleasedInteger):
    """Codes of 4 bits."""

    holds = own("INT4")


class Int8Fp16(Int8):
    """Codes of 8 bits, with FP16 scales."""

    scale_dtype = "F16"


class Int4Fp16(Int4):
    """Codes of 4 bits, with FP16 scales."""

    scale_dtype = "F16"


# A number in kernels stands for a way to read the bytes: int8 and int4 are read as w8 and w4.
ENCODINGS = (
    Fp8("fp8", "fp8-blocks", 8, 20, (8,), "none", (128, 32)),
    Fp8Row("fp8row", "fp8-rows", 8, 21, (8,)),
    Mxfp8("mxfp8", "mxfp8", 8, 19, (8,), "none", (32,)),
    Int8("int8", "affine", 8, 8, (8,), "stored", GROUPS),
    Int8Fp16("int8fp16", "affine-fp16", 8, 23, (8,), "stored", GROUPS),
    Mxfp4("mxfp4", "mxfp4", 4, 17, (4,), "none", (32,)),
    Nvfp4("nvfp4", "nvfp4", 4, 18, (4,), "none", (16,)),
    Int4("int4", "affine", 4, 4, (4,), "stored", GROUPS),
    Int4Fp16("int4fp16", "affine-fp16", 4, 22, (4,), "stored", GROUPS),
)
