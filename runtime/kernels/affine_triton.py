"""Experts' products on a GPU, straight from their extents: grouped products, of each version by launches of its own.

Programs find an expert's extent (FORMAT.md, "Affine extents") through the handle table, and return at once if the
expert's version is not the launch's. So all launches of a layer share one `Geometry`. Nothing waits for the device, and
a CUDA graph may capture the launches. Tensor cores multiply numbers that are exact in BF16: integer codes and a one,
E4M3 and E2M1 codes, levels of trellis codes. Scales and zero points are applied to sums in float32. FP16 activations
are taken as two BF16 numbers, float32 ones as three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from moepack.pack.spec import Matrix

from .forms import SMALL, Form, kernel_of, slice_rows
from .gemv_triton import ROWS, SLOTS, TRELLIS, few
from .many_triton import BLOCK_COLUMNS, BLOCK_ROWS, STEP, arrange, many, unpack


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile of one program: `tokens` slots of an expert by `rows` rows."""

    tokens: int
    rows: int
    warps: int = 4
    stages: int = 3


# Chosen so that no kernel spills registers or passes an architecture's shared memory: `python -m benchmarks.resources`.
Constants = dict[str, Any]  # what a kernel is compiled for, by its parameters' names
DECODE = Tiling(SLOTS.value, ROWS.value)  # gemv_triton.py's
MANY = Tiling(32, 128)  # many_triton.py's; 64 slots took 1.12 to 1.29 of its time for 512 tokens, 0.86 to 1 for 2,048
BLOCK = 512  # numbers of a row that a program of `arrange` takes
BYTES = ("e8m0", "e4m3")  # scales of one byte, by which many_triton.py multiplies weights
PAIRS = 9, 10  # the architectures whose tensor cores take a thread's columns of the first factor by two, not by four
ONES = (0x3F803F80, 0x3F003F00)  # two BF16 numbers in a word, for codes of up to five bits and of eight: `few`
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # BF16 numbers of an activation

# By an encoding's number in KERNELS: the bits of its codes, the mantissa bits of codes that are floating-point numbers,
# and what its scales are. Other numbers are the bits of integer codes with BF16 scales, with SMALL added: of a byte.
_RELEASED = {
    17: (4, 1, "e8m0"),
    18: (4, 1, "e4m3"),
    19: (8, 3, "e8m0"),
    20: (8, 3, "block"),  # float32, one for 16 rows and a group of columns
    21: (8, 3, "row"),  # float32
    22: (4, 0, "fp16"),
    23: (8, 0, "fp16"),
}
_TRELLIS = {28: 2, 29: 3}  # the bits of trellis codes by their numbers, to which SMALL is added as well


@dataclass(frozen=True, slots=True)
class Geometry:
    """Slots sorted by expert and cut into blocks, the same for every version and matrix of a layer's pass."""

    order: Tensor  # int32 [slots]: the slots of blocks, sorted by expert; what comes after them is no slot
    expert: Tensor  # int32 [blocks]: the expert of each block
    first: Tensor  # int32 [blocks]: where a block's slots begin in `order`
    count: Tensor  # int32 [blocks]: the number of a block's slots
    tokens: int  # the most slots of a block

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the kernels' arguments for this object."""
        return self.order, self.expert, self.first, self.count


