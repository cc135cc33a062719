"""Experts' products on a GPU, straight from their extents: a grouped product, one launch for each version.

Programs find an expert's extent (FORMAT.md, "Affine extents") through the handle table, and return at once if the
expert's version is not the launch's. So all launches of a layer share one `Geometry`. Nothing waits for the device, and
a CUDA graph may capture the launches. Tensor cores multiply numbers that are exact in BF16: integer codes minus the
middle of their range, E4M3 codes, and E2M1 or E4M3 codes times scales of one byte. Other scales and zero points are
applied to sums in float32, and so is what holds for whole rows, once, at the end. FP16 activations are exact in TF32;
float32 ones are taken as two TF32 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moepack.pack.spec import Matrix

from .forms import Form, kernel_of
from .gemv_triton import ROWS, SLOTS, few, finish, section

_BLOCK: tl.constexpr = tl.constexpr(16)  # rows stored side by side


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile of one program: `tokens` slots of an expert by `rows` rows, up to `columns` columns at a time."""

    tokens: int
    rows: int
    columns: int = 64
    warps: int = 4
    stages: int = 3


# Chosen so that no kernel spills registers or passes an architecture's shared memory: `python -m benchmarks.resources`.
DECODE = Tiling(SLOTS.value, ROWS.value)  # gemv_triton.py's
PREFILL = Tiling(64, 128, warps=8)  # with 128 columns at 8 bits it took 128 KiB of shared memory
# For few and for many tokens of an expert. FP16 operands take twice the registers of BF16 ones, float32 ones four.
TILINGS = {
    torch.bfloat16: (DECODE, PREFILL),
    torch.float16: (DECODE, Tiling(32, 64)),
    torch.float32: (DECODE, Tiling(32, 64, columns=32, stages=2)),
}
ONES = (0x3F803F80, 0x3F003F00)  # two BF16 numbers in a word, for codes of up to five bits and of eight: `few`
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # BF16 numbers of an activation, for few tokens
_PRECISION = {torch.bfloat16: "ieee", torch.float16: "tf32", torch.float32: "tf32x3"}  # of tensor cores

