"""Experts' products on a GPU in one launch for all versions: a program switches on the version in its expert's handle.

The product of one version is gemv_triton.py's, inlined here once for each. A launch is the same whatever versions the
handles name among those that it was made for, so the replay of a CUDA graph follows promotions. Versions that take
another number of warps, because their groups are of another size, have a launch of their own.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from moepack.pack.spec import Matrix

from .affine_triton import DECODE, ONES, TERMS, Geometry, check, few_cases
from .forms import Form, kernel_of
from .gemv_triton import few
from .routing_triton import power

# By number: Triton before 3.9 takes no string in a tuple.
SCALES = ("bf16", "fp16", "e8m0", "e4m3", "block", "row", "e3m5")
_CASES = ("BITS", "MANTISSA", "SCALE", "GROUP", "COLUMNS", "ZEROS")


@triton.constexpr_function
def _scale_of(number: int) -> str:
    return SCALES[number]


@triton.jit(do_not_specialize=["slots", "share", "ones", "halves"])
def _switch(
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
    ones,
    halves,
    VERSIONS: tl.constexpr,
    GATED: tl.constexpr,
    TERMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    for i in tl.static_range(len(VERSIONS)):
        word = ones
        if VERSIONS[i][7] == 8:
            word = halves
        few(
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
            VERSIONS[i][0],
            VERSIONS[i][1],
            VERSIONS[i][2],
            VERSIONS[i][3],
            VERSIONS[i][4],
            VERSIONS[i][5],
            VERSIONS[i][6],
            word,
            VERSIONS[i][7],
            VERSIONS[i][8],
            _scale_of(VERSIONS[i][9]),
            VERSIONS[i][10],
            VERSIONS[i][11],
            VERSIONS[i][12],
            VERSIONS[i][13],
            VERSIONS[i][14],
            GATED,
            False,
            VERSIONS[i][15],
            VERSIONS[i][16],
            VERSIONS[i][17],
            TERMS,
            WIDE,
        )


@lru_cache(256)
def _versions(
    forms: tuple[Form, ...], served: tuple[int, ...], rows: int, cols: int, terms: int, gated: bool
) -> dict[int, tuple[tuple[object, ...], ...]]:
    """Return the kernel's compile-time constants by number of warps: each version's arguments of `few`."""
    out: dict[int, tuple[tuple[object, ...], ...]] = {}
    for number in served:
        f = forms[number]
        kernel_of(f.name)
        cases = few_cases(f, rows, cols, terms, gated, False)
        cases["SCALE"] = SCALES.index(cases["SCALE"])
        one = (
            number,
            f.low,
            f.high,
            f.scale,
            f.zero,
            max(f.bias, 0),
            max(f.outer, 0),
            *(cases[c] for c in _CASES),
            f.bias >= 0,
            f.outer >= 0,
            cases["U"],
            cases["S"],
            cases["EVEN"],
        )
        warps = cases["num_warps"]
        out[warps] = (*out.get(warps, ()), one)
    return out


def switched(
    matrix: Matrix,
    forms: Sequence[Form],
    served: Sequence[int],
    handles: Tensor,
    geometry: Geometry,
    x: Tensor,
    out: Tensor,
    gated: bool = False,
) -> None:
    """Compute what `affine_triton.product` does, to the same bits, in one launch for all versions of as many warps.

    Arguments and errors are those of `product`, but for `geometry`, which `routing_triton.route` makes: a block a slot.
    """
    slots = len(geometry.expert)
    check(matrix, slots, handles, geometry, x, out, DECODE, gated)
    terms = TERMS[x.dtype]
    parts = _versions(tuple(forms), tuple(served), matrix.rows >> gated, matrix.cols, terms, gated)
    for warps, versions in parts.items():
        _switch[slots, -(-(matrix.rows >> gated) // DECODE.rows)](
            handles,
            *geometry.blocks,
            x,
            out,
            matrix.rows,
            matrix.cols,
            slots,
            slots // len(x),
            *ONES,
            VERSIONS=versions,
            GATED=gated,
            TERMS=terms,
            WIDE=not x.is_cuda,
            num_warps=warps,
            num_stages=1,
        )


@triton.jit
def _rounded(value, y, gates):
    if y.dtype.element_ty == gates.dtype.element_ty:
        return value.to(y.dtype.element_ty).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["rows"])
def _sum(y, gates, live, out, rows, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        row = tl.load(y + slot.to(tl.int64) * rows + column, mask=column < rows, other=0.0)
        row = tl.where(tl.load(live + slot) != 0, row, 0.0)  # else nothing was written there
        # rounded as torch's product in y's or the gates' dtype is, whichever is wider; added in float32, as torch does
        total += _rounded(row.to(tl.float32) * tl.load(gates + slot).to(tl.float32), y, gates)
    tl.store(out + token.to(tl.int64) * rows + column, total.to(out.dtype.element_ty), mask=column < rows)


def summed(y: Tensor, gates: Tensor, live: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each token's sum of expert outputs, weighted by the gates: [tokens, rows] in `dtype`, in one launch.

    Args:
        y: [tokens x top_k, rows], contiguous; rows that are not `live` are not read.
        gates: [tokens, top_k], contiguous.
        live: int32 [tokens x top_k].
    """
    tokens = len(gates)
    rows = y.shape[1]
    out = torch.empty(tokens, rows, dtype=dtype, device=y.device)
    columns = min(512, power(rows))
    _sum[tokens, -(-rows // columns)](y, gates, live, out, rows, TOP_K=gates.shape[1], COLUMNS=columns)
    return out
