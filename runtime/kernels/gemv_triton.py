"""Products of up to eight slots of an expert on a GPU, without shared memory on the way. affine_triton.py launches it.

A program takes 32 rows, and each of its warps a share of the columns, whose sums are added in the warps' order. Threads
keep what they load: 16 bytes are the words of four rows in a plane, and stand where the tensor cores' first factor has
them, once rows and columns are counted in another order, the same in both factors. Dimensions of tensors: S warps; Q
eight times four rows, or eight slots; T four threads with neighbouring columns; E four rows; U loads at a time.

Two codes become two BF16 numbers by a shift and a mask: `1 + code / 2^bits`, whose ones go with the zero point, times
the sum of activations. A code of eight bits is two such numbers. FP4 and FP8 codes are BF16 numbers that are too small
by a power of two, and levels of trellis codes less their mean are BF16 numbers. FP16 activations are taken as two BF16
numbers, float32 ones as three, exactly.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

import triton
import triton.language as tl

from moepack.pack.codec import trellis

ROWS: tl.constexpr = tl.constexpr(32)  # of a program
SLOTS: tl.constexpr = tl.constexpr(8)
TRELLIS: tl.constexpr = tl.constexpr(7)  # MANTISSA of trellis codes, which are in windows
FACTOR: tl.constexpr = tl.constexpr(trellis.FACTOR)
MIDDLE: tl.constexpr = tl.constexpr(trellis.ZERO + (1 << 23))


@triton.jit
def section(base, offset, DTYPE: tl.constexpr):
    """Return a section's address as a pointer, of which a cast would forget that 16 bytes may be loaded at a time."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def e4m3(codes):
    """Return the values of E4M3 codes in int32, float32, exactly: as FP16 numbers that are too small by 2^8."""
    bits = (codes & 0x7F) << 7 | (codes & 0x80) << 8
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256


