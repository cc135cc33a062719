"""The experts of a layer as the forward pass finds them: handles, which say which version of each is active.

Publishing changes one handle; the forward pass (forward.py) reads them and nothing else. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moepack.pack.spec import ExpertLayer, Section, Version, affine_sections
from moepack.runtime.kernels.forms import Form, handle, make_forms
from moepack.runtime.kernels.reference import dequantise

from . import backends


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

    def __init__(self, layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> None:
        """Without experts yet: `publish` gives each its first version.

        Args:
            layer: the layer.
            versions: those that handles may name, by their numbers.
            device: where extents are.
        """
        self.layer, self.device, self.versions = layer, device, tuple(versions)
        self._forms: dict[str, tuple[Form, ...]] = {v.name: make_forms(layer.matrices, v) for v in self.versions}
        self._number = {v.name: i for i, v in enumerate(self.versions)}
        self._sections = {v.name: _sections(layer, v) for v in self.versions if not v.is_lossless}
        self.table = np.zeros(layer.experts, np.uint64)
        self._on_device: Tensor | None = None
        self.handles: list[Handle] = []
        self.native = backends.native_layer(layer, self.versions, device)
        self.backend = backends.backend(device)

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
        """Make a version of an expert the active one: one pointer changes, and nothing else.

        First versions come in the experts' order. The caller keeps the handle before alive until no forward pass can
        still be reading it.
        """
        word = handle(made.extent.data_ptr(), self._number[made.version.name])
        self.table[expert] = word
        if self._on_device is not None:
            self._on_device[expert] = word
        if expert == len(self.handles):
            self.handles.append(made)
        else:
            self.handles[expert] = made

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
