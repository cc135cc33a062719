"""The function behind transformers' experts interface, for every family: from routing to the weighted sum.

Kernels read extents as they are (cpu.py, gpu.py); without those, weights are dequantised for the tokens at hand and
dropped. Which version of an expert is active its handle says (handles.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moepack.pack.errors import InputError
from moepack.runtime.policies.placements import PAGED, Where

from . import op  # noqa: F401  # the operator exists from then on
from .handles import LayerExperts, Pages, Snapshot

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
        raise InputError("a model made from a bundle's config alone has no experts: load the bundle")
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise InputError("a compiled pass has no gradients: use torch.no_grad(), or train without compiling")
        out: Tensor = torch.ops.moepack.experts(hidden_states, top_k_index, top_k_weights, experts.number)
        return out
    observer, reading = experts.observer, experts.reading  # closing forgets them
    if hidden_states.device != experts.of.device:
        where = f"hidden states are on {hidden_states.device}, the experts on {experts.of.device}"
        raise InputError(f"{where}: a loaded bundle does not move; pass device= to moepack.load")
    if observer is not None:
        observer(top_k_index, top_k_weights)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        if not experts.trainable and reading is None:
            raise InputError("gradients keep activations that a budget does not count: load without a budget to train")
        if reading is not None:
            raise InputError(
                "gradients need versions that stay: this policy changes them while serving; load the bundle with a "
                "static policy to train beside it, or run the pass under torch.no_grad()"
            )
        index = experts.current.only(top_k_index, _ALL)
        return reference_forward(self, experts.current, hidden_states, index, top_k_weights)
    if reading is None:
        return _run(self, experts.current, hidden_states, top_k_index, top_k_weights)
    with reading() as snapshot:
        return _run(self, snapshot, hidden_states, top_k_index, top_k_weights)


def _run(
    module: Any,
    experts: Snapshot,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    pages: Pages | None = None,
) -> Tensor:
    """The experts that the device runs, and those that the host does; what is absent adds nothing."""
    if pages is None and experts.places() & PAGED:
        assert experts.of.paging is not None
        with experts.of.paging(experts, top_k_index) as pages:
            return _run(module, experts, hidden, top_k_index, top_k_weights, pages)
    here = _ALL if experts.of.device.type == "cpu" else _DEVICE
    out = _on_device(module, experts, hidden, experts.only(top_k_index, here), top_k_weights, pages)
    if Where.HOST in experts.places() - here:
        out = out + on_host(module, experts, hidden, top_k_index, top_k_weights)
    return out


def on_host(module: Any, experts: Snapshot, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts on the host add, for a layer on another device: activations go there and back, and wait."""
    index = experts.only(top_k_index, _HOST).cpu()
    there = Snapshot(experts.of.on_host(), experts.table, experts.handles)
    return _on_device(module, there, hidden.cpu(), index, top_k_weights.cpu()).to(hidden.device)


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
    if pages is not None:
        for matrix in range(len(experts.of.layer.matrices)):
            pages.ready(matrix)
    if experts.of.backend == "triton":
        from . import gpu

        return gpu.forward(module, experts, hidden, top_k_index, top_k_weights)
    return reference_forward(module, experts, hidden, top_k_index, top_k_weights)


def reference_forward(
    module: Any, experts: Snapshot, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` in plain torch on any device: each expert's weights dequantised for its tokens.

    Differentiable by hidden states and gates; a backward pass dequantises again instead of keeping the weights.
    """
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
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _one(module: Any, experts: Snapshot, expert: int, x: Tensor) -> Tensor:
    """One expert on its tokens [n, hidden]."""
    linear, dtype = torch.nn.functional.linear, x.dtype
    x = linear(x, experts.weight(expert, 0, dtype), experts.bias(expert, 0, dtype))
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = linear(x, experts.weight(expert, 1, dtype), experts.bias(expert, 1, dtype))
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    return x
