"""The experts' forward over versions: handles, and the function behind transformers' experts interface.

A layer's handles say which version of each expert is active; the forward pass reads them and nothing else. Weights of
an affine version are dequantised for the tokens at hand and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.pack.affine import Bf16Bits
from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Section, Version, affine_sections

from .kernels.reference import dequantise, section
from .store import BackingStore

IMPLEMENTATION = "moepack"  # the name under which transformers knows `experts_forward`


@dataclass(frozen=True, slots=True)
class Handle:
    """One expert's active version, complete on its device.

    Attributes:
        version: its encoding.
        extent: uint8 extent of an affine version; None for the lossless one.
        weights: BF16 matrices [rows, cols] of the lossless version; empty for an affine one.
        biases: one BF16 vector [rows] or None a matrix.
    """

    version: Version
    extent: Tensor | None
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @property
    def resident_bytes(self) -> int:
        """Bytes it takes on its device."""
        tensors = [self.extent] if self.extent is not None else [*self.weights, *self.biases]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class LayerExperts:
    """The handles of one layer."""

    def __init__(self, store: BackingStore, position: int, versions: Sequence[str], device: torch.device) -> None:
        self.layer: ExpertLayer = store.bundle.layers[position]
        self.device = device
        self._sections: dict[str, list[dict[str, Section]]] = {}
        for name in dict.fromkeys(versions):
            version = store.bundle.manifest.version(name)
            if not version.is_lossless:
                by_matrix: list[dict[str, Section]] = [{} for _ in self.layer.matrices]
                for s in affine_sections(self.layer.matrices, version):
                    by_matrix[s.matrix][s.kind] = s
                self._sections[name] = by_matrix
        self.handles = [self._make(store, position, e, name) for e, name in enumerate(versions)]

    def _make(self, store: BackingStore, position: int, expert: int, name: str) -> Handle:
        version = store.bundle.manifest.version(name)
        if version.is_lossless:
            decoded = store.lossless(position, expert)
            weights = tuple(_bf16(m.weight, self.device) for m in decoded)
            biases = tuple(None if m.bias is None else _bf16(m.bias, self.device) for m in decoded)
            return Handle(version, None, weights, biases)
        extent = store.extent(name, position, expert, self.device)
        parts = [by_kind.get("bias") for by_kind in self._sections[name]]
        return Handle(version, extent, (), tuple(None if p is None else section(extent, p) for p in parts))

    def weight(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor:
        """One matrix of an expert's active version, [rows, cols] in `dtype`."""
        handle = self.handles[expert]
        if handle.extent is None:
            return handle.weights[matrix].to(dtype)
        sections = self._sections[handle.version.name][matrix]
        return dequantise(handle.extent, sections, self.layer.matrices[matrix], handle.version, dtype)

    def bias(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor | None:
        """One bias of an expert's active version, [rows] in `dtype`."""
        bias = self.handles[expert].biases[matrix]
        return None if bias is None else bias.to(dtype)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all active versions."""
        return sum(h.resident_bytes for h in self.handles)


def _bf16(bits: Bf16Bits, device: torch.device) -> Tensor:
    return torch.from_numpy(bits.copy() if not bits.flags.writeable else bits).view(torch.bfloat16).to(device)


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
    experts: LayerExperts = self._moepack
    if hidden_states.device != experts.device:
        where = f"hidden states are on {hidden_states.device}, the experts on {experts.device}"
        raise InputError(f"{where}: a loaded bundle does not move; pass device= to moepack.load")
    tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts.layer.experts).tolist()
    out = hidden_states.new_zeros(tokens * top_k, hidden_states.shape[-1])
    start = 0
    for expert, count in enumerate(counts[: experts.layer.experts]):
        if count:
            slots = order[start : start + count]
            x = hidden_states[slots // top_k]
            out[slots] = _one(self, experts, expert, x)
            start += count
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _one(module: Any, experts: LayerExperts, expert: int, x: Tensor) -> Tensor:
    """One expert on its tokens [n, hidden]."""
    linear, dtype = torch.nn.functional.linear, x.dtype
    x = linear(x, experts.weight(expert, 0, dtype), experts.bias(expert, 0, dtype))
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = linear(x, experts.weight(expert, 1, dtype), experts.bias(expert, 1, dtype))
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    return x
