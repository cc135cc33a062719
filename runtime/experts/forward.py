"""The function behind transformers' experts interface, for every family: from routing to the weighted sum.

Kernels read extents as they are (cpu.py, gpu.py). Without kernels, weights are dequantised anew for each call. An
expert's handle says which version is active (handles.py). A slot is one of a token's top_k choices.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moepack.pack.errors import InputError
from moepack.runtime.policies.placements import Where
from moepack.runtime.policies.reducers import RouterOutput
from moepack.runtime.step.context import Step, step_of

from . import op  # noqa: F401  # registers the operator
from .handles import EVERYWHERE, RUN_THERE, LayerCall, LayerExperts, seen
from .host_tier import HostTier

if TYPE_CHECKING:
    from moepack.families.interface import ExpertsModule
    from moepack.runtime.kernels.routing_triton import Routed

_HOST = frozenset({Where.HOST})
CLOSED = "this model was closed: load the bundle again"
IMPLEMENTATION = "moepack"  # the name under which transformers knows `experts_forward`


def experts_forward(self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of one layer from their active versions. Transformers calls it for every family.

    Args:
        self: the experts module; its `_moepack` holds the layer's handles.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, top_k]; an index past the last expert (the sentinel of expert parallelism) adds nothing.
        top_k_weights: [tokens, top_k].

    Returns:
        [tokens, hidden], summed over a token's experts in the order of its top_k, so with the same bits every time.
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
    # opened by ForwardWrapper.step
    step = step_of(experts.model)
    position = experts.position
    if step is None and experts.steps is not None:  # this module was called outside a forward pass of the model
        with experts.steps.alone():
            return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if step is None and experts.is_closed:
        raise InputError(CLOSED)
    few = _few(experts, step, top_k_index, top_k_weights)
    if step is not None:
        count(step, position, top_k_index, top_k_weights, few is not None)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        if experts.no_gradients:
            raise InputError(experts.no_gradients)
        index = experts.current.only(top_k_index, EVERYWHERE)
        return reference_forward(LayerCall(self, experts.current, hidden_states, index, top_k_weights))
    snapshot = experts.current
    if step is not None and step.loader is not None:  # the residency manager, under a policy that blocks
        step.loader.load(step, position, hidden_states, top_k_index)
        snapshot = experts.current
    elif step is not None:
        snapshot = seen(step)[position]
    return _run(LayerCall(self, snapshot, hidden_states, top_k_index, top_k_weights, routed=few))


def count(step: Step, position: int, index: Tensor, weights: Tensor, fused: bool = False) -> None:
    """Count what the router of a layer chose, [tokens, top_k], unless its own launch did (`fused`)."""
    counters = step.counters  # set by RoutingStatistics.counters, or by ForwardWrapper.step for a trace
    if counters is not None and fused and counters.only_fused:
        counters = None
    if counters is None and not step.watchers:
        return
    heavy = None if step.importance is None else step.importance.heavy(position, len(index))
    teller, logits = step.logits or (position, None)
    if teller != position or (logits is not None and len(logits) != len(index)):
        logits = None
    routing = RouterOutput(index, weights, logits, heavy)
    if counters is not None:
        counters.add(position, routing, fused)
    for watcher in step.watchers:  # set by Serving.count_routing
        watcher.add(position, routing)


def _few(experts: LayerExperts, step: Step | None, index: Tensor, weights: Tensor) -> Routed | None:
    if experts.of.backend != "triton":
        return None
    from . import gpu

    return gpu.routed(experts, step, index, weights)


def _inside_mtp() -> bool:
    """Whether transformers is running layers for multi-token prediction, which have experts of their own.

    Their experts module looks like a module made from a bundle's config alone. Only the caller tells them apart.
    """
    from transformers import modeling_layers

    mtp = getattr(modeling_layers, "MtpModel", None)
    frame = sys._getframe(1)
    while mtp is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), mtp):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _run(call: LayerCall) -> Tensor:
    """Run experts on the device and on the host tier; absent experts add nothing."""
    experts = call.experts
    tier = experts.of.tier
    here = experts.of.device.type == "cpu"
    if tier is None or Where.HOST not in experts.places:
        if call.routed is None:  # else kernels find 0 in the table for what is not there
            call.index = experts.only(call.index, EVERYWHERE if here else RUN_THERE)
        return _on_device(call)
    return (beside if here else across)(call, tier)


def beside(call: LayerCall, tier: HostTier) -> Tensor:
    """Run a layer on a CPU together with a host tier. Each computes the rows of its own experts, and one sum adds them.

    The sum follows the order of slots, so the result has the same bits however the experts are divided.
    """
    experts = call.experts
    served = replace(call, index=experts.only(call.index, EVERYWHERE))
    flat = experts.only(call.index, _HOST).reshape(-1)
    top_k = call.index.shape[-1]
    slots = (flat < experts.of.layer.experts).nonzero().squeeze(1)
    if not len(slots):
        return _on_device(served)

    def work() -> tuple[Tensor, int]:
        mine = LayerCall(call.module, experts, call.hidden[slots // top_k], flat[slots].unsqueeze(1), call.weights)
        return _rows(mine, tier.threads), _read(mine)

    y: Tensor | None = None
    with tier.beside(work) as job:
        if len(slots) < len(flat):
            y = _rows(replace(call, index=experts.only(call.index, RUN_THERE)))
    assert job.out is not None
    return _sum(served, job.out if y is None else y.index_copy_(0, slots, job.out))


def across(call: LayerCall, tier: HostTier) -> Tensor:
    """Run a layer on a device other than the host and on the host tier, and add both results.

    Activations go to the host before the device's kernels are launched. The calling thread waits for the host, never
    for the device.
    """
    assert tier.link is not None
    experts = call.experts
    arrive = tier.link.fetch(call.hidden, experts.only(call.index, _HOST), call.weights)

    def work(x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, int]:
        mine = LayerCall(tier.module(call.module), experts.on_host, x, index, weights)
        return _sum(mine, _rows(mine, tier.threads)), _read(mine)

    with tier.beside(work, arrive) as job:
        out = _on_device(replace(call, index=experts.only(call.index, RUN_THERE)))
    assert job.out is not None
    return out + tier.link.send(job.out, out.device)


def _read(call: LayerCall) -> int:
    experts = call.experts
    chosen = torch.bincount(call.index.reshape(-1), minlength=experts.of.layer.experts)[: experts.of.layer.experts]
    return sum(experts.handles[e].extent.numel() for e in chosen.nonzero().squeeze(1).tolist())


def _rows(call: LayerCall, threads: int | None = None) -> Tensor:
    """The output of every slot's expert, [slots, hidden]: on a CPU, or on any device without kernels."""
    if call.experts.of.backend == "native":
        from .cpu import rows

        return rows(call, threads)
    return reference_rows(call)