def _read(form: Form) -> Constants:
    """How kernels read a form: its codes, its scales, and the columns of a group that a thread takes in one load."""
    own = "e3m5" if form.bits > SMALL else "bf16"
    number = form.bits % SMALL
    integers = (_TRELLIS[number], TRELLIS.value, own) if number in _TRELLIS else (number, 0, own)
    bits, mantissa, scale = _RELEASED.get(form.bits, integers)
    group = form.group or 128
    # Eight columns of trellis codes and the seven before them are in a word.
    columns = min(8 if mantissa else {1: 32, 2: 16, 3: 16}.get(bits, 8), group // 4)
    return {
        "BITS": bits,
        "MANTISSA": mantissa,
        "SCALE": scale,
        "GROUP": group,
        "COLUMNS": columns,
        "ZEROS": form.zeros,
    }


def few_cases(form: Form, rows: int, cols: int, terms: int, gated: bool, alone: bool) -> Constants:
    """Return the compile-time constants of the kernel for few tokens: a thread's columns, loads and share.

    A warp has U loads' columns of R groups at a time: some four loads of 16 bytes a thread are to be under way, fewer
    if activations are several `terms`, which take registers too. A matrix that is `alone` and has few rows is divided
    among more warps, because its programs do not fill a GPU.
    """
    read = _read(form)
    group = read["GROUP"]
    columns = read["COLUMNS"]
    loads = 2 if read["MANTISSA"] == TRELLIS.value else {8: 2, 16: 4}.get(read["BITS"], 1)
    u = max(1, min(group // (4 * columns), (4, 2, 1)[terms - 1] // loads))
    groups = -(-cols // group)
    shares = (16, 8, 4, 2, 1) if alone and rows <= 64 * ROWS.value else (8, 4, 2, 1)
    warps = min(shares, key=lambda n: (-groups % n, -n))
    most = (4, 2, 1)[terms - 1] >> gated  # of both halves; with twice as many, threads take over 200 registers
    r = next(r for r in (4, 2, 1) if r == 1 or (r * u * loads <= most and groups % (warps * r) == 0))
    even = rows % ROWS.value == 0 and cols % (group * warps * r) == 0
    return {**read, "U": u, "S": warps * r, "EVEN": even, "num_warps": warps, "num_stages": 1}


def tiling_for(slots: float) -> Tiling:
    """The tile for experts that have so many slots each, on the average: a second block reads weights from a cache."""
    return DECODE if slots <= 2 * DECODE.tokens else MANY


def many_cases(form: Form, rows: int, cols: int, gated: bool) -> Constants:
    """Return the compile-time constants of the kernel for many tokens.

    With gate and up, a program has half as many rows of each.
    """
    read = _read(form)
    of = MANY.rows >> gated
    if read["BITS"] == 16:
        read["GROUP"] = STEP.value  # there are none
    step = STEP.value // (2 if read["BITS"] == 8 and not read["MANTISSA"] else 1)  # each code is two BF16 numbers
    span = step if read["SCALE"] in BYTES else min(read["GROUP"], step)
    u = max(1, span // (4 * read["COLUMNS"]))
    even = rows % of == 0 and cols % max(read["GROUP"], span) == 0
    trellis = read["MANTISSA"] == TRELLIS.value  # four loads of each step, which pass shared memory in three stages
    return {
        **read,
        "U": u,
        "EVEN": even,
        "TOKENS": MANY.tokens,
        "W": MANY.warps,
        "E": of // (8 * MANY.warps),
        "num_warps": MANY.warps,
        "num_stages": MANY.stages - trellis,
    }


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
    """Compute y = W x + b for every slot, on the current stream, without waiting.

    Args:
        forms: the matrix's form in every version, by the version's number.
        served: the version numbers that handles contain; each costs a launch, or two for many tokens.
        handles: int64 [experts] on the device.
        geometry: of `routing_triton.sort` with the tiling's `tokens`.
        x: float32, float16 or bfloat16 [activations, cols]; there are a multiple of as many slots.
        out: [slots, rows], or [slots, rows / 2] if `gated`; rows of slots of absent experts are not written.
        gated: whether to compute silu(gate) * up of the two halves of the rows.

    Raises:
        InputError: for an encoding that the kernels do not know.
        ValueError: for shapes or dtypes that do not fit.
    """
    check(matrix, len(geometry.order), handles, geometry, x, out, tiling, gated)
    for number in served:
        _launch(len(geometry.expert), forms[number], matrix, handles, geometry.blocks, x, out, tiling, number, gated)


def check(
    matrix: Matrix, slots: int, handles: Tensor, geometry: Geometry, x: Tensor, out: Tensor, tiling: Tiling, gated: bool
) -> None:
    """Raise ValueError for arguments of `product` whose shapes or dtypes do not fit, or not together."""
    made = matrix.rows >> gated
    if x.shape[-1] != matrix.cols or out.shape != (slots, made) or not slots or slots % len(x):
        raise ValueError(f"{matrix.name}: x {tuple(x.shape)}, out {tuple(out.shape)} and {slots} slots do not fit")
    if x.dtype not in TERMS or handles.dtype != torch.int64 or matrix.rows % (1 + gated):
        raise ValueError(f"{matrix.name}: x {x.dtype}, handles {handles.dtype}, {matrix.rows} rows")
    if geometry.tokens != tiling.tokens or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"{matrix.name}: the geometry is of another tiling, or a tensor is not contiguous")


def dense(matrix: Matrix, form: Form, extent: Tensor, x: Tensor, out: Tensor) -> None:
    """Compute y = W x + b for every token by one matrix alone, on the current stream.

    Few tokens take one launch. For many in BF16 cuBLAS multiplies by weights rounded to BF16; others are not rounded.

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
    if x.shape != (tokens, matrix.cols) or out.shape != (tokens, matrix.rows) or not tokens or x.dtype not in TERMS:
        raise ValueError(f"{matrix.name}: x {tuple(x.shape)}, {x.dtype} and out {tuple(out.shape)} do not fit")
    if not (x.is_contiguous() and out.is_contiguous()) or extent.dtype != torch.uint8 or extent.data_ptr() % 16:
        raise ValueError(f"{matrix.name}: an extent of {extent.dtype} or its place, or a tensor that is not contiguous")
    tiling = tiling_for(tokens)
    if tiling is MANY and x.dtype == torch.bfloat16:
        _by_torch(matrix, form, extent, x, out)
    else:
        _launch(triton.cdiv(tokens, tiling.tokens), form, matrix, extent, None, x, out, tiling)


def _by_torch(matrix: Matrix, f: Form, extent: Tensor, x: Tensor, out: Tensor) -> None:
    """`dense` by cuBLAS, from BF16 weights of one slice of rows after another (forms.py), in the same memory."""
    kernel_of(f.name)
    rows = matrix.rows
    cols = matrix.cols
    step = slice_rows(rows, cols)
    plain = _plain(matrix, f, extent)
    bias = extent[f.bias :][: 2 * rows].view(torch.bfloat16) if f.bias >= 0 else None
    made = x.new_empty(0 if plain is not None else step, cols)
    part = x.new_empty(0 if step == rows else len(x) * step)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if plain is None:
            weights = made[:count]
            _unpack(f, extent, weights, first)
        else:
            weights = plain[first : first + count]
        to = out if step == rows else part[: len(x) * count].view(len(x), count)
        if bias is None:
            torch.mm(x, weights.t(), out=to)
        else:
            torch.addmm(bias[first : first + count], x, weights.t(), out=to)
        if to is not out:
            out[:, first : first + count] = to


def _plain(matrix: Matrix, f: Form, extent: Tensor) -> Tensor | None:
    """The weights of a matrix that is not quantised, where they are."""
    if f.bits != 16:
        return None
    return extent[f.low :][: 2 * matrix.weights].view(torch.bfloat16).view(matrix.rows, matrix.cols)


def unpacked(matrix: Matrix, form: Form, extent: Tensor) -> Tensor:
    """Return a matrix's weights in BF16, [rows, cols], by one launch; the extent's own if it is not quantised."""
    made = _plain(matrix, form, extent)
    if made is None:
        kernel_of(form.name)
        made = extent.new_empty(matrix.rows, matrix.cols, dtype=torch.bfloat16)
        _unpack(form, extent, made, 0)
    return made


def _unpack(f: Form, extent: Tensor, out: Tensor, first: int) -> None:
    """Write a matrix's rows from `first` on to `out`."""
    count, cols = out.shape
    unpack[triton.cdiv(count, BLOCK_ROWS.value), triton.cdiv(cols, BLOCK_COLUMNS.value)](
        extent,
        out,
        cols,
        first,
        count,
        f.low,
        f.high,
        f.scale,
        f.zero,
        max(f.outer, 0),
        **{k: v for k, v in _read(f).items() if k != "COLUMNS"},
        OUTER=f.outer >= 0,
    )


@lru_cache(8)
def capability(device: torch.device) -> int:
    """The major number of a GPU's compute capability; 0 for a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _arranged(x: Tensor, read: Constants) -> tuple[Tensor, Tensor, int]:
    """Return `arrange`'s results: BF16 [terms, rows, width], float32 sums [groups, rows], and the width."""
    bits = read["BITS"]
    group = read["GROUP"]
    terms = TERMS[x.dtype]
    sums = bits < 16 and not read["MANTISSA"]
    groups = triton.cdiv(x.shape[1], group)
    at_once = max(1, BLOCK // group)
    width = triton.cdiv(x.shape[1], max(group, STEP.value)) * max(group, STEP.value)
    if bits == 16 and terms == 1 and width == x.shape[1]:
        return x[None], x.new_empty(0), width
    made = x.new_empty(terms, len(x), width, dtype=torch.bfloat16)
    of_groups = x.new_empty(groups if sums else 0, len(x), dtype=torch.float32)
    arrange[len(x), triton.cdiv(width, at_once * group)](
        x,
        made,
        of_groups,
        x.shape[1],
        width,
        made[0].numel(),
        BITS=bits,
        COLUMNS=read["COLUMNS"],
        GROUP=group,
        GROUPS=at_once,
        SUMS=sums,
        TERMS=terms,
        PAIRS=capability(x.device) in PAIRS,
    )
    return made, of_groups, width


def _launch(
    count: int,
    f: Form,
    matrix: Matrix,
    of: Tensor,
    blocks: Sequence[Tensor] | None,
    x: Tensor,
    out: Tensor,
    tiling: Tiling,
    version: int = 0,
    gated: bool = False,
) -> None:
    """Launch a kernel for one version of experts, whose handles are `of`; or for one extent, without `blocks`."""
    kernel_of(f.name)
    made = matrix.rows >> gated
    terms = TERMS[x.dtype]
    at = version, f.low, f.high, f.scale, f.zero, max(f.bias, 0), max(f.outer, 0)
    named = {
        "BIAS": f.bias >= 0,
        "OUTER": f.outer >= 0,
        "GATED": gated,
        "DENSE": blocks is None,
        "TERMS": terms,
        "WIDE": not x.is_cuda,  # Triton's interpreter multiplies the bits of BF16 numbers, so it gets float32
    }
    from_blocks = blocks or (None, None, None, None)
    slots = len(out)
    share = len(out) // len(x)
    if tiling is DECODE:
        cases = few_cases(f, made, matrix.cols, terms, gated, blocks is None)
        few[count, triton.cdiv(made, DECODE.rows)](
            of,
            *from_blocks,
            x,
            out,
            matrix.rows,
            matrix.cols,
            slots,
            share,
            *at,
            ONES[cases["BITS"] == 8],
            **named,
            **cases,
        )
        return
    cases = many_cases(f, made, matrix.cols, gated)
    arranged, sums, width = _arranged(x, cases)
    many[count, triton.cdiv(made, MANY.rows >> gated)](
        of,
        *from_blocks,
        arranged,
        sums,
        out,
        matrix.rows,
        matrix.cols,
        width,
        slots,
        share,
        arranged[0].numel(),
        *at,
        ONES[cases["BITS"] == 8],
        **named,
        **cases,
        PAIRS=capability(x.device) in PAIRS,
    )