# By an encoding's number in KERNELS: the bits of its codes, the mantissa bits of codes that are floating-point numbers,
# and what its scales are. Other numbers are the bits of integer codes with BF16 scales.
_RELEASED = {
    17: (4, 1, "e8m0"),
    18: (4, 1, "e4m3"),
    19: (8, 3, "e8m0"),
    20: (8, 3, "block"),  # float32, one for 16 rows and a group of columns
    21: (8, 3, "row"),  # float32
    22: (4, 0, "fp16"),
    23: (8, 0, "fp16"),
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Slots sorted by expert and cut into blocks, the same for every version and matrix of a layer's pass."""

    order: Tensor  # int32 [slots]: the slots sorted by expert; slots with an index past the last expert come last
    expert: Tensor  # int32 [blocks]: the expert of each block
    first: Tensor  # int32 [blocks]: where a block's slots begin in `order`
    count: Tensor  # int32 [blocks]: the number of a block's slots
    tokens: int  # the most slots of a block


def route(index: Tensor, experts: int, tokens: int) -> Geometry:
    """Sort slots by expert and cut them into blocks of `tokens` slots, on the device and without waiting.

    `index` is int64 [tokens, top_k]; a slot with an index past the last expert adds nothing.
    """
    flat = index.reshape(-1).clamp(0, experts)
    slots = flat.numel()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    begins = torch.cumsum(counts, 0) - counts
    blocks = (counts[:experts] + tokens - 1) // tokens
    ends = torch.cumsum(blocks, 0)
    number = torch.arange(min(slots, experts) + slots // tokens, device=flat.device)  # enough for any routing
    expert = torch.searchsorted(ends, number, right=True)
    safe = expert.clamp(max=experts - 1)
    within = (number - (ends[safe] - blocks[safe])) * tokens
    count = torch.where(expert < experts, (counts[safe] - within).clamp(0, tokens), 0)
    as_int = [t.to(torch.int32) for t in (order, safe, begins[safe] + within, count)]
    return Geometry(as_int[0], as_int[1], as_int[2], as_int[3], tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _plane(base, offset, cols, row, here, g, P: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read the P-bit codes of one plane for one step's columns: int32 [ROWS, COLUMNS]."""
    words = (cols * P + 31) // 32
    w = g * (COLUMNS * P // 32) + tl.arange(0, COLUMNS * P // 32)
    at = ((row // _BLOCK)[:, None] * words + w[None, :]) * _BLOCK + (row % _BLOCK)[:, None]
    plane = section(base, offset, tl.uint32)
    v = tl.load(plane + at, mask=here[:, None] & (w < words)[None, :], other=0)
    shift = (tl.arange(0, 32 // P) * P).to(tl.uint32)
    codes = (v[:, :, None] >> shift[None, None, :]) & ((1 << P) - 1)
    return tl.reshape(codes.to(tl.int32), [ROWS, COLUMNS])


@triton.jit  # type: ignore[untyped-decorator]
def _number(codes, BITS: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of floating-point codes of BITS bits, float16, exactly.

    The code's bits are moved to their places in an FP16 number, which is too small by a power of two: the difference of
    both exponents' biases. Numbers without an exponent of their own (subnormal ones) come out right, too.
    """
    sign: tl.constexpr = 1 << (BITS - 1)
    size = (codes & (sign - 1)) << (10 - MANTISSA)
    half = (size | (codes & sign) << (16 - BITS)).to(tl.uint16).to(tl.float16, bitcast=True)
    return half * (1 << (16 - (1 << (BITS - 2 - MANTISSA))))


@triton.jit  # type: ignore[untyped-decorator]
def _floats(  # type: ignore[no-untyped-def]
    base, low, scale, cols, row, here, g, x, total,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_step` for floating-point codes."""
    w = _number(_plane(base, low, cols, row, here, g, BITS, COLUMNS, ROWS), BITS, MANTISSA)
    groups = (cols + GROUP - 1) // GROUP
    if SCALE == "row":
        total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision=PRECISION)
    elif SCALE == "block":
        at = (row // _BLOCK) * groups + g * COLUMNS // GROUP
        s = tl.load(section(base, scale, tl.float32) + at, mask=here, other=0.0)
        total += tl.dot(x, tl.trans(w.to(x.dtype)), input_precision=PRECISION) * s[None, :]
    else:
        n = g * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
        at = ((row // _BLOCK)[:, None] * groups + n[None, :]) * _BLOCK + (row % _BLOCK)[:, None]
        bits = tl.load((base + scale) + at, mask=here[:, None] & (n < groups)[None, :], other=0).to(tl.int32)
        if SCALE == "e4m3":
            s = _number(bits, 8, 3).to(tl.float32)
        else:  # the bits of an exponent; 0 is 2^-127, which in float32 is subnormal
            s = tl.maximum(bits << 23, 1 << 22).to(tl.float32, bitcast=True)
        scaled = tl.reshape(w.to(tl.float32), [ROWS, COLUMNS // GROUP, GROUP]) * s[:, :, None]
        w = tl.reshape(scaled, [ROWS, COLUMNS]).to(x.dtype)
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    base, low, high, scale, zero, cols, row, here, g, x, sums, total,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    STORED: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return total [TOKENS, ROWS] plus the product over the g-th COLUMNS columns."""
    if BITS == 16:
        k = g * COLUMNS + tl.arange(0, COLUMNS)
        weights = section(base, low, tl.bfloat16)
        at = row.to(tl.int64)[:, None] * cols + k[None, :]
        w = tl.load(weights + at, mask=here[:, None] & (k < cols)[None, :], other=0.0)
        return tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision=PRECISION)
    elif MANTISSA > 0:
        return _floats(
            base, low, scale, cols, row, here, g, x, total, BITS, MANTISSA, SCALE, GROUP, COLUMNS, ROWS, PRECISION
        )
    else:
        tl.static_assert((BITS == 8) | ((BITS >= 1) & (BITS <= 5)), "an encoding that this kernel does not know")
        if (BITS == 3) | (BITS == 5):
            codes = _plane(base, low, cols, row, here, g, BITS - 1, COLUMNS, ROWS)
            codes = codes + (1 << (BITS - 1)) * _plane(base, high, cols, row, here, g, 1, COLUMNS, ROWS)
        else:
            codes = _plane(base, low, cols, row, here, g, BITS, COLUMNS, ROWS)
        middle: tl.constexpr = ((1 << BITS) - 1) / 2
        c = (codes.to(tl.float32) - middle).to(x.dtype)
        part = tl.dot(x, tl.trans(c), input_precision=PRECISION)
        groups = (cols + GROUP - 1) // GROUP
        at = ((row // _BLOCK) * groups + g * COLUMNS // GROUP) * _BLOCK + row % _BLOCK
        of: tl.constexpr = tl.float16 if SCALE == "fp16" else tl.bfloat16
        s = tl.load(section(base, scale, of) + at, mask=here, other=0.0).to(tl.float32)
        if STORED:
            z = tl.load(section(base, zero, tl.uint8) + at, mask=here, other=0).to(tl.float32)
            z = z * (1.0 / (1 << (8 - BITS))) - middle
            part = part - sums[:, None] * z[None, :]
        return total + part * s[None, :]


@triton.jit(do_not_specialize=["slots", "share", "version"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    handles, order, block_expert, block_first, block_count, x, out,
    rows, cols, slots, share, version, low, high, scale, zero, bias, outer,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    STORED: tl.constexpr, BIAS: tl.constexpr, OUTER: tl.constexpr, GATED: tl.constexpr, DENSE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, TOKENS)
    if DENSE:  # `handles` is the matrix's extent, and slots are tokens in order
        base, runs = handles, True
        live = block * TOKENS + lane < slots
        slot = (block * TOKENS + lane).to(tl.int64)
    else:
        count = tl.load(block_count + block)
        word = tl.load(handles + tl.load(block_expert + block))
        runs = (count > 0) & ((word & 63) == version)
        base = (word - (word & 63)).to(tl.pointer_type(tl.uint8))
        live = lane < count
        slot = tl.load(order + tl.load(block_first + block) + lane, mask=live, other=0).to(tl.int64)
    if runs:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        made = rows // 2 if GATED else rows  # rows of the result
        here = row < made
        from_x = x + (slot // share)[:, None] * cols
        total = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        up = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        for g in range(0, (cols + COLUMNS - 1) // COLUMNS):
            k = g * COLUMNS + tl.arange(0, COLUMNS)
            xs = tl.load(from_x + k[None, :], mask=live[:, None] & (k < cols)[None, :], other=0.0)
            if PRECISION != "ieee":
                xs = xs.to(tl.float32)
            sums = tl.sum(xs.to(tl.float32), 1)
            total = _step(
                base, low, high, scale, zero, cols, row, here, g, xs, sums, total,
                BITS, MANTISSA, SCALE, GROUP, COLUMNS, STORED, ROWS, PRECISION,
            )  # fmt: skip
            if GATED:
                up = _step(
                    base, low, high, scale, zero, cols, row + made, here, g, xs, sums, up,
                    BITS, MANTISSA, SCALE, GROUP, COLUMNS, STORED, ROWS, PRECISION,
                )  # fmt: skip
        total = finish(total, base, scale, outer, bias, row[None, :], here[None, :], SCALE, OUTER, BIAS)
        if GATED:
            up = finish(up, base, scale, outer, bias, row[None, :] + made, here[None, :], SCALE, OUTER, BIAS)
            total = total * (1.0 / (1.0 + tl.exp(-total))) * up
        to = out + slot[:, None] * made + row[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=live[:, None] & here[None, :])


def _cases(form: Form, tiling: Tiling) -> dict[str, Any]:
    """What the kernel is compiled for: how it reads codes and scales, and how many columns it takes in a step."""
    bits, mantissa, scale = _RELEASED.get(form.bits, (form.bits, 0, "bf16"))
    columns = tiling.columns
    if form.group and (scale == "block" or not mantissa):  # scales are applied to sums
        columns = min(columns, form.group)
    return {
        "BITS": bits, "MANTISSA": mantissa, "SCALE": scale, "GROUP": form.group or columns, "COLUMNS": columns,
        "STORED": bool(form.stored),
    }  # fmt: skip


def few_cases(form: Form, rows: int, cols: int, terms: int, gated: bool, alone: bool) -> dict[str, Any]:
    """What the kernel for few tokens is compiled for: a thread's columns, loads and share of a matrix's columns.

    A warp has U loads' columns of R groups at a time: some four loads of 16 bytes a thread are to be under way, fewer
    if activations are several `terms`, which take registers too. A matrix that is `alone` and has few rows is divided
    among more warps, because its programs do not fill a GPU.
    """
    bits, mantissa, scale = _RELEASED.get(form.bits, (form.bits, 0, "bf16"))
    group = form.group or 128
    columns = min({1: 32, 2: 16, 3: 16}.get(bits, 8), group // 4)
    loads = {8: 2, 16: 4}.get(bits, 1)
    u = max(1, min(group // (4 * columns), (4, 2, 1)[terms - 1] // loads))
    groups = -(-cols // group)
    shares = (16, 8, 4, 2, 1) if alone and rows <= 64 * ROWS.value else (8, 4, 2, 1)
    warps = min(shares, key=lambda n: (-groups % n, -n))
    most = (4, 2, 1)[terms - 1] >> gated  # of both halves; with twice as many, threads take over 200 registers
    r = next(r for r in (4, 2, 1) if r == 1 or (r * u * loads <= most and groups % (warps * r) == 0))
    even = rows % ROWS.value == 0 and cols % (group * warps * r) == 0
    return {
        "BITS": bits, "MANTISSA": mantissa, "SCALE": scale, "GROUP": group, "COLUMNS": columns,
        "STORED": bool(form.stored), "U": u, "S": warps * r, "EVEN": even, "num_warps": warps, "num_stages": 1,
    }  # fmt: skip


def product(
    matrix: Matrix,
    forms: Sequence[Form],
    served: Sequence[int],
    handles: Tensor,
    geometry: Geometry,
    x: Tensor,
    out: Tensor,
    tiling: Tiling,
    gated: bool = False,
) -> None:
    """Compute y = W x + b for every slot, by one launch for each version on the current stream, without waiting.

    Args:
        forms: the matrix's form in every version, by the version's number.
        served: the version numbers that handles contain; each costs a launch.
        handles: int64 [experts] on the device.
        geometry: the result of `route` with the tiling's `tokens`.
        x: float32, float16 or bfloat16 [activations, cols]; there are a multiple of as many slots.
        out: [slots, rows], or [slots, rows / 2] if `gated`; rows of slots of absent experts are not written.
        gated: whether to compute silu(gate) * up of the two halves of the rows.

    Raises:
        InputError: for an encoding that the kernels do not know.
        ValueError: for shapes or dtypes that do not fit.
    """
    check(matrix, len(geometry.order), handles, geometry, x, out, tiling, gated)
    blocks = geometry.order, geometry.expert, geometry.first, geometry.count
    grid = (len(geometry.expert), triton.cdiv(matrix.rows >> gated, tiling.rows))
    for number in served:
        _launch(grid, forms[number], matrix, handles, blocks, x, out, tiling, number, gated)


def check(
    matrix: Matrix, slots: int, handles: Tensor, geometry: Geometry, x: Tensor, out: Tensor, tiling: Tiling, gated: bool
) -> None:
    """Raise ValueError for arguments of `product` whose shapes or dtypes do not fit, or not together."""
    made = matrix.rows >> gated
    if x.shape[-1] != matrix.cols or out.shape != (slots, made) or not slots or slots % len(x):
        raise ValueError(f"{matrix.name}: x {tuple(x.shape)}, out {tuple(out.shape)} and {slots} slots do not fit")
    if x.dtype not in TILINGS or handles.dtype != torch.int64 or matrix.rows % (1 + gated):
        raise ValueError(f"{matrix.name}: x {x.dtype}, handles {handles.dtype}, {matrix.rows} rows")
    if geometry.tokens != tiling.tokens or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"{matrix.name}: the geometry is of another tiling, or a tensor is not contiguous")


def dense(matrix: Matrix, form: Form, extent: Tensor, x: Tensor, out: Tensor) -> None:
    """Compute y = W x + b for every token by one matrix alone, with one launch on the current stream.

    Args:
        form: the matrix's form in its version.
        extent: uint8, on the device, beginning on a multiple of 16.
        x: float32, float16 or bfloat16 [tokens, cols].
        out: [tokens, rows].

    Raises:
        InputError: for an encoding that the kernels do not know.
        ValueError: for shapes or dtypes that do not fit.
    """
    tokens = len(x)
    if x.shape != (tokens, matrix.cols) or out.shape != (tokens, matrix.rows) or not tokens or x.dtype not in TILINGS:
        raise ValueError(f"{matrix.name}: x {tuple(x.shape)}, {x.dtype} and out {tuple(out.shape)} do not fit")
    if not (x.is_contiguous() and out.is_contiguous()) or extent.dtype != torch.uint8 or extent.data_ptr() % 16:
        raise ValueError(f"{matrix.name}: an extent of {extent.dtype} or its place, or a tensor that is not contiguous")
    less, more = TILINGS[x.dtype]
    tiling = less if tokens <= 2 * less.tokens else more  # two blocks read the weights once: the second, from a cache
    grid = (triton.cdiv(tokens, tiling.tokens), triton.cdiv(matrix.rows, tiling.rows))
    _launch(grid, form, matrix, extent, None, x, out, tiling)


def _launch(
    grid: tuple[int, int], f: Form, matrix: Matrix, of: Tensor, blocks: Sequence[Tensor] | None,
    x: Tensor, out: Tensor, tiling: Tiling, version: int = 0, gated: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel for one version of experts, whose handles are `of`; or for one extent, without `blocks`."""
    kernel_of(f.name)
    args: tuple[Any, ...] = (
        of, *(blocks or (None, None, None, None)), x, out, matrix.rows, matrix.cols, len(out), len(out) // len(x),
        version, f.low, f.high, f.scale, f.zero, max(f.bias, 0), max(f.outer, 0),
    )  # fmt: skip
    named = {"BIAS": f.bias >= 0, "OUTER": f.outer >= 0, "GATED": gated, "DENSE": blocks is None}
    # Triton's interpreter multiplies the bits of BF16 numbers instead of their values, so it gets float32.
    if tiling == DECODE:
        terms = TERMS[x.dtype]
        cases = few_cases(f, matrix.rows >> gated, matrix.cols, terms, gated, blocks is None)
        few[grid](*args, ONES[cases["BITS"] == 8], **named, **cases, TERMS=terms, WIDE=not x.is_cuda)
        return
    precision = _PRECISION[x.dtype if x.is_cuda else torch.float32]
    _product[grid](
        *args, **named, **_cases(f, tiling), TOKENS=tiling.tokens, ROWS=tiling.rows, PRECISION=precision,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