def _sum(call: LayerCall, y: Tensor) -> Tensor:
    """Weight the rows of `_rows` by gates and add them over a token's slots: [tokens, hidden] in hidden's dtype."""
    if call.experts.of.backend == "native":
        from .cpu import summed

        return summed(call, y)
    return _reference_sum(call, y)


def _on_device(call: LayerCall) -> Tensor:
    if call.experts.of.backend == "native":
        from . import cpu

        return cpu.forward(call)
    if call.experts.of.backend == "triton":
        from . import gpu

        return gpu.forward(call)
    return _sum(call, _rows(call))


def reference_forward(call: LayerCall) -> Tensor:
    """Run `experts_forward` in plain torch on any device; each expert's weights are dequantised for its tokens.

    Gradients flow to hidden states and gates. A backward pass dequantises again instead of keeping the weights.
    """
    return _reference_sum(call, reference_rows(call))


def reference_rows(call: LayerCall) -> Tensor:
    """The output of every slot's expert, [slots, hidden]; zeros for a slot without an expert."""
    tokens, top_k = call.index.shape
    experts = call.experts.of.layer.experts
    flat = call.index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts).tolist()
    out = call.hidden.new_zeros(tokens * top_k, call.hidden.shape[-1])
    start = 0
    for expert, count in enumerate(counts[:experts]):
        if count:
            slots = order[start : start + count]
            x = call.hidden[slots // top_k]
            again = x.requires_grad
            out[slots] = checkpoint(_one, call, expert, x, use_reentrant=False) if again else _one(call, expert, x)
            start += count
    return out


def _reference_sum(call: LayerCall, y: Tensor) -> Tensor:
    weighted = y * call.weights.reshape(-1, 1)
    return weighted.view(*call.weights.shape, call.hidden.shape[-1]).sum(dim=1).to(call.hidden.dtype)


def _one(call: LayerCall, expert: int, x: Tensor) -> Tensor:
    module = call.module
    experts = call.experts
    linear = torch.nn.functional.linear
    dtype = x.dtype
    x = linear(x, experts.weight(expert, 0, dtype), experts.bias(expert, 0, dtype))
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = linear(x, experts.weight(expert, 1, dtype), experts.bias(expert, 1, dtype))
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    return x
