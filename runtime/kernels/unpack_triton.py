"""A matrix's rows as BF16 numbers on a GPU, for products of many tokens by cuBLAS. affine_triton.py launches it.

Weights are what torch makes of them (reference.py), bit for bit: computed in float32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gemv_triton import e4m3, section

ROWS: tl.constexpr = tl.constexpr(16)  # of a program: rows stored side by side
COLUMNS: tl.constexpr = tl.constexpr(128)  # of a program


@triton.jit  # type: ignore[untyped-decorator]
def _codes(base, offset, cols, block, at, here, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read the P-bit codes of one plane: int32 [COLUMNS, ROWS], in which words of neighbouring rows are neighbours."""
    words = (cols * P + 31) // 32
    w = at * P // 32 + tl.arange(0, COLUMNS * P // 32)
    plane = section(base, offset, tl.uint32) + (block * words + w)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    v = tl.load(plane, mask=here & (w < words)[:, None], other=0)
    codes = (v[:, None, :] >> (tl.arange(0, 32 // P) * P).to(tl.uint32)[None, :, None]) & ((1 << P) - 1)
    return tl.reshape(codes.to(tl.int32), [COLUMNS, ROWS])


@triton.jit  # type: ignore[untyped-decorator]
def _scale(base, scale, cols, block, k, SCALE: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales of weights, float32 [COLUMNS, ROWS], and where their groups' zero points lie."""
    lane = tl.arange(0, ROWS)[None, :]
    at = block * ((cols + GROUP - 1) // GROUP) + k[:, None] // GROUP
    here = (k < cols)[:, None]
    to = at * ROWS + lane
    if SCALE == "row":
        s = tl.load(section(base, scale, tl.float32) + block * ROWS + lane + 0 * at, mask=here, other=0.0)
    elif SCALE == "block":
        s = tl.load(section(base, scale, tl.float32) + at + 0 * lane, mask=here, other=0.0)
    elif SCALE == "e8m0":  # the bits of an exponent; 0 is 2^-127, which is subnormal
        bits = tl.load(section(base, scale, tl.uint8) + to, mask=here, other=0).to(tl.int32)
        s = tl.maximum(bits << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        s = e4m3(tl.load(section(base, scale, tl.uint8) + to, mask=here, other=0).to(tl.int32))
    else:
        of: tl.constexpr = tl.float16 if SCALE == "fp16" else tl.bfloat16
        s = tl.load(section(base, scale, of) + to, mask=here, other=0.0).to(tl.float32)
    return s, to, here


@triton.jit(do_not_specialize=["first", "count"])  # type: ignore[untyped-decorator]
def unpack(  # type: ignore[no-untyped-def]
    base, out, cols, first, count, low, high, scale, zero, outer,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr,
    OUTER: tl.constexpr,
):  # fmt: skip
    """Write `count` rows from `first` on, a multiple of ROWS, to out [count, cols]."""
    block, at = first // ROWS + tl.program_id(0), tl.program_id(1) * COLUMNS
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), at + tl.arange(0, COLUMNS)
    real = (row < count)[None, :]
    if (BITS == 3) | (BITS == 5):
        codes = _codes(base, low, cols, block, at, True, BITS - 1)
        codes += _codes(base, high, cols, block, at, True, 1) << (BITS - 1)
    else:
        codes = _codes(base, low, cols, block, at, True, BITS)
    s, of_zero, here = _scale(base, scale, cols, block, k, SCALE, GROUP)
    if MANTISSA == 3:
        w = e4m3(codes)
    elif MANTISSA == 1:  # a sign, two bits of an exponent and one more: FP16 numbers that are too small by 2^14
        w = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384
    elif STORED:
        z = tl.load(section(base, zero, tl.uint8) + of_zero, mask=here, other=0).to(tl.float32)
        w = codes.to(tl.float32) - z * (1 / (1 << (8 - BITS)))
    else:
        w = codes.to(tl.float32) - ((1 << BITS) - 1) / 2
    w *= s
    if OUTER:
        w *= tl.load(section(base, outer, tl.float32) + block)
    to = out + row.to(tl.int64)[None, :] * cols + k[:, None]
    tl.store(to, w.to(tl.bfloat16), mask=real & here)
