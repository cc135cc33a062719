"""Products of many slots of an expert on a GPU: tiles of tensor cores whose first factor stays in registers.

affine_triton.py launches it. A program takes up to TOKENS slots. Its weights become BF16 numbers as in
gemv_triton.py, two codes by a shift and a mask, where tensor cores have them: columns are counted in the order in which
a word holds its codes, and `arrange` gives activations that order first, once for all programs. It sums activations
over groups, too, for zero points. FP16 activations are taken as two BF16 numbers, float32 ones as three, exactly.
`unpack` makes BF16 weights of a dense matrix: torch's (reference.py), bit for bit, from float32 and rounded once.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

import triton
import triton.language as tl

from .gemv_triton import (
    TRELLIS,
    centred,
    e4m3,
    e8m0,
    finish,
    levels,
    numbers,
    scales_of,
    section,
    state,
    window,
    words,
)

STEP: tl.constexpr = tl.constexpr(64)  # the most columns that are multiplied at a time


@triton.jit(do_not_specialize=["apart"])
def arrange(
    x,
    out,
    sums,
    cols,
    width,
    apart,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SUMS: tl.constexpr,
    TERMS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Write a row of activations as `TERMS` BF16 rows of `width` columns in the order of `_first`; and sums of groups.

    A program takes GROUPS groups of a row: x is [rows, cols], out [TERMS, rows, width], whose terms are `apart` numbers
    from each other, and sums float32 [groups, rows].
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (GROUPS * GROUP)
    apart = apart.to(tl.int64)
    p = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if BITS == 16:
        k = p
    else:
        half = p % 2  # which of a pair; then which pair of a thread's columns, and whose
        if PAIRS:
            at = p // 8 % (COLUMNS // 2)
            thread = p // 2 % 4
        else:
            at = p // 16 % (COLUMNS // 4) * 2 + p // 2 % 2
            thread = p // 4 % 4
        k = p // (4 * COLUMNS) * (4 * COLUMNS) + thread * COLUMNS
        if BITS == 8:
            k += at // 2 * 4 + half * 2 + at % 2
        else:
            k += half * (COLUMNS // 2) + at
    rest = tl.load(x + token * cols + first + k, mask=first + k < cols, other=0.0).to(tl.float32)
    if SUMS:
        g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        tl.store(sums + g * tl.num_programs(0) + token, tl.sum(rest, 1), mask=g * GROUP < cols)
    for term in tl.static_range(TERMS):
        y = rest.to(tl.bfloat16)
        rest -= y.to(tl.float32)
        tl.store(out + term * apart + token * width + first + p, y, mask=first + p < width)


@triton.jit
def _words(
    base,
    low,
    high,
    cols,
    row,
    flat,
    rows,
    begin,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    COLUMNS: tl.constexpr,
    U: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load what `row` [W, Q, T, E] has in U times 4 * COLUMNS columns: two tensors of words [U, W, Q, T, E].

    Of BF16 weights both are the first factor itself, whose rows are `flat`: tensor cores read it from shared memory.
    """
    if BITS == 16:
        k = begin + tl.arange(0, U * 4 * COLUMNS)[None, :]
        weights = section(base, low, tl.bfloat16)
        at = flat.to(tl.int64)[:, None] * cols + k
        if EVEN:
            left = tl.load(weights + at)
        else:
            left = tl.load(weights + at, mask=(flat < rows)[:, None] & (k < cols), other=0.0)
        return left, left
    else:
        of = row[None, :, :, :, :]
        t = tl.arange(0, 4)[None, None, None, :, None]
        k = begin + tl.arange(0, U)[:, None, None, None, None] * (4 * COLUMNS) + t * COLUMNS
        blocks = (rows + 15) // 16
        return words(base, low, high, cols, of, blocks, k, t, BITS, MANTISSA, COLUMNS, EVEN, 4)


