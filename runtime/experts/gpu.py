"""The experts' forward on a GPU, without waiting.

The first product computes silu(gate) * up too; another gate activation of a family runs between the two products. Few
tokens take one launch for routing (two beyond eight slots), one for each matrix whatever its experts' versions, and one
for the sum: always the same ones, so that a CUDA graph may hold them. More tokens take a sort and two launches
for each matrix and version; experts in pinned host memory are first brought to the device (staged.py). Experts that are
paged in place are decoded by two launches before the first product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moepack.pack.spec import Matrix
from moepack.runtime.kernels.affine_triton import DECODE, TERMS, product, tiling_for
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.forms import Form, Routing
from moepack.runtime.kernels.routing_triton import Routed, Tally, fits, sort
from moepack.runtime.kernels.routing_triton import route as route_few
from moepack.runtime.kernels.switch_triton import summed, switched
from moepack.runtime.policies.placements import Where
from moepack.runtime.step.context import Step

from .handles import seen

if TYPE_CHECKING:
    from moepack.families.interface import ExpertsModule

    from .handles import LayerCall, LayerExperts, Snapshot


_STAY = frozenset({Where.DEVICE, Where.PINNED, Where.ABSENT})


def takes(experts: LayerExperts, step: Step | None, tokens: int, top_k: int) -> bool:
    """Whether `launch` routes so many tokens of a layer, and counts them."""
    counters = None if step is None else step.counters
    return (
        experts.of.backend == "triton"
        and (step is None or step.loader is None)  # a policy that blocks reads counts before the layer's snapshot
        and (counters is None or not counters.within)
        and fits(tokens, top_k, experts.of.layer.experts)
        and (_snapshot(experts, step).places <= _STAY or experts.of.in_place is not None)  # else words come later
    )


def _snapshot(experts: LayerExperts, step: Step | None) -> Snapshot:
    return experts.current if step is None else seen(step)[experts.position]


def launch(experts: LayerExperts, step: Step | None, form: Routing, count: bool = True, **given: Any) -> Routed:
    """Route a layer's few tokens, and count them; `given` are arguments of `routing_triton.route`."""
    counters = None if step is None else step.counters
    tally = None
    tokens = len(given["logits"] if "logits" in given else given["given"][0])
    if count and counters is not None:
        tally = Tally(*counters.fused(experts.position, tokens))
    table = _snapshot(experts, step).device_table()
    with current(table.device):
        return route_few(form, table, DECODE.tokens, tally=tally, **given)


def routed(experts: LayerExperts, step: Step | None, index: Tensor, weights: Tensor) -> Routed | None:
    """Return the routing of a call's few tokens, by its router's launch or one of its own; `None` for others."""
    if index.ndim != 2 or not takes(experts, step, *index.shape):
        return None
    by_router = None if step is None else step.routed
    count = True
    if by_router is not None and by_router[0] == experts.position:
        made: Routed = by_router[1]
        count = not by_router[2]
        experts.passes_on = index is made.index and weights is made.gates
        if experts.passes_on and not count:
            return made
    pair = (index.contiguous(), weights.detach().contiguous())
    return launch(experts, step, Routing(index.shape[1]), count, given=pair)


def forward(call: LayerCall) -> Tensor:
    """Run `experts_forward` on a GPU; return [tokens, hidden]."""
    with current(call.hidden.device):
        return _forward(call)


def _forward(call: LayerCall) -> Tensor:
    module = call.module
    experts = call.experts
    hidden = call.hidden
    tokens, top_k = call.index.shape
    x = (hidden if hidden.dtype in TERMS else hidden.float()).detach().contiguous()
    if not tokens:
        return torch.empty_like(hidden)
    count, (first, second) = experts.of.layer.experts, experts.of.layer.matrices
    few = call.routed
    slots = tokens * top_k
    fused = _fuses(module)
    tiling = DECODE if few is not None else tiling_for(slots / count)
    handles = experts.device_table()
    chosen: tuple[Tensor | None, Tensor]
    if few is None:
        geometry, live, counts = sort(call.index.long().contiguous(), handles, tiling.tokens)
        chosen = None, counts
    else:
        geometry = few.geometry
        live = few.live
        chosen = geometry.expert, geometry.count
    if experts.of.in_place is not None:  # wherever experts are now: a graph holds its launches, and they may move
        experts.of.in_place(experts, *chosen)
    served = experts.served if few is None else experts.of.launched or experts.served
    first_forms, second_forms = zip(*experts.of.forms.values(), strict=True)  # each by the version's number

    def run(
        matrix: Matrix, forms: Sequence[Form], handles: Tensor, x: Tensor, out: Tensor, gated: bool = False
    ) -> None:
        if few is None:
            product(matrix, forms, served, handles, geometry, x, out, tiling, gated)
        else:
            switched(matrix, forms, served, handles, geometry, x, out, gated)

    made = x.new_empty(slots, first.rows // 2 if fused else first.rows)
    normed = getattr(module, "has_post_expert_norm", False)
    y = (x.new_zeros if normed else x.new_empty)(slots, second.rows)
    with _tables(experts, handles, None if few is not None else chosen[1]) as tables:
        for table in tables:  # each has experts of its own; rows of others stay as they are
            run(first, first_forms, table, x, made, fused)
            h = made
            if not fused:
                h = (module._apply_gate(h) if module.has_gate else module.act_fn(h)).contiguous()
            run(second, second_forms, table, h, y)
    if normed:
        y = module.post_expert_norm(y)
    return summed(y, call.weights.detach().contiguous(), live, hidden.dtype)


def _tables(
    experts: Snapshot, handles: Tensor, counts: Tensor | None
) -> contextlib.AbstractContextManager[Iterable[Tensor]]:
    """Handle tables for a call's launches; of many tokens, given slots by expert, such as have no pinned experts."""
    staged = experts.of.staged
    if counts is None or staged is None or Where.PINNED not in experts.places:
        return contextlib.nullcontext((handles,))
    return staged.tables(handles, counts)


def _fuses(module: ExpertsModule) -> bool:
    """Whether the family's gate activation is silu(gate) * up on two halves."""
    # some have one of their own
    gate = getattr(module, "_apply_gate", None)
    act = getattr(module, "act_fn", None)
    name = str(getattr(act, "__name__", type(act).__name__)).lower().removesuffix("activation")
    silu = isinstance(act, torch.nn.SiLU) or name == "silu"
    return bool(module.has_gate and silu and getattr(gate, "__name__", "") == "_default_apply_gate")
