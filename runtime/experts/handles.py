"""The experts of a layer as the forward pass finds them: handles, which say which version of each is active.

Publishing makes a new snapshot of a layer; a forward pass (forward.py) reads the one it began with. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.kernels.forms import Form, compiled, handle, make_forms
from moepack.runtime.kernels.reference import dequantise, plain_weights, sections_of
from moepack.runtime.policies.placements import PAGED, Placement, Where
from moepack.runtime.step import StepOpener

from . import backends
from .host_tier import HostTier
from .packed import PackedExtent
from .packed_gpu import GpuPackedExtent

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import CodedExperts


@dataclass(frozen=True, slots=True)
class Handle:
    """One expert's active placement, complete.

    Attributes:
        version: its encoding; None where the expert is absent.
        extent: uint8, the expert as it is in memory (`Version.sections`), beginning on a multiple of 64.
        weights: BF16 views [rows, cols] of a plain version's matrices; empty for others.
        biases: one BF16 view [rows] or None a matrix.
        packed: of a version that is on the device as it is stored: its bytes. `extent` is then, as for one in the
            backing store, where it is while its layer runs; nobody else may read it.
    """

    version: Version | None
    extent: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    where: Where = Where.DEVICE
    packed: PackedExtent | GpuPackedExtent | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes it takes on its device; those of the window are not its own."""
        if self.packed is not None:
            return self.packed.extent.numel()
        return self.extent.numel() if self.where is Where.DEVICE else 0

    def __str__(self) -> str:
        return str(Placement(self.version, self.where))


class Pages(Protocol):
    """The pages of one pass's experts, while its layer runs."""

    def decoding(self, matrix: int) -> AbstractContextManager[CodedExperts | None]:
        """Around the product of one matrix, which is to decode those that are yielded first."""

    def ready(self, matrix: int) -> None:
        """Return once all that is needed of one matrix is in its place."""


RUN_THERE = PAGED | {Where.DEVICE}  # where those are that the device runs
NOTHING = Handle(None, torch.empty(0, dtype=torch.uint8), (), (), Where.ABSENT)