@triton.jit
def _first(
    low,
    high,
    scales,
    ones,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALED: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return the first factor [W * 8 * E, U * 4 * COLUMNS] of what `_words` and `_scales` return."""
    if BITS == 16:
        return low.to(tl.float32) if WIDE else low
    else:
        w = numbers(low, high, ones, BITS, MANTISSA, PART, COLUMNS, WIDE)
        if MANTISSA == 1:
            w *= 2.0**126
        elif MANTISSA == 3:
            w *= 2.0**120
        w = tl.reshape(w, [U, W, 8, 4, E, COLUMNS])
        if SCALED:
            w *= scales.to(w.dtype)[:, :, :, :, :, None]
        w = tl.reshape(w, [U, W, 8, 4, E // 2, 2, COLUMNS // 4, 2, 2])
        if PAIRS:
            w = tl.permute(w, [4, 1, 5, 2, 0, 6, 7, 3, 8])
        else:
            w = tl.permute(w, [4, 1, 5, 2, 0, 6, 3, 7, 8])
        return tl.reshape(w, [W * 8 * E, U * 4 * COLUMNS])


@triton.jit
def _scales(
    base, scale, cols, row, rows, g, SCALE: tl.constexpr, GROUP: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr
):
    """Load scales of one byte, of U groups from the g-th on: float32 [U, W, Q, T, E], exact in BF16."""
    groups = (cols + GROUP - 1) // GROUP
    n = g + tl.arange(0, U)[:, None, None, None, None]
    of = row[None, :, :, :, :]
    at = (of // 16 * groups + n) * 16 + of % 16
    if EVEN:
        bits = tl.load(section(base, scale, tl.uint8) + at).to(tl.int32)
    else:
        here = (of // 16 < (rows + 15) // 16) & (n < groups)
        bits = tl.load(section(base, scale, tl.uint8) + at, mask=here, other=0).to(tl.int32)
    if SCALE == "e4m3":
        return e4m3(bits)
    else:
        return e8m0(bits)


@triton.jit
def _turned(part, W: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr):
    """Return sums in the order of rows: [W, Q, T, E, TOKENS / 8, 2], slots in the dimensions T and the last two."""
    part = tl.reshape(part, [E // 2, W, 2, 8, TOKENS // 8, 4, 2])
    return tl.reshape(tl.permute(part, [1, 3, 5, 0, 2, 4, 6]), [W, 8, 4, E, TOKENS // 8, 2])


@triton.jit
def _scaled(
    part,
    total,
    of_x,
    base,
    scale,
    zero,
    cols,
    row,
    rows,
    g,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Add a group's sums to `total`, times its scales and less its zero points."""
    groups = (cols + GROUP - 1) // GROUP
    here = None if EVEN else row // 16 < (rows + 15) // 16
    other = None if EVEN else 0
    at = row // 16 * groups + g
    if SCALE == "block":
        s = tl.load(section(base, scale, tl.float32) + at, mask=here, other=other)
        return total + part * s[:, :, :, :, None, None]
    else:
        at = at * 16 + row % 16
        if MANTISSA == TRELLIS:
            return total + part * scales_of(base, scale, at, here, other, SCALE, 0)[:, :, :, :, None, None]
        s = scales_of(base, scale, at, here, other, SCALE, BITS)
        s = s if SCALE == "e3m5" else s * (1 << BITS)
        if ZEROS == 1:
            z = tl.load(section(base, zero, tl.uint8) + at, mask=here, other=other).to(tl.float32)
            part -= of_x * (z * (1 / 256) + 1)[:, :, :, :, None, None]
        elif ZEROS == 2:
            part -= of_x * 1.5
        else:
            part -= of_x * (((1 << BITS) - 1) / (2 << BITS) + 1)
        return total + part * s[:, :, :, :, None, None]


@triton.jit(do_not_specialize=["slots", "share", "version", "ones", "apart"])
def many(
    handles,
    order,
    block_expert,
    block_first,
    block_count,
    x,
    sums,
    out,
    rows,
    cols,
    width,
    slots,
    share,
    apart,
    version,
    low,
    high,
    scale,
    zero,
    bias,
    outer,
    ones,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    OUTER: tl.constexpr,
    GATED: tl.constexpr,
    DENSE: tl.constexpr,
    U: tl.constexpr,
    EVEN: tl.constexpr,
    TERMS: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Multiply a block of up to TOKENS slots with W * 8 * E rows, E of a thread; x and sums are `arrange`'s."""
    tl.static_assert((BITS == 16) | (BITS == 8) | (BITS <= 5), "an encoding that this kernel does not know")
    block = tl.program_id(0)
    apart = apart.to(tl.int64)
    lane = tl.arange(0, TOKENS)
    mine = tl.arange(0, 4)[:, None, None] * 2 + tl.arange(0, TOKENS // 8)[None, :, None] * 8
    mine += tl.arange(0, 2)[None, None, :]  # the slots of a thread's sums
    if DENSE:  # `handles` is the matrix's extent, and slots are tokens in order
        base = handles
        runs = True
        count = slots - block * TOKENS
        lane = (block * TOKENS + tl.minimum(lane, count - 1)).to(tl.int64)
        at = (block * TOKENS + tl.minimum(mine, count - 1)).to(tl.int64)
    else:
        count = tl.load(block_count + block)
        word = tl.load(handles + tl.load(block_expert + block))
        runs = (count > 0) & ((word & 63) == version)
        base = (word - (word & 63)).to(tl.pointer_type(tl.uint8))
        from_order = order + tl.load(block_first + block)
        lane = tl.load(from_order + lane, mask=lane < count, other=0).to(tl.int64)
        at = tl.load(from_order + mine, mask=mine < count, other=0).to(tl.int64)
    if runs:
        row = tl.program_id(1) * (W * 8 * E) + tl.arange(0, W)[:, None, None, None] * (8 * E)
        row += tl.arange(0, 8)[None, :, None, None] * E + tl.arange(0, E)[None, None, None, :]
        row += tl.arange(0, 4)[None, None, :, None] * 0  # the same for all four threads
        m = tl.arange(0, W * 8 * E)  # the same rows in the order in which tensor cores have them
        flat = tl.program_id(1) * (W * 8 * E) + m // 16 % W * (8 * E) + m % 8 * E + m // (16 * W) * 2 + m // 8 % 2
        made = rows // 2 if GATED else rows
        PARTS: tl.constexpr = 2 if (BITS == 8) & (MANTISSA == 0) else 1
        SUMS: tl.constexpr = (BITS < 16) & (MANTISSA == 0)
        BYTES: tl.constexpr = (SCALE == "e8m0") | (SCALE == "e4m3")  # scales are exact in BF16, and so are products
        WHOLE: tl.constexpr = (BITS == 16) | (SCALE == "row") | BYTES  # no sums are to be scaled
        K: tl.constexpr = U * 4 * COLUMNS
        SPAN: tl.constexpr = max(GROUP, K)
        kind: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
        from_x = x + (lane // share)[:, None] * width + tl.arange(0, K)[None, :]
        from_sums = sums + at // share
        zeros = tl.zeros([W * 8 * E, TOKENS], dtype=tl.float32)
        total = zeros if WHOLE else _turned(zeros, W, E, TOKENS)
        total_up = total
        for g in range(0, (cols + SPAN - 1) // SPAN):
            part = total if WHOLE else zeros
            up = total_up if WHOLE else zeros
            if SUMS:
                of_x = tl.load(from_sums + g * (slots // share))[None, None, :, None, :, :]
            else:
                of_x = 0
            for step in tl.static_range(SPAN // K):
                begin = g * SPAN + step * K
                a, a1 = _words(base, low, high, cols, row, flat, rows, begin, BITS, MANTISSA, COLUMNS, U, EVEN)
                of_a = _scales(base, scale, cols, row, rows, g * U, SCALE, GROUP, U, EVEN) if BYTES else a
                if GATED:
                    b, b1 = _words(
                        base, low, high, cols, row + made, flat + made, rows, begin, BITS, MANTISSA, COLUMNS, U, EVEN
                    )
                    of_b = _scales(base, scale, cols, row + made, rows, g * U, SCALE, GROUP, U, EVEN) if BYTES else b
                for term in tl.static_range(TERMS):
                    second = tl.trans(tl.load(from_x + term * apart + begin).to(kind))
                    for p in tl.static_range(PARTS):
                        w = _first(a, a1, of_a, ones, BITS, MANTISSA, BYTES, p, COLUMNS, U, W, E, WIDE, PAIRS)
                        part = tl.dot(w, second, part, input_precision="ieee")
                        if GATED:
                            w = _first(b, b1, of_b, ones, BITS, MANTISSA, BYTES, p, COLUMNS, U, W, E, WIDE, PAIRS)
                            up = tl.dot(w, second, up, input_precision="ieee")
            if WHOLE:
                total = part
                total_up = up
            else:
                total = _scaled(
                    _turned(part, W, E, TOKENS),
                    total,
                    of_x,
                    base,
                    scale,
                    zero,
                    cols,
                    row,
                    rows,
                    g,
                    BITS,
                    MANTISSA,
                    SCALE,
                    GROUP,
                    ZEROS,
                    EVEN,
                )
                if GATED:
                    total_up = _scaled(
                        _turned(up, W, E, TOKENS),
                        total_up,
                        of_x,
                        base,
                        scale,
                        zero,
                        cols,
                        row + made,
                        rows,
                        g,
                        BITS,
                        MANTISSA,
                        SCALE,
                        GROUP,
                        ZEROS,
                        EVEN,
                    )
        row = row[:, :, :, :, None, None]
        here = row < made
        y = _turned(total, W, E, TOKENS) if WHOLE else total
        y = finish(y, base, scale, outer, bias, row, here, SCALE, OUTER, BIAS)
        if GATED:
            z = _turned(total_up, W, E, TOKENS) if WHOLE else total_up
            z = finish(z, base, scale, outer, bias, row + made, here, SCALE, OUTER, BIAS)
            y = y * (1.0 / (1.0 + tl.exp(-y))) * z
        to = out + at[None, None, :, None, :, :] * made + row
        tl.store(to, y.to(out.dtype.element_ty), mask=(mine < count)[None, None, :, None, :, :] & here)


# --- a dense matrix's weights, for products by cuBLAS

BLOCK_ROWS: tl.constexpr = tl.constexpr(16)  # of a program of `unpack`: rows stored side by side
BLOCK_COLUMNS: tl.constexpr = tl.constexpr(128)


@triton.jit
def _codes(base, offset, cols, block, at, P: tl.constexpr):
    """Read the P-bit codes of one plane: int32 [BLOCK_COLUMNS, BLOCK_ROWS], as words of rows lie side by side."""
    count = (cols * P + 31) // 32
    w = at * P // 32 + tl.arange(0, BLOCK_COLUMNS * P // 32)
    plane = (
        section(base, offset, tl.uint32) + (block * count + w)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    )
    v = tl.load(plane, mask=(w < count)[:, None], other=0)
    codes = (v[:, None, :] >> (tl.arange(0, 32 // P) * P).to(tl.uint32)[None, :, None]) & ((1 << P) - 1)
    return tl.reshape(codes.to(tl.int32), [BLOCK_COLUMNS, BLOCK_ROWS])


@triton.jit
def _levels(base, low, high, cols, block, at, BITS: tl.constexpr):
    """Return the levels of trellis codes, uint32 [BLOCK_COLUMNS, BLOCK_ROWS]."""
    k = (at + tl.arange(0, BLOCK_COLUMNS // 8) * 8)[:, None]
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    of_low = window(base, low, cols, row, block + 1, k, 2, False)[:, None, :]
    of_high = window(base, high, cols, row, block + 1, k, 1, False)[:, None, :] if BITS == 3 else of_low
    states = state(of_low, of_high, tl.arange(0, 8).to(tl.uint32)[None, :, None], BITS)
    return tl.reshape(levels(states, states) & 0xFFFF, [BLOCK_COLUMNS, BLOCK_ROWS])


@triton.jit
def _scale(base, scale, cols, block, k, SCALE: tl.constexpr, GROUP: tl.constexpr):
    """Return the scales of weights, float32 [BLOCK_COLUMNS, BLOCK_ROWS], and where their groups' zero points lie."""
    lane = tl.arange(0, BLOCK_ROWS)[None, :]
    at = block * ((cols + GROUP - 1) // GROUP) + k[:, None] // GROUP
    here = (k < cols)[:, None]
    to = at * BLOCK_ROWS + lane
    if SCALE == "row":
        s = tl.load(section(base, scale, tl.float32) + block * BLOCK_ROWS + lane + 0 * at, mask=here, other=0.0)
    elif SCALE == "block":
        s = tl.load(section(base, scale, tl.float32) + at + 0 * lane, mask=here, other=0.0)
    elif SCALE == "e8m0":
        s = e8m0(tl.load(section(base, scale, tl.uint8) + to, mask=here, other=0).to(tl.int32))
    elif SCALE == "e4m3":
        s = e4m3(tl.load(section(base, scale, tl.uint8) + to, mask=here, other=0).to(tl.int32))
    else:
        s = scales_of(base, scale, to, here, 0, SCALE, 0)
    return s, to, here


@triton.jit(do_not_specialize=["first", "count"])
def unpack(
    base,
    out,
    cols,
    first,
    count,
    low,
    high,
    scale,
    zero,
    outer,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    OUTER: tl.constexpr,
):
    """Write `count` rows from `first` on, a multiple of BLOCK_ROWS, to out [count, cols]."""
    tl.static_assert((BITS == 8) | (BITS <= 5), "an encoding that this kernel does not know")
    block = first // BLOCK_ROWS + tl.program_id(0)
    at = tl.program_id(1) * BLOCK_COLUMNS
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = at + tl.arange(0, BLOCK_COLUMNS)
    real = (row < count)[None, :]
    if MANTISSA == TRELLIS:
        codes = _levels(base, low, high, cols, block, at, BITS)
    elif (BITS == 3) | (BITS == 5):
        codes = _codes(base, low, cols, block, at, BITS - 1)
        codes += _codes(base, high, cols, block, at, 1) << (BITS - 1)
    else:
        codes = _codes(base, low, cols, block, at, BITS)
    s, of_zero, here = _scale(base, scale, cols, block, k, SCALE, GROUP)
    if MANTISSA == TRELLIS:
        w = centred(codes)
    elif MANTISSA == 3:
        w = e4m3(codes)
    elif MANTISSA == 1:  # a sign, two bits of an exponent and one more: FP16 numbers that are too small by 2^14
        w = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384
    elif ZEROS == 1:
        z = tl.load(section(base, zero, tl.uint8) + of_zero, mask=here, other=0).to(tl.float32)
        w = codes.to(tl.float32) - z * (1 / (1 << (8 - BITS)))
    elif ZEROS == 2:
        w = codes.to(tl.float32) - (1 << (BITS - 1))
    else:
        w = codes.to(tl.float32) - ((1 << BITS) - 1) / 2
    w *= s
    if OUTER:
        w *= tl.load(section(base, outer, tl.float32) + block)
    to = out + row.to(tl.int64)[None, :] * cols + k[:, None]
    tl.store(to, w.to(tl.bfloat16), mask=real & here)
