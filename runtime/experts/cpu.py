"""The experts' forward on a CPU with compiled kernels: routing in, weighted sum out.

All experts run in one call a matrix: those with few tokens straight from their packed bytes, those with many in tiles
unpacked into a buffer that stays in cache. Where the processor does not multiply BF16, or activations are float32,
torch multiplies by those tiles instead. backends.py says what few means.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.isa import emulated
from moepack.runtime.kernels.affine_native import DTYPES, combine, has_tiles, product, unpack
from moepack.runtime.kernels.by_torch import Weights, multiply, of_matrix, of_packed

from . import backends

if TYPE_CHECKING:
    from .handles import Pages, Snapshot

Limits = npt.NDArray[np.int64]


def forward(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    pages: Pages | None = None,
) -> Tensor:
    """`experts_forward` on a CPU; arguments and result as there. `pages` of experts that are to be decoded first."""
    y = rows(module, experts, hidden, top_k_index, pages=pages)
    return summed(experts, y, hidden, top_k_index, top_k_weights)


def rows(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    top_k_index: Tensor,
    threads: int | None = None,
    pages: Pages | None = None,
) -> Tensor:
    """What every slot's expert makes of its token, [slots, hidden], float32 or bfloat16; its gate does not weigh yet.

    An expert's rows have the same bits whatever the others are, and on however many threads of the kernels' (torch's
    number without `threads`). Rows of slots without an expert hold anything.
    """
    x = (hidden if hidden.dtype in DTYPES else hidden.float()).detach().contiguous()
    tokens = len(x)
    if not tokens:
        return x.new_empty(0, hidden.shape[-1])
    index = top_k_index.long().contiguous()
    limits = backends.direct_limits(x.dtype, experts.of.versions)  # torch's threads: a tier's own make the same bits
    many = [] if has_tiles(x.dtype) or tokens <= limits.min() else _many(index, experts, limits)
    h = _matrix(experts, 0, x, index, many, limits, threads, pages)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = _matrix(experts, 1, h.contiguous(), index, many, limits, threads, pages)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y.to(x.dtype)).contiguous()
    return y


def summed(experts: Snapshot, y: Tensor, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows weighted and added over a token's slots, in their order: [tokens, hidden] in hidden's dtype."""
    out = torch.empty(len(hidden), hidden.shape[-1], dtype=y.dtype)
    gates = top_k_weights.detach()
    gates = gates if gates.dtype in DTYPES else gates.float()
    if len(hidden):
        combine(y, top_k_index.long().contiguous(), gates.contiguous(), experts.of.layer.experts, out)
    return out.to(hidden.dtype)


def _many(index: Tensor, experts: Snapshot, limits: Limits) -> list[tuple[int, Tensor]]:
    """The experts with more slots than their version's limit, and their slots in order."""
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts.of.layer.experts)[: experts.of.layer.experts].tolist()
    most = limits[(experts.table & np.uint64(63)).astype(np.int64)].tolist()
    out, start = [], 0
    for expert, count in enumerate(counts):
        if count > most[expert]:
            out.append((expert, order[start : start + count]))
        start += count
    return out


def _matrix(
    experts: Snapshot,
    matrix: int,
    x: Tensor,
    index: Tensor,
    many: list[tuple[int, Tensor]],
    limits: Limits,
    threads: int | None,
    pages: Pages | None,
) -> Tensor:
    """One matrix of every slot: [slots, rows] in x's dtype, rounded where the model's own forward rounds.

    Finer than that would serve no one: a token near two experts then goes to the other than in the plain model.
    """
    assert experts.of.native is not None
    m, slots = experts.of.layer.matrices[matrix], index.numel()
    out = torch.empty(slots, m.rows, dtype=x.dtype)
    if pages is not None and many:
        pages.ready(matrix)
    if sum(len(s) for _, s in many) < slots:
        with nullcontext() if pages is None else pages.decoding(matrix) as coded:
            product(experts.of.native, matrix, experts.table, x, index, out, limits, threads, coded)
    share = slots // len(x)
    for expert, where in many:
        mine = x[where // share]
        made, bias = experts.handles[expert], experts.bias(expert, matrix, x.dtype)
        if made.weights and made.weights[matrix].dtype == x.dtype and not emulated(x.device, x.dtype):
            out[where] = torch.nn.functional.linear(mine, made.weights[matrix], bias)
            continue
        of = of_matrix(made.weights[matrix]) if made.weights else _unpacked(experts, expert, matrix, threads)
        part = torch.empty(len(mine), m.rows, dtype=x.dtype)
        multiply(mine, of, part, bias)
        out[where] = part
    return out


def _unpacked(experts: Snapshot, expert: int, matrix: int, threads: int | None) -> Weights:
    """The rows of a packed matrix, for torch."""
    made, native = experts.handles[expert], experts.of.native
    assert made.version is not None and native is not None
    number, extent = native.numbers[made.version.name], made.extent
    return of_packed(
        native.matrices[matrix].cols,
        lambda tile, first: unpack(native, matrix, number, extent, tile, first, threads),
    )
