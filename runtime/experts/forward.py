"""The function behind transformers' experts interface, for every family: from routing to the weighted sum.

Kernels read extents as they are (cpu.py, gpu.py); without those, weights are dequantised for the tokens at hand and
dropped. Which version of an expert is active its handle says (handles.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moepack.pack.errors import InputError
from moepack.runtime.policies.placements import PAGED, Where
from moepack.runtime.step import step_of

from . import op  # noqa: F401  # the operator exists from then on
from .handles import LayerExperts, Pages, Snapshot
from .host_tier import HostTier

_DEVICE, _HOST = frozenset({Where.DEVICE}) | PAGED, frozenset({Where.HOST})
_ALL = _DEVICE | _HOST
IMPLEMENTATION = "moepack"  # the name under which transformers knows `experts_forward`


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of one layer from their active versions; transformers calls it for every family.

    Args:
        self: the experts module; its `_moepack` holds the layer's handles.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, top_k]; an index past the last expert (expert parallelism's sentinel) adds nothing.
        top_k_weights: [tokens, top_k].

    Returns:
        [tokens, hidden], summed over a token's experts in the order of its top_k: the same bits every time.
    """
    experts: LayerExperts | None = getattr(self, "_moepack", None)
    if experts is None:
        if _inside_mtp():
            from transformers.integrations.moe import grouped_mm_experts_forward

            plain: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
            return plain
        raise InputError("a model made from a bundle's config alone has no experts: load the bundle")
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise InputError("a compiled pass has no gradients: use torch.no_grad(), or train without compiling")
        out: Tensor = torch.ops.moepack.experts(hidden_states, top_k_index, top_k_weights, experts.number)
        return out
    if hidden_states.device != experts.of.device:
        where = f"hidden states are on {hidden_states.device}, the experts on {experts.of.device}"
        raise InputError(f"{where}: a loaded bundle does not move; pass device= to moepack.load")
    step, position = step_of(experts.model), experts.position  # opened by ForwardWrapper.step
    if step is None and experts.steps is not None:  # this module was called by itself
        with experts.steps.alone():
            return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if step is not None:
        if step.counters is not None:  # by RoutingStatistics.counters, or ForwardWrapper.step for a trace
            step.counters.add(position, top_k_index, top_k_weights)
        for watcher in step.watchers:  # by Serving.count_routing
            watcher.add(position, top_k_index, top_k_weights)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        if experts.no_gradients:
            raise InputError(experts.no_gradients)
        index = experts.current.only(top_k_index, _ALL)
        return reference_forward(self, experts.current, hidden_states, index, top_k_weights)
    snapshot = experts.current
    if step is not None and step.loader is not None:  # the residency manager, under a policy that blocks
        step.loader.load(step, position, hidden_states, top_k_index)
        snapshot = experts.current
    elif step is not None:
        snapshot = step.snapshots[position]
    if (step is not None and step.paging is None) or not snapshot.places() & PAGED:
        return _run(self, snapshot, hidden_states, top_k_index, top_k_weights)
    if step is None or step.paging is None:
        raise InputError("this model was closed: load the bundle again")
    with step.paging.run(position, snapshot, top_k_index, step) as pages:
        return _run(self, snapshot, hidden_states, top_k_index, top_k_weights, pages)


def _inside_mtp() -> bool:
    """Whether transformers is running layers for multi-token prediction, whose experts are weights of their own.

    Asked only of modules without experts of a bundle. Nothing in such a module tells it from one with random weights,
    made from a bundle's config alone; who called it does.
    """
    from transformers import modeling_layers

    mtp, frame = getattr(modeling_layers, "MtpModel", None), sys._getframe(1)
    while mtp is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), mtp):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _run(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    pages: Pages | None = None,
) -> Tensor:
    """The experts that the device runs, and those that the host tier does; what is absent adds nothing."""
    if experts.of.makes_up_for_absent:
        top_k_weights = made_up(experts, top_k_index, top_k_weights)
    tier, here = experts.of.tier, experts.of.device.type == "cpu"
    if tier is None or Where.HOST not in experts.places():
        index = experts.only(top_k_index, _ALL if here else _DEVICE)
        return _on_device(module, experts, hidden, index, top_k_weights, pages)
    return (beside if here else across)(module, experts, hidden, top_k_index, top_k_weights, tier, pages)


def made_up(experts: Snapshot, index: Tensor, weights: Tensor) -> Tensor:
    """Gate weights [tokens, top_k] scaled so that those of a token's experts that are not absent sum up to what all of
    them did; as they are where all of a token's are absent."""
    if experts.places() <= _ALL:
        return weights
    there = experts.only(index, _ALL) < len(experts.handles)
    kept = (weights * there).sum(-1, keepdim=True, dtype=torch.float32)
    all_of_them = (weights * (index < len(experts.handles))).sum(-1, keepdim=True, dtype=torch.float32)
    scale = torch.where(kept > 0, all_of_them / kept, 1.0)
    return (weights * scale).to(weights.dtype)


