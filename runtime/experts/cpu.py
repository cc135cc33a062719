"""The experts' forward on a CPU with compiled kernels.

One call a matrix runs all experts. Those with few tokens run straight from packed bytes, those with many (backends.py
measures the limit) in tiles of weights, unpacked into a buffer that stays in cache. If the processor does not multiply
BF16, or activations are float32, torch multiplies by the tiles. A slot is one of a token's top_k choices.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.isa import emulated
from moepack.runtime.kernels.affine_native import DTYPES, combine, has_tiles, product, unpack
from moepack.runtime.kernels.by_torch import multiply, of_matrix, of_packed
from moepack.runtime.kernels.token_native import GatedExperts, PairGate, silu_gate

from . import backends

if TYPE_CHECKING:
    from moepack.families.interface import ExpertsModule

    from .handles import LayerCall, ServedLayer, Snapshot

Limits = npt.NDArray[np.int64]
FEW = 16  # tokens up to which one call runs a layer
PROBES = 64  # random rows on which a gate is tried
TINY = 1e-30  # of results that may differ: e^x below x = -87 is 0 in the kernel
Many = list[tuple[int, Tensor]]  # each expert with many slots, and these slots in order


def forward(call: LayerCall) -> Tensor:
    """Run `experts_forward` on a CPU; return [tokens, hidden]."""
    x = call.hidden
    found = in_one_call(call.experts.of, call.module, len(x)) if x.dtype == torch.bfloat16 else None
    if found is None:
        return summed(call, rows(call))
    kernel, limits = found
    index = call.index.long().contiguous()
    return kernel.run(call.experts.table, x.detach().contiguous(), index, call.weights.detach(), limits)


def in_one_call(of: ServedLayer, module: ExpertsModule, tokens: int) -> tuple[GatedExperts, Limits] | None:
    """Return what runs so many BF16 tokens of a layer in one call, and the limits it takes; None if nothing does."""
    own = module.__dict__
    gate = getattr(module, "act_fn", None), own.get("_apply_gate"), own.get("limit"), own.get("alpha")
    if of.gated is None or of.gated[0] != gate:  # not tried yet, or another gate since
        of.gated = gate, gated(of, module)
    kernel = of.gated[1]
    if kernel is None or not 0 < tokens <= FEW:
        return None
    limits = backends.direct_limits(torch.bfloat16, of.versions)
    return (kernel, limits) if has_tiles(torch.bfloat16) or tokens <= limits.min() else None


def gated(of: ServedLayer, module: ExpertsModule) -> GatedExperts | None:
    """Return the kernel for a layer whose gate gives the kernel's bits on random numbers; else `None`."""
    matrices = of.layer.matrices
    plain = module.has_gate and not getattr(module, "has_post_expert_norm", False)
    if of.native is None or not plain or len(matrices) != 2 or matrices[0].rows != 2 * matrices[1].cols:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBES, matrices[0].rows, generator=generator) * torch.logspace(-3, 3, PROBES)[:, None]
    with torch.no_grad():
        wanted = module._apply_gate(x.bfloat16())
    if wanted.shape != (PROBES, matrices[1].cols) or wanted.dtype != torch.bfloat16:
        return None
    limit = getattr(module, "limit", None)
    alpha = getattr(module, "alpha", None)
    gates: list[PairGate | None] = [None]
    if isinstance(limit, float | int) and isinstance(alpha, float | int):
        gates.append(PairGate(limit, alpha))
    for gate in gates:
        made = silu_gate(x.bfloat16()) if gate is None else gate.run(x.bfloat16())
        tiny = (wanted.abs() < TINY) & (made.abs() < TINY)
        if ((made == wanted) | tiny).all():
            return GatedExperts(of.native, gate)
    return None


def rows(call: LayerCall, threads: int | None = None) -> Tensor:
    """The output of every slot's expert, [slots, hidden], float32 or bfloat16, before gates are applied.

    An expert's rows have the same bits whichever other experts run, and on any number of kernel `threads` (default:
    torch's). Rows of slots without an expert are undefined.
    """
    module = call.module
    experts = call.experts
    x = (call.hidden if call.hidden.dtype in DTYPES else call.hidden.float()).detach().contiguous()
    if not len(x):
        return x.new_empty(0, call.hidden.shape[-1])
    index = call.index.long().contiguous()
    limits = backends.direct_limits(x.dtype, experts.of.versions)  # for torch's threads, so that a tier's bits agree
    many = [] if has_tiles(x.dtype) or len(x) <= limits.min() else _many(index, experts, limits)
    if not many and not has_tiles(x.dtype):  # an expert that a token chooses twice has more slots than tokens
        assert experts.of.native is not None
        limits = experts.of.native.unlimited
    h = _matrix(call, 0, x, index, many, limits, threads)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    h = h.contiguous()
    y = _matrix(call, 1, h, index, many, limits, threads)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y.to(x.dtype)).contiguous()
    return y


def summed(call: LayerCall, y: Tensor) -> Tensor:
    """Rows `y` weighted by gates and added over each token's slots, in order: [tokens, hidden] in hidden's dtype."""
    out = torch.empty(len(call.hidden), call.hidden.shape[-1], dtype=y.dtype)
    gates = call.weights.detach()
    gates = gates if gates.dtype in DTYPES else gates.float()
    if len(call.hidden):
        combine(y, call.index.long().contiguous(), gates.contiguous(), call.experts.of.layer.experts, out)
    return out.to(call.hidden.dtype)


def _many(index: Tensor, experts: Snapshot, limits: Limits) -> Many:
    """The experts that have more slots than the limit of their version."""
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts.of.layer.experts)[: experts.of.layer.experts].tolist()
    most = limits[(experts.table & np.uint64(63)).astype(np.int64)].tolist()
    out = []
    start = 0
    for expert, count in enumerate(counts):
        if count > most[expert]:
            out.append((expert, order[start : start + count]))
        start += count
    return out


def _matrix(
    call: LayerCall, matrix: int, x: Tensor, index: Tensor, many: Many, limits: Limits, threads: int | None
) -> Tensor:
    """Every slot's product by one matrix: [slots, rows] in x's dtype, rounded where the model's own forward rounds.

    Without this rounding, a token with nearly equal router scores could choose other experts than in the plain model.
    """
    experts = call.experts
    native = call.experts.of.native
    assert native is not None
    m = experts.of.layer.matrices[matrix]
    slots = index.numel()
    out = torch.empty(slots, m.rows, dtype=x.dtype)
    if sum(len(s) for _, s in many) < slots:
        product(native, matrix, experts.table, x, index, out, limits, threads)
    for expert, where in many:
        mine = x[where // (slots // len(x))]
        made = experts.handles[expert]
        bias = experts.bias(expert, matrix, x.dtype)
        if made.weights and made.weights[matrix].dtype == x.dtype and not emulated(x.device, x.dtype):
            out[where] = torch.nn.functional.linear(mine, made.weights[matrix], bias)
            continue
        if made.weights:
            of = of_matrix(made.weights[matrix])
        else:
            assert made.version is not None
            number = native.numbers[made.version.name]
            of = of_packed(m.cols, partial(unpack, native, matrix, number, made.extent, threads=threads))
        part = torch.empty(len(mine), m.rows, dtype=x.dtype)
        multiply(mine, of, part, bias)
        out[where] = part
    return out