class ServedLayer:
    """What is the same for every snapshot of a layer: its shapes, versions, device and kernels.

    Attributes:
        layer, versions, device: the layer, those that handles may name by their numbers, where extents are.
        sections: by a version's name, the sections of each matrix by kind.
        native, backend: what kernels read of the layer, and which run it.
        tier: what runs its experts on the host, beside the device's; None where none can be there.
        makes_up_for_absent: whether gate weights of absent experts go to those of a token's others (forward.py).
    """

    def __init__(self, layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> None:
        self.layer, self.device, self.versions = layer, device, tuple(versions)
        self._forms: dict[str, tuple[Form, ...]] = {v.name: make_forms(layer.matrices, v) for v in self.versions}
        self._number = {v.name: i for i, v in enumerate(self.versions)}
        self.sections = {v.name: sections_of(layer.matrices, v) for v in self.versions}
        self.native = backends.native_layer(layer, self.versions, device)
        self.backend = backends.backend(device) if compiled(self.versions) else "reference"
        self.tier: HostTier | None = None
        self.makes_up_for_absent = False
        self._host: ServedLayer | None = None

    def over(
        self,
        version: Version,
        extent: Tensor,
        where: Where = Where.DEVICE,
        packed: PackedExtent | GpuPackedExtent | None = None,
    ) -> Handle:
        """The handle of a version whose bytes are complete in `extent`, uint8, beginning on a multiple of 64; of one in
        PAGED they are while its layer runs."""
        weights = plain_weights(extent, self.sections[version.name])
        biases = tuple(
            extent[s["bias"].offset : s["bias"].end].view(torch.bfloat16) if "bias" in s else None
            for s in self.sections[version.name]
        )
        return Handle(version, extent, weights, biases, where, packed)

    def lossless_forms(self, version: Version) -> tuple[Form, ...]:
        """Where the matrices of a version stand in an expert."""
        return self._forms[version.name]

    def on_host(self) -> ServedLayer:
        """The same layer as the host runs it."""
        if self._host is None:
            self._host = ServedLayer(self.layer, self.versions, torch.device("cpu"))
        return self._host

    def number(self, version: Version) -> int:
        """A version's number in a handle: its place in the manifest."""
        return self._number[version.name]

    def forms(self, matrix: int) -> list[Form]:
        """One matrix's form in every version, by the version's number."""
        return [self._forms[v.name][matrix] for v in self.versions]


class Snapshot:
    """The experts of one layer as a step sees them, from its beginning to its end: it never changes.

    Attributes:
        of: the layer.
        table: what kernels index, uint64 [experts]: an extent's address and its version's number; not to be written to.
        handles: what is active, by expert: it keeps the extents alive.
    """

    __slots__ = ("_maps", "_on_device", "_paged", "_places", "_served", "handles", "of", "table")

    def __init__(
        self,
        of: ServedLayer,
        table: npt.NDArray[np.uint64],
        handles: tuple[Handle, ...],
        on_device: Tensor | None = None,
    ) -> None:
        self.of, self.table, self.handles = of, table, handles
        self._on_device = on_device
        self._places: frozenset[Where] | None = None
        self._served: list[int] | None = None
        self._paged: npt.NDArray[np.bool_] | None = None
        self._maps: dict[frozenset[Where], Tensor] = {}

    def over(self, words: Tensor) -> Snapshot:
        """The same, read through a table that is on the device already."""
        return Snapshot(self.of, self.table, self.handles, words[: len(self.table)])

    def device_table(self) -> Tensor:
        """The handle table on the device, int64 [experts]; where none was given it is copied, once, and waits."""
        if self._on_device is None:
            device = self.of.device
            with torch.inference_mode(False):
                self._on_device = torch.from_numpy(self.table.view(np.int64).copy()).to(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # another stream may read it next
        return self._on_device

    def served(self) -> list[int]:
        """The numbers of the versions that experts which the device runs have."""
        if self._served is None:
            here = [h.version for h in self.handles if h.version is not None and h.where in RUN_THERE]
            self._served = sorted({self.of.number(v) for v in here})
        return self._served

    def places(self) -> frozenset[Where]:
        """Where its experts are."""
        if self._places is None:
            self._places = frozenset(h.where for h in self.handles)
        return self._places

    def paged(self) -> npt.NDArray[np.bool_]:
        """Whether each expert's weights have memory only while they are needed, bool [experts]."""
        if self._paged is None:
            self._paged = np.array([h.where in PAGED for h in self.handles], bool)
        return self._paged

    def only(self, index: Tensor, here: frozenset[Where]) -> Tensor:
        """The router's choice [tokens, top_k] with a number past the last expert for those that are not in `here`."""
        if self.places() <= here:
            return index
        key, count = here, len(self.handles)
        if key not in self._maps:
            moved = [e if h.where in here else count for e, h in enumerate(self.handles)]
            with torch.inference_mode(False):
                self._maps[key] = torch.tensor([*moved, count], dtype=torch.int64).to(index.device)
        return self._maps[key][index.long().clamp(max=count)]

    def weight(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor:
        """One matrix of an expert's active version, [rows, cols] in `dtype`."""
        made = self.handles[expert]
        assert made.version is not None
        if made.weights:
            return made.weights[matrix].to(dtype)
        sections = self.of.sections[made.version.name][matrix]
        return dequantise(made.extent, sections, self.of.layer.matrices[matrix], made.version, dtype)

    def bias(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor | None:
        """One bias of an expert's active version, [rows] in `dtype`."""
        bias = self.handles[expert].biases[matrix]
        return None if bias is None else bias.to(dtype)


class LayerExperts:
    """The handles of one layer.

    Attributes:
        of: the layer.
        current: what a step that begins now sees. Publishing replaces it.
        model: the key of the model, by which the running step is found (runtime/step.py).
        position: the layer's place among the model's layers of experts.
        steps: opens a step for a call outside any: the model's forward wrapper. None once the model has gone.
        number: of the layer's operator (op.py).
        no_gradients: why a pass may not keep what gradients need; empty where it may.
    """

    model: object = None
    position = 0
    steps: StepOpener | None = None
    number = -1
    no_gradients = ""

    def __init__(self, layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> None:
        """Without experts yet: `publish` gives each its first version."""
        self.of = ServedLayer(layer, versions, device)
        self.current = Snapshot(self.of, np.zeros(0, np.uint64), ())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled or copied: handles are addresses of this process's memory."""
        raise InputError("a loaded bundle is neither copied nor pickled: load it again, with moepack.load")

    def let_go(self) -> None:
        """Forget the forward wrapper: it knows the layer, and a circle of references would keep the layer's memory."""
        self.steps = None

    def publish(self, expert: int, made: Handle) -> None:
        """Make a version of an expert the active one for steps that begin from now on; one thread at a time.

        First versions come in the experts' order. A step that has begun goes on with what it saw: the caller keeps the
        bytes of the version before alive until the last of those has ended.
        """
        before, word = self.current, 0
        if made.version is not None:
            word = handle(made.extent.data_ptr(), self.of.number(made.version))
        if expert == len(before.handles):
            table = np.append(before.table, np.uint64(word))
        else:
            table = before.table.copy()
            table[expert] = word
        self.current = Snapshot(self.of, table, (*before.handles[:expert], made, *before.handles[expert + 1 :]))

    @property
    def resident_bytes(self) -> int:
        """Bytes of all active versions."""
        return sum(h.resident_bytes for h in self.current.handles)