def beside(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    tier: HostTier,
    pages: Pages | None = None,
) -> Tensor:
    """A layer on a CPU: either side makes the rows of its own slots, and one sum over both follows in the slots' order.

    So the bits are those of one call, whichever experts are where.
    """
    served = experts.only(top_k_index, _ALL)
    flat, top_k = experts.only(top_k_index, _HOST).reshape(-1), top_k_index.shape[-1]
    slots = (flat < experts.of.layer.experts).nonzero().squeeze(1)
    if not len(slots):
        return _on_device(module, experts, hidden, served, top_k_weights, pages)

    def work() -> tuple[Tensor, int]:
        chosen = flat[slots]
        y = _rows(module, experts, hidden[slots // top_k], chosen.unsqueeze(1), tier.threads)
        return y, _read(experts, chosen)

    y: Tensor | None = None
    with tier.beside(work) as job:
        if len(slots) < len(flat):
            y = _rows(module, experts, hidden, experts.only(top_k_index, _DEVICE), None, pages)
    assert job.out is not None
    y = job.out if y is None else y.index_copy_(0, slots, job.out)
    if experts.of.backend == "native":
        from .cpu import summed

        return summed(experts, y, hidden, served, top_k_weights)
    return _summed(y, hidden, top_k_weights)


def across(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    tier: HostTier,
    pages: Pages | None = None,
) -> Tensor:
    """A layer on another device: activations go to the host before the device's kernels are launched, and what the host
    makes of them meanwhile is added to what the device does. The calling thread waits for the host, never for the
    device."""
    assert tier.link is not None
    arrive = tier.link.fetch(hidden, experts.only(top_k_index, _HOST), top_k_weights)
    there = Snapshot(experts.of.on_host(), experts.table, experts.handles)

    def work(x: Tensor, index: Tensor, gates: Tensor) -> tuple[Tensor, int]:
        y = _rows(tier.module(module), there, x, index, tier.threads)
        if there.of.backend == "native":
            from .cpu import summed

            return summed(there, y, x, index, gates), _read(there, index)
        return _summed(y, x, gates), _read(there, index)

    with tier.beside(work, arrive) as job:
        out = _on_device(module, experts, hidden, experts.only(top_k_index, _DEVICE), top_k_weights, pages)
    assert job.out is not None
    return out + tier.link.send(job.out, out.device)


def _read(experts: Snapshot, index: Tensor) -> int:
    """Bytes of the experts that are chosen: each is read once a call."""
    chosen = torch.bincount(index.reshape(-1), minlength=experts.of.layer.experts)[: experts.of.layer.experts]
    return sum(experts.handles[e].extent.numel() for e in chosen.nonzero().squeeze(1).tolist())


def _rows(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    index: Tensor,
    threads: int | None = None,
    pages: Pages | None = None,
) -> Tensor:
    """What every slot's expert makes of its token on a CPU, [slots, hidden]."""
    if experts.of.backend == "native":
        from .cpu import rows

        return rows(module, experts, hidden, index, threads, pages)
    _filled(experts, pages)
    return reference_rows(module, experts, hidden, index)


def _on_device(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    pages: Pages | None = None,
) -> Tensor:
    if experts.of.backend == "native":
        from .cpu import forward

        return forward(module, experts, hidden, top_k_index, top_k_weights, pages)
    if experts.of.backend == "triton":
        from . import gpu

        return gpu.forward(module, experts, hidden, top_k_index, top_k_weights, pages)
    _filled(experts, pages)
    return reference_forward(module, experts, hidden, top_k_index, top_k_weights)


def _filled(experts: Snapshot, pages: Pages | None) -> None:
    """Wait for all pages, before kernels that know nothing of them."""
    for matrix in range(len(experts.of.layer.matrices) if pages is not None else 0):
        assert pages is not None
        pages.ready(matrix)


def reference_forward(
    module: Any, experts: Snapshot, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` in plain torch on any device: each expert's weights dequantised for its tokens.

    Differentiable by hidden states and gates; a backward pass dequantises again instead of keeping the weights.
    """
    return _summed(reference_rows(module, experts, hidden_states, top_k_index), hidden_states, top_k_weights)


def reference_rows(module: Any, experts: Snapshot, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
    """What every slot's expert makes of its token, [slots, hidden]; zeros for a slot without one."""
    tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts.of.layer.experts).tolist()
    out = hidden_states.new_zeros(tokens * top_k, hidden_states.shape[-1])
    start = 0
    for expert, count in enumerate(counts[: experts.of.layer.experts]):
        if count:
            slots = order[start : start + count]
            x = hidden_states[slots // top_k]
            out[slots] = (
                checkpoint(_one, module, experts, expert, x, use_reentrant=False)
                if x.requires_grad
                else (_one(module, experts, expert, x))
            )
            start += count
    return out


def _summed(y: Tensor, hidden: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows weighted and added over a token's slots: [tokens, hidden] in hidden's dtype."""
    weighted = y * top_k_weights.reshape(-1, 1)
    return weighted.view(*top_k_weights.shape, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)


def _one(module: Any, experts: Snapshot, expert: int, x: Tensor) -> Tensor:
    """One expert on its tokens [n, hidden]."""
    linear, dtype = torch.nn.functional.linear, x.dtype
    x = linear(x, experts.weight(expert, 0, dtype), experts.bias(expert, 0, dtype))
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = linear(x, experts.weight(expert, 1, dtype), experts.bias(expert, 1, dtype))
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    return x
