"""The experts' forward over versions: handles, and the function behind transformers' experts interface.

A layer's handles say which version of each expert is active; the forward pass reads them and nothing else. Kernels
read extents as they are (cpu.py, gpu.py); without those, weights are dequantised for the tokens at hand and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.pack.affine import Bf16Bits
from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Section, Version, affine_sections

from . import backends
from .kernels.forms import Form, handle, make_forms, resident_size
from .kernels.reference import dequantise
from .store import BackingStore

IMPLEMENTATION = "moepack"  # the name under which transformers knows `experts_forward`


@dataclass(frozen=True, slots=True)
class Handle:
    """One expert's active version, complete on its device.

    Attributes:
        version: its encoding.
        extent: uint8: an affine version's extent as it is stored, or the decoded matrices of the lossless one
            (kernels/forms.py), beginning on a multiple of 64.
        weights: BF16 views [rows, cols] of a lossless version's matrices; empty for an affine one.
        biases: one BF16 view [rows] or None a matrix.
    """

    version: Version
    extent: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @property
    def resident_bytes(self) -> int:
        """Bytes it takes on its device."""
        return self.extent.numel()


class LayerExperts:
    """The handles of one layer.

    Attributes:
        handles: what is active, by expert: it keeps the extents alive.
        table: what kernels index, uint64 [experts]: an extent's address and its version's number.
        observer: is shown the router's choice, [tokens, top_k], before the experts run; None where nobody asks.
    """

    observer: Callable[[Tensor], None] | None = None

    def __init__(self, store: BackingStore, position: int, versions: Sequence[str], device: torch.device) -> None:
        manifest = store.bundle.manifest
        self.layer: ExpertLayer = store.bundle.layers[position]
        self.device = device
        self.versions = tuple(manifest.versions)
        self._forms: dict[str, tuple[Form, ...]] = {v.name: make_forms(self.layer.matrices, v) for v in self.versions}
        self._number = {v.name: i for i, v in enumerate(self.versions)}
        self._sections = {v.name: _sections(self.layer, v) for v in self.versions if not v.is_lossless}
        self.table = np.zeros(self.layer.experts, np.uint64)
        self._on_device: Tensor | None = None
        self.handles: list[Handle] = []
        for e, name in enumerate(versions):
            made = self._make(store, position, e, name)
            self.handles.append(made)
            self._publish(e, made)
        self.native = backends.native_layer(self.layer, self.versions, device)
        self.backend = backends.backend(device)

    def _make(self, store: BackingStore, position: int, expert: int, name: str) -> Handle:
        version = store.bundle.manifest.version(name)
        if not version.is_lossless:
            return self.over(version, store.extent(name, position, expert, self.device))
        matrices = self.layer.matrices
        extent = torch.zeros(resident_size(matrices, version), dtype=torch.uint8, device=self.device)
        for m, f, decoded in zip(matrices, self._forms[name], store.lossless(position, expert), strict=True):
            _view(extent, f.low, m.weights).view(m.rows, m.cols).copy_(_bf16(decoded.weight))
            if decoded.bias is not None:
                _view(extent, f.bias, m.rows).copy_(_bf16(decoded.bias))
        return self.over(version, extent)

    def over(self, version: Version, extent: Tensor) -> Handle:
        """The handle of a version whose bytes are complete in `extent`, uint8, beginning on a multiple of 64."""
        parts = list(zip(self.layer.matrices, self._forms[version.name], strict=True))
        weights: tuple[Tensor, ...] = ()
        if version.is_lossless:
            weights = tuple(_view(extent, f.low, m.weights).view(m.rows, m.cols) for m, f in parts)
        biases = tuple(None if f.bias < 0 else _view(extent, f.bias, m.rows) for m, f in parts)
        return Handle(version, extent, weights, biases)

    def number(self, version: Version) -> int:
        """A version's number in a handle: its place in the manifest."""
        return self._number[version.name]

    def publish(self, expert: int, made: Handle) -> None:
        """Make another version of an expert the active one: one pointer changes, and nothing else.

        The caller keeps the handle before it alive until no forward pass can still be reading it.
        """
        self._publish(expert, made)
        self.handles[expert] = made

    def _publish(self, expert: int, made: Handle) -> None:
        word = handle(made.extent.data_ptr(), self._number[made.version.name])
        self.table[expert] = word
        if self._on_device is not None:
            self._on_device[expert] = word

    def forms(self, matrix: int) -> list[Form]:
        """One matrix's form in every version, by the version's number."""
        return [self._forms[v.name][matrix] for v in self.versions]

    def device_table(self) -> Tensor:
        """The handle table on the device, int64 [experts]; publishing writes to it in place."""
        if self._on_device is None:
            self._on_device = torch.from_numpy(self.table.view(np.int64).copy()).to(self.device)
        return self._on_device

    def weight(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor:
        """One matrix of an expert's active version, [rows, cols] in `dtype`."""
        made = self.handles[expert]
        if made.weights:
            return made.weights[matrix].to(dtype)
        sections = self._sections[made.version.name][matrix]
        return dequantise(made.extent, sections, self.layer.matrices[matrix], made.version, dtype)

    def bias(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor | None:
        """One bias of an expert's active version, [rows] in `dtype`."""
        bias = self.handles[expert].biases[matrix]
        return None if bias is None else bias.to(dtype)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all active versions."""
        return sum(h.resident_bytes for h in self.handles)


def _sections(layer: ExpertLayer, version: Version) -> list[dict[str, Section]]:
    by_matrix: list[dict[str, Section]] = [{} for _ in layer.matrices]
    for s in affine_sections(layer.matrices, version):
        by_matrix[s.matrix][s.kind] = s
    return by_matrix


def _view(extent: Tensor, at: int, count: int) -> Tensor:
    return extent[at : at + 2 * count].view(torch.bfloat16)


def _bf16(bits: Bf16Bits) -> Tensor:
    return torch.from_numpy(bits.copy() if not bits.flags.writeable else bits).view(torch.bfloat16)


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
    if experts.observer is not None:
        experts.observer(top_k_index)
    if experts.backend == "native":
        from .cpu import forward

        return forward(self, experts, hidden_states, top_k_index, top_k_weights)
    if experts.backend == "triton":
        from . import gpu

        return gpu.forward(self, experts, hidden_states, top_k_index, top_k_weights)
    return reference_forward(self, experts, hidden_states, top_k_index, top_k_weights)


def reference_forward(
    module: Any, experts: LayerExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` in plain torch on any device: each expert's weights dequantised for its tokens."""
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
            out[slots] = _one(module, experts, expert, x)
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