@triton.jit
def e8m0(bits):
    """Return 2^(bits - 127) as float32, for E8M0 exponents in int32. Exponent 0 gives 2^-127, a subnormal."""
    return tl.maximum(bits << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def scales_of(base, scale, at, here, other, SCALE: tl.constexpr, POWER: tl.constexpr):
    """Load scales of integer codes, float32; those of a byte times 2^POWER, and without their outer one.

    Others multiplied here too would take three registers more of a thread in `few`.
    """
    if SCALE == "e3m5":
        bits = tl.load(section(base, scale, tl.uint8) + at, mask=here, other=other).to(tl.int32)
        return ((bits << 18) + ((127 + POWER) << 23)).to(tl.float32, bitcast=True)
    else:
        of: tl.constexpr = tl.float16 if SCALE == "fp16" else tl.bfloat16
        return tl.load(section(base, scale, of) + at, mask=here, other=other).to(tl.float32)


@triton.jit
def finish(total, base, scale, outer, bias, row, here, SCALE: tl.constexpr, OUTER: tl.constexpr, BIAS: tl.constexpr):
    """Apply what holds for whole rows to their sums: scales, then biases. `row` and `here` have as many dimensions."""
    if SCALE == "row":
        total *= tl.load(section(base, scale, tl.float32) + row, mask=here, other=0.0)
    if OUTER:
        total *= tl.load(section(base, outer, tl.float32) + row // 16, mask=here, other=0.0)
    if BIAS:
        total += tl.load(section(base, bias, tl.bfloat16) + row, mask=here, other=0.0).to(tl.float32)
    return total


@triton.jit
def window(base, offset, cols, row, blocks, k, P: tl.constexpr, EVEN: tl.constexpr):
    """Load P bits of each of 15 columns of one plane, from seven before column k on; k is a multiple of 8.

    Before the first column all bits are 0.
    """
    plane = section(base, offset, tl.uint32)
    words = (cols * P + 31) // 32
    w = k * P // 32
    at = (row // 16 * words + w) * 16 + row % 16
    begin = (k + 25) * P  # 32 * P more than the window's first bit, so that it is not negative
    back = w + P - begin // 32  # 1 if that bit is in the word before, else 0
    if EVEN:
        v = tl.load(plane + at)
        before = tl.load(plane + at - back * 16, mask=k > 0, other=0)
    else:
        here = (row // 16 < blocks) & (w < words)
        v = tl.load(plane + at, mask=here, other=0)
        before = tl.load(plane + at - back * 16, mask=here & (k > 0), other=0)
    by = (begin % 32).to(tl.uint32)  # never 0
    return (v << (32 - by)) | (before >> by)


@triton.jit
def state(low, high, at, BITS: tl.constexpr):
    """Return the states of column `at` of eight whose windows these are (codec/trellis.py)."""
    if BITS == 3:
        return ((low >> (2 * at)) ^ ((high >> at) & 0xFF)) & 0xFFFF
    else:
        return (low >> (2 * at)) & 0xFFFF


@triton.jit
def levels(one, other):
    """Return the levels of two states in the halves of a word: four means of bytes are computed at a time."""
    p = one * FACTOR
    q = other * FACTOR
    one = (p & 0xFFFF) | (q & 0xFFFF0000)
    other = (p >> 16) | (q << 16)
    means = (one | other) - (((one ^ other) & 0xFEFEFEFE) >> 1)
    return means - ((means >> 8) & 0x00FF00FF) * 255  # of a half's two bytes, even + 256 odd, even + odd is left


@triton.jit
def centred(level):
    """Return levels less their mean, float32, exactly: they are the last bits of numbers from 2^23 on."""
    return (level | 0x4B000000).to(tl.float32, bitcast=True) - MIDDLE


@triton.jit
def _moved(bits, BY: tl.constexpr):
    """Shift right by BY, or left if it is negative."""
    if BY >= 0:
        return bits >> BY
    else:
        return bits << -BY


@triton.jit
def _pair(low, high, ones, AT: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, PART: tl.constexpr):
    """Return two BF16 numbers in one word: the codes at place AT of both halves of the words."""
    if MANTISSA == TRELLIS:
        both = levels(state(low, high, AT, BITS), state(low, high, AT + 4, BITS))
        left = centred(both & 0xFFFF).to(tl.uint32, bitcast=True)
        right = centred(both >> 16).to(tl.uint32, bitcast=True)
        return (left >> 16) | (right & 0xFFFF0000)
    elif MANTISSA == 1:  # a sign and three bits
        return (_moved(low, 4 * AT - 12) & 0x80008000) | (_moved(low, 4 * AT - 6) & 0x01C001C0)
    elif MANTISSA == 3:  # a sign and seven bits
        return (_moved(low, 8 * AT - 8) & 0x80008000) | (_moved(low, 8 * AT - 4) & 0x07F007F0)
    elif BITS == 8:  # half of 1 + the code's low seven bits / 128; half of 1 + its high bit, in an exponent
        return (_moved(low, 8 * AT) & (0x00800080 if PART else 0x007F007F)) | ones
    elif (BITS == 3) | (BITS == 5):
        least: tl.constexpr = ((1 << (BITS - 1)) - 1) << (7 - BITS)
        most = (_moved(high, AT - 6) & 0x00400040) | ones
        return (_moved(low, (BITS - 1) * AT - 7 + BITS) & (least * 0x10001)) | most
    else:
        mask: tl.constexpr = ((1 << BITS) - 1) << (7 - BITS)
        return (_moved(low, BITS * AT - 7 + BITS) & (mask * 0x10001)) | ones


@triton.jit
def _two(low, high, ones, AT: tl.constexpr, BY: tl.constexpr, B: tl.constexpr, M: tl.constexpr):
    return tl.join(_pair(low, high, ones, AT, B, M, 0), _pair(low, high, ones, AT + BY, B, M, 0))


@triton.jit
def _four(low, high, ones, AT: tl.constexpr, BY: tl.constexpr, B: tl.constexpr, M: tl.constexpr):
    return tl.join(_two(low, high, ones, AT, 2 * BY, B, M), _two(low, high, ones, AT + BY, 2 * BY, B, M))


@triton.jit
def _eight(low, high, ones, AT: tl.constexpr, BY: tl.constexpr, B: tl.constexpr, M: tl.constexpr):
    return tl.join(_four(low, high, ones, AT, 2 * BY, B, M), _four(low, high, ones, AT + BY, 2 * BY, B, M))


@triton.jit
def _pairs(low, high, ones, B: tl.constexpr, M: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a thread's COLUMNS codes of each row: words of two, [U, S, Q, T, E, ...], then dimensions of 2."""
    if B == 8:  # four codes of `low`, then of `high`
        even = tl.join(_pair(low, high, ones, 0, B, M, PART), _pair(high, low, ones, 0, B, M, PART))
        return tl.join(even, tl.join(_pair(low, high, ones, 1, B, M, PART), _pair(high, low, ones, 1, B, M, PART)))
    elif COLUMNS == 4:
        return _two(low, high, ones, 0, 1, B, M)
    elif COLUMNS == 8:
        return _four(low, high, ones, 0, 1, B, M)
    elif COLUMNS == 16:
        return _eight(low, high, ones, 0, 1, B, M)
    else:
        return tl.join(_eight(low, high, ones, 0, 2, B, M), _eight(low, high, ones, 1, 2, B, M))


@triton.jit
def _plane(base, offset, cols, row, blocks, k, t, P: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Load one plane's words of COLUMNS columns from column k on, the first half of the codes in the low 16 bits."""
    plane = section(base, offset, tl.uint32)
    words = (cols * P + 31) // 32
    w = k * P // 32
    at = (row // 16 * words + w) * 16 + row % 16
    if EVEN:
        v = tl.load(plane + at)
    else:
        v = tl.load(plane + at, mask=(row // 16 < blocks) & (w < words), other=0)
    if COLUMNS * P < 32:
        half: tl.constexpr = COLUMNS * P // 2
        v = v >> (t * (COLUMNS * P) % 32).to(tl.uint32)
        v = (v & ((1 << half) - 1)) | ((v & (((1 << half) - 1) << half)) << (16 - half))
    return v


@triton.jit
def words(
    base,
    low,
    high,
    cols,
    row,
    blocks,
    k,
    t,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    APART: tl.constexpr,
):
    """Load both tensors that `numbers` takes: words of two planes, or the same words twice; of trellis codes windows.

    Of eight bits, words of four columns from column k on, and of four columns that begin APART further.
    """
    if MANTISSA == TRELLIS:
        left = window(base, low, cols, row, blocks, k, 2, EVEN)
        return left, window(base, high, cols, row, blocks, k, 1, EVEN) if BITS == 3 else left
    elif BITS == 8:
        left = _plane(base, low, cols, row, blocks, k, t, 8, COLUMNS, EVEN)
        return left, _plane(base, low, cols, row, blocks, k + APART, t, 8, COLUMNS, EVEN)
    elif (BITS == 3) | (BITS == 5):
        left = _plane(base, low, cols, row, blocks, k, t, BITS - 1, COLUMNS, EVEN)
        return left, _plane(base, high, cols, row, blocks, k, t, 1, COLUMNS, EVEN)
    else:
        left = _plane(base, low, cols, row, blocks, k, t, BITS, COLUMNS, EVEN)
        return left, left


@triton.jit
def numbers(
    low,
    high,
    ones,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return the numbers of `_pairs`, BF16 or as float32 if WIDE, both of a word in one more dimension of 2."""
    pairs = _pairs(low, high, ones, BITS, MANTISSA, PART, COLUMNS)
    if WIDE:
        left = (pairs << 16).to(tl.float32, bitcast=True)
        right = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        left = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        right = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(left, right)


@triton.jit
def _plain(
    base, offset, cols, first, rows, begin, U: tl.constexpr, STRIDE: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr
):
    """Load BF16 weights, which lie row by row: [U, E, S, Q, T, 8 columns]."""
    row = first + tl.arange(0, 4)[None, :, None, None, None, None]
    row += tl.arange(0, 8)[None, None, None, :, None, None] * 4
    k = begin + tl.arange(0, U)[:, None, None, None, None, None] * 32
    k += tl.arange(0, S)[None, None, :, None, None, None] * STRIDE
    k += tl.arange(0, 4)[None, None, None, None, :, None] * 8 + tl.arange(0, 8)[None, None, None, None, None, :]
    weights = section(base, offset, tl.bfloat16)
    at = row.to(tl.int64) * cols + k
    if EVEN:
        return tl.load(weights + at)
    else:
        return tl.load(weights + at, mask=(row < rows) & (k < cols), other=0.0)


@triton.jit
def _load(
    base,
    low,
    high,
    cols,
    first,
    rows,
    begin,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    COLUMNS: tl.constexpr,
    U: tl.constexpr,
    STRIDE: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load what 32 rows from `first` on have in U times 4 * COLUMNS columns a warp: two tensors [U, S, Q, T, E]."""
    if BITS == 16:
        left = _plain(base, low, cols, first, rows, begin, U, STRIDE, S, EVEN)
        return left, left
    else:
        blocks = (rows + 15) // 16
        t = tl.arange(0, 4)[None, None, None, :, None]
        row = first + tl.arange(0, 8)[None, None, :, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
        # Four threads' words of eight bits are neighbours in one load, so that it takes whole lines of 128 bytes: over
        # the bus, each line that is taken in halves is two requests.
        own: tl.constexpr = 4 if BITS == 8 else COLUMNS
        k = begin + tl.arange(0, U)[:, None, None, None, None] * (4 * COLUMNS) + t * own
        k += tl.arange(0, S)[None, :, None, None, None] * STRIDE
        return words(base, low, high, cols, row, blocks, k, t, BITS, MANTISSA, COLUMNS, EVEN, 16)


@triton.jit
def _weights(
    low,
    high,
    ones,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    U: tl.constexpr,
    S: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return the first factor [S, ROWS, U * 4 * COLUMNS] of what `_load` returns."""
    if BITS == 16:
        w = tl.permute(tl.reshape(low, [U, 4, S, 8, 4, 4, 2]), [2, 1, 3, 0, 5, 4, 6])
    else:
        w = tl.reshape(
            numbers(low, high, ones, BITS, MANTISSA, PART, COLUMNS, WIDE), [U, S, 8, 4, 4, COLUMNS // 4, 2, 2]
        )
        w = tl.permute(w, [1, 4, 2, 0, 5, 3, 6, 7])
    if WIDE:
        w = w.to(tl.float32)  # BF16 weights
    if MANTISSA == 1:
        w *= 2.0**126
    elif MANTISSA == 3:
        w *= 2.0**120
    return tl.reshape(w, [S, 32, U * 4 * COLUMNS])


@triton.jit
def _activations(
    xs,
    cols,
    begin,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    U: tl.constexpr,
    STRIDE: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load activations of eight slots: [U, S, slots, T, COLUMNS]; `xs` are the slots' rows, [slots]."""
    side: tl.constexpr = 4 if BITS == 8 else min(COLUMNS, 8)  # columns that lie side by side
    apart: tl.constexpr = 16 if BITS == 8 else side  # between a thread's sides, as `_load` takes them
    own: tl.constexpr = 4 if BITS == 8 else COLUMNS  # between threads
    k = begin + tl.arange(0, COLUMNS // side)[:, None, None, None, None, None] * apart
    k += tl.arange(0, U)[None, :, None, None, None, None] * (4 * COLUMNS)
    k += tl.arange(0, S)[None, None, :, None, None, None] * STRIDE
    k += tl.arange(0, 4)[None, None, None, None, :, None] * own
    k += tl.arange(0, side)[None, None, None, None, None, :]
    from_x = xs[None, None, None, :, None, None] + k
    if EVEN:
        x = tl.load(from_x)
    else:
        x = tl.load(from_x, mask=k < cols, other=0.0)
    return tl.reshape(tl.permute(x, [1, 2, 3, 4, 0, 5]), [U, S, 8, 4, COLUMNS])


@triton.jit
def _second(x, BITS: tl.constexpr, COLUMNS: tl.constexpr, U: tl.constexpr, S: tl.constexpr, ALONE: tl.constexpr):
    """Return the second factor [S, U * 4 * COLUMNS, slots], columns in the order of `_weights`.

    If ALONE, in that of tensor cores whose first factor is a constant, which Triton takes two columns at a time.
    """
    if BITS == 16:
        y = tl.permute(tl.reshape(x, [U, S, 8, 4, 4, 2]), [1, 0, 4, 3, 5, 2])
    elif BITS == 8:
        y = tl.reshape(x, [U, S, 8, 4, 2, 2, 2])
        y = tl.permute(y, [1, 0, 6, 4, 3, 5, 2]) if ALONE else tl.permute(y, [1, 0, 4, 3, 6, 5, 2])
    elif ALONE:
        y = tl.permute(tl.reshape(x, [U, S, 8, 4, 2, COLUMNS // 8, 2, 2]), [1, 0, 5, 7, 6, 3, 4, 2])
    else:
        y = tl.permute(tl.reshape(x, [U, S, 8, 4, 2, COLUMNS // 4, 2]), [1, 0, 5, 3, 6, 4, 2])
    return tl.reshape(y, [S, U * 4 * COLUMNS, 8])


@triton.jit
def _scaled(
    part,
    sums,
    base,
    scale,
    zero,
    cols,
    first,
    rows,
    g,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Apply a group's scales and zero points to its sums: [S, Q, T, E, 2], slots in the dimensions T and 2."""
    part = tl.permute(tl.reshape(part, [S, 4, 8, 4, 2]), [0, 2, 3, 1, 4])
    if (BITS == 16) | (SCALE == "row"):
        return part
    else:
        groups = (cols + GROUP - 1) // GROUP
        blocks = (rows + 15) // 16
        row = first + tl.arange(0, 8)[None, :, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
        n = g + tl.arange(0, S)[:, None, None, None]
        here = None if EVEN else (row // 16 < blocks) & (n < groups)
        other = None if EVEN else 0
        at = row // 16 * groups + n + tl.arange(0, 4)[None, None, :, None] * 0  # the same for all four threads
        if SCALE == "block":
            s = tl.load(section(base, scale, tl.float32) + at, mask=here, other=other)
            return part * s[:, :, :, :, None]
        at = at * 16 + row % 16
        if SCALE == "e8m0":
            bits = tl.load(section(base, scale, tl.uint8) + at, mask=here, other=other).to(tl.int32)
            return part * e8m0(bits)[:, :, :, :, None]
        elif SCALE == "e4m3":
            return (
                part
                * e4m3(tl.load(section(base, scale, tl.uint8) + at, mask=here, other=other).to(tl.int32))[
                    :, :, :, :, None
                ]
            )
        else:
            if MANTISSA == TRELLIS:
                return part * scales_of(base, scale, at, here, other, SCALE, 0)[:, :, :, :, None]
            s = scales_of(base, scale, at, here, other, SCALE, BITS)
            sums = tl.permute(tl.reshape(sums, [S, 2, 8, 4, 2]), [0, 2, 3, 1, 4])
            sums = tl.max(sums, 3)[:, :, :, None, :]  # of two that are the same
            if ZEROS == 1:
                z = tl.load(section(base, zero, tl.uint8) + at, mask=here, other=other).to(tl.float32)
                part -= sums * (z * (1 / 256) + 1)[:, :, :, :, None]
            elif ZEROS == 2:
                part -= sums * 1.5
            else:
                part -= sums * (((1 << BITS) - 1) / (2 << BITS) + 1)
            return part * (s if SCALE == "e3m5" else s * (1 << BITS))[:, :, :, :, None]


@triton.jit
def _sums(
    base,
    xs,
    rows,
    cols,
    made,
    low,
    high,
    scale,
    zero,
    ones,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
    GATED: tl.constexpr,
    U: tl.constexpr,
    S: tl.constexpr,
    EVEN: tl.constexpr,
    TERMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return every warp's sums [S, Q, T, E, 2] of the program's rows, and of those `made` rows further if GATED."""
    tl.static_assert((BITS == 16) | (BITS == 8) | (BITS <= 5), "an encoding that this kernel does not know")
    first = tl.program_id(1) * 32
    total = tl.zeros([S, 8, 4, 4, 2], dtype=tl.float32)
    total_up = tl.zeros([S, 8, 4, 4, 2], dtype=tl.float32)
    PARTS: tl.constexpr = 2 if (BITS == 8) & (MANTISSA == 0) else 1
    kind: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    unit = tl.full([S, 16, U * 4 * COLUMNS], 1.0, kind)
    for g in range(0, (cols + GROUP - 1) // GROUP, S):
        part = tl.zeros([S, 32, 8], dtype=tl.float32)
        up = tl.zeros([S, 32, 8], dtype=tl.float32)
        of_x = tl.zeros([S, 16, 8], dtype=tl.float32)
        for step in tl.static_range(GROUP // (4 * COLUMNS * U)):
            begin = g * GROUP + step * (4 * COLUMNS * U)
            a, a1 = _load(base, low, high, cols, first, rows, begin, BITS, MANTISSA, COLUMNS, U, GROUP, S, EVEN)
            if GATED:
                b, b1 = _load(
                    base, low, high, cols, first + made, rows, begin, BITS, MANTISSA, COLUMNS, U, GROUP, S, EVEN
                )
            rest = _activations(xs, cols, begin, BITS, COLUMNS, U, GROUP, S, EVEN)
            for _term in tl.static_range(TERMS):
                y = rest.to(tl.bfloat16)
                if TERMS > 1:
                    rest = rest.to(tl.float32) - y.to(tl.float32)
                y = y.to(kind)
                second = _second(y, BITS, COLUMNS, U, S, False)
                for p in tl.static_range(PARTS):
                    w = _weights(a, a1, ones, BITS, MANTISSA, p, COLUMNS, U, S, WIDE)
                    part = tl.dot(w, second, part, input_precision="ieee")
                    if GATED:
                        w = _weights(b, b1, ones, BITS, MANTISSA, p, COLUMNS, U, S, WIDE)
                        up = tl.dot(w, second, up, input_precision="ieee")
                if (BITS < 16) & (MANTISSA == 0):
                    of_x = tl.dot(unit, _second(y, BITS, COLUMNS, U, S, True), of_x, input_precision="ieee")
        total += _scaled(
            part, of_x, base, scale, zero, cols, first, rows, g, BITS, MANTISSA, SCALE, GROUP, ZEROS, S, EVEN
        )
        if GATED:
            total_up += _scaled(
                up, of_x, base, scale, zero, cols, first + made, rows, g, BITS, MANTISSA, SCALE, GROUP, ZEROS, S, EVEN
            )
    return total, total_up


@triton.jit(do_not_specialize=["slots", "share", "version", "ones"])
def few(
    handles,
    order,
    block_expert,
    block_first,
    block_count,
    x,
    out,
    rows,
    cols,
    slots,
    share,
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
    S: tl.constexpr,
    EVEN: tl.constexpr,
    TERMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply blocks of eight slots as many_triton.py's `many` does; COLUMNS are a thread's in one load.

    `ones` are two BF16 numbers in a word, for `_pair`: as constants they were moved into registers again and again.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, 8)
    mine = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]  # the slots of a thread's sums
    if DENSE:
        base = handles
        runs = True
        count = slots - block * 8
        lane = (block * 8 + tl.minimum(lane, count - 1)).to(tl.int64)
        at = (block * 8 + mine).to(tl.int64)
    else:
        count = tl.load(block_count + block)
        word = tl.load(handles + tl.load(block_expert + block))
        runs = (count > 0) & ((word & 63) == version)
        base = (word - (word & 63)).to(tl.pointer_type(tl.uint8))
        from_order = order + tl.load(block_first + block)
        lane = tl.load(from_order + lane, mask=lane < count, other=0).to(tl.int64)
        at = tl.load(from_order + mine, mask=mine < count, other=0).to(tl.int64)
    if runs:
        made = rows // 2 if GATED else rows
        total, up = _sums(
            base,
            x + lane // share * cols,
            rows,
            cols,
            made,
            low,
            high,
            scale,
            zero,
            ones,
            BITS,
            MANTISSA,
            SCALE,
            GROUP,
            COLUMNS,
            ZEROS,
            GATED,
            U,
            S,
            EVEN,
            TERMS,
            WIDE,
        )
        row = tl.program_id(1) * 32 + tl.arange(0, 8)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, :, None]
        here = row < made
        y = finish(tl.sum(total, 0), base, scale, outer, bias, row, here, SCALE, OUTER, BIAS)
        if GATED:
            z = finish(tl.sum(up, 0), base, scale, outer, bias, row + made, here, SCALE, OUTER, BIAS)
            y = y * (1.0 / (1.0 + tl.exp(-y))) * z
        to = out + at[None, :, None, :] * made + row
        tl.store(to, y.to(out.dtype.element_ty), mask=(mine < count)[None, :, None, :] & here)
