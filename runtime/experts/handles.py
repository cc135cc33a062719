"""The experts of a layer as the forward pass finds them: a handle names each expert's active version.

Publishing makes a new snapshot of a layer. A forward pass (forward.py) reads the snapshot with which it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn, Protocol, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.kernels.forms import compiled, handle, make_forms
from moepack.runtime.kernels.reference import dequantise, plain_weights, section, sections_of
from moepack.runtime.policies.placements import CODED, Placement, Where
from moepack.runtime.step.context import Step, StepOpener

from . import backends
from .host_tier import HostTier
from .packed import CodedExtent

if TYPE_CHECKING:
    from moepack.families.interface import ExpertsModule
    from moepack.runtime.kernels.routing_triton import Routed
    from moepack.runtime.kernels.token_native import GatedExperts


class Staged(Protocol):
    """Brings experts in pinned memory to a GPU."""

    def tables(self, handles: Tensor, counts: Tensor) -> AbstractContextManager[Iterator[Tensor]]:
        """Yield handle tables that together have every expert with slots, as staged.py says."""


Gate = tuple[object, ...]  # `act_fn`, and the module's own `_apply_gate`, `limit` and `alpha`


@dataclass(frozen=True, slots=True)
class Handle:
    """One expert's active placement, with the tensors through which kernels read the expert."""

    version: Version | None  # `None` if the expert is absent
    # The expert as it is in memory (`Version.sections`), uint8, beginning on a multiple of 64. Of an expert in coded
    # bytes a GPU has it only while its layer runs (runtime/paging/in_place.py), and a CPU has none: a pass waits until
    # the expert is decoded to a block of its own
    extent: Tensor
    weights: tuple[Tensor, ...]  # BF16 views [rows, cols] of the matrices of a plain (BF16) version; else empty
    biases: tuple[Tensor | None, ...]  # BF16 views [rows] by matrix
    where: Where = Where.DEVICE
    packed: CodedExtent | None = None  # the expert's coded bytes

    @property
    def resident_bytes(self) -> int:
        """Return the bytes that the expert occupies on its device, without the slots in which a GPU decodes it."""
        if self.packed is not None:
            return self.packed.extent.numel() if self.where is Where.PACKED else 0
        return self.extent.numel() if self.where is Where.DEVICE else 0

    @property
    def runs(self) -> Where:
        """Return where the expert can be run; "absent" if it has no bytes there."""
        return self.where if self.extent.numel() else Where.ABSENT

    def __str__(self) -> str:
        return str(Placement(self.version, self.where))


RUN_THERE = CODED | {Where.DEVICE, Where.PINNED}  # places of experts that the device runs
EVERYWHERE = RUN_THERE | {Where.HOST}  # all places of an expert that is not absent
REACHES = (RUN_THERE, EVERYWHERE, frozenset({Where.HOST}))  # the sets of places for which `Snapshot.only` is asked
ROWS = len(REACHES) + 2  # of `Snapshot.words`: the table, the map of each of REACHES, second words
NOTHING = Handle(None, torch.empty(0, dtype=torch.uint8), (), (), Where.ABSENT)


class ServedLayer:
    """A layer's shapes, versions, device and kernels: the same for all its snapshots."""

    def __init__(self, layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> None:
        self.layer = layer
        self.device = device
        self.versions = tuple(versions)
        # By a version's name: the form (byte offsets) of each matrix, the version's number in a handle (its index in
        # `versions`), and the sections of each matrix by kind
        self.forms = {v.name: make_forms(layer.matrices, v) for v in self.versions}
        self.numbers = {v.name: i for i, v in enumerate(self.versions)}
        self.sections = {v.name: sections_of(layer.matrices, v) for v in self.versions}
        self.native = backends.native_layer(layer, self.versions, device)  # the forms that CPU kernels read
        self.backend = backends.backend(device) if compiled(self.versions) else "reference"
        self.tier: HostTier | None = None  # runs experts on the host, beside the device's
        # Numbers of all versions that experts on the device may have under the policy; empty if none ever changes
        self.launched: tuple[int, ...] = ()
        # Decodes experts in coded bytes to places of their own, between a call's launches on a GPU: some, with the
        # slots of each, or all (paging/in_place.py)
        self.in_place: Callable[[Snapshot, Tensor | None, Tensor], None] | None = None
        # Experts in pinned memory, which passes of many tokens bring to a GPU (`StagedLayer`, staged.py)
        self.staged: Staged | None = None
        # What a step's kernels find beside the handles of a snapshot, int64 [experts]; None where they need no more
        self.second: Callable[[Snapshot], npt.NDArray[np.int64]] | None = None
        # The experts module's gate, and the kernel that runs few tokens in one call if the gate is its own (cpu.py)
        self.gated: tuple[Gate, GatedExperts | None] | None = None

    def over(
        self,
        version: Version,
        extent: Tensor,
        where: Where = Where.DEVICE,
        packed: CodedExtent | None = None,
    ) -> Handle:
        """Make the handle of a version whose bytes are in `extent`; arguments are as in `Handle`."""
        if not extent.numel():
            return Handle(version, extent, (), (), where, packed)
        weights = plain_weights(extent, self.sections[version.name])
        biases = tuple(section(extent, s["bias"]) if "bias" in s else None for s in self.sections[version.name])
        return Handle(version, extent, weights, biases, where, packed)

    @cached_property
    def on_host(self) -> ServedLayer:
        """The same layer with the CPU as its device, for the host tier."""
        return ServedLayer(self.layer, self.versions, torch.device("cpu"))


class Snapshot:
    """The experts of one layer as a step sees them. A snapshot never changes."""

    seconds: Tensor  # second words on the device, int64 [experts]; set by `over`

    def __init__(
        self,
        of: ServedLayer,
        table: npt.NDArray[np.uint64],  # [experts], for kernels: an extent's address plus the number of its version
        handles: tuple[Handle, ...],  # the active placements, by expert; handles keep the extents alive
        on_device: Tensor | None = None,  # `table` as int64 on the device
    ) -> None:
        self.of = of
        self.table = table
        self.handles = handles
        self._on_device = on_device
        self._maps: dict[frozenset[Where], Tensor] = {}

    @cached_property
    def words(self) -> npt.NDArray[np.int64]:
        """Return int64 [ROWS, experts + 1] for a device: the table, a map for each of REACHES, second words.

        Maps are zeros where no expert is out of the device's reach: `only` does not ask for them then.
        """
        count = len(self.table)
        out = np.zeros((ROWS, count + 1), np.int64)
        out[0, :count] = self.table.view(np.int64)
        if not self.places <= RUN_THERE:
            out[1:-1] = [self._map(here) for here in REACHES]
        if self.of.second is not None:
            out[-1, :count] = self.of.second(self)
        return out

    def _map(self, here: frozenset[Where]) -> list[int]:
        count = len(self.handles)
        return [*(e if h.runs in here else count for e, h in enumerate(self.handles)), count]

    def over(self, words: Tensor) -> Snapshot:
        """The same snapshot, with all that was made of it, and `words` on the device already, [ROWS, ...]."""
        count = len(self.table)
        made = object.__new__(Snapshot)
        vars(made).update(vars(self), _on_device=words[0, :count], served=self.served, seconds=words[-1, :count])
        if not self.places <= RUN_THERE:
            made._maps = {here: row[: count + 1] for here, row in zip(REACHES, words[1:-1], strict=True)}
        return made

    def device_table(self) -> Tensor:
        """The handle table on the device, int64 [experts]. If it is not there yet, copies it and waits."""
        if self._on_device is None:
            device = self.of.device
            with torch.inference_mode(False):
                self._on_device = torch.from_numpy(self.table.view(np.int64).copy()).to(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # another stream may read it next
        return self._on_device

    @cached_property
    def served(self) -> list[int]:
        """The version numbers of the experts that the device runs."""
        here = [h.version for h in self.handles if h.version is not None and h.runs in RUN_THERE]
        return sorted({self.of.numbers[v.name] for v in here})

    @cached_property
    def places(self) -> frozenset[Where]:
        """All places at which experts of the layer can be run; one without bytes to run is absent."""
        return frozenset(h.runs for h in self.handles)

    def only(self, index: Tensor, here: frozenset[Where]) -> Tensor:
        """The router's choice [tokens, top_k], with a number past the last expert for those at places not in `here`."""
        count = len(self.handles)
        if here >= EVERYWHERE and self.of.native is not None:  # a table's word is 0 for an absent expert alone
            if self.table.take(index.numpy(), mode="clip").all():
                return index
        elif self.places <= here:
            return index
        if here not in self._maps:
            with torch.inference_mode(False):
                self._maps[here] = torch.tensor(self._map(here), dtype=torch.int64).to(index.device)
        return self._maps[here][index.long().clamp(max=count)]

    @cached_property
    def on_host(self) -> Snapshot:
        """The same experts for the host tier."""
        return Snapshot(self.of.on_host, self.table, self.handles)

    def weight(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor:
        """One matrix of an expert's active version, [rows, cols] in `dtype`, for plain inputs."""
        made = self.handles[expert]
        assert made.version is not None
        if made.weights:
            return made.weights[matrix].to(dtype)
        sections = self.of.sections[made.version.name][matrix]
        m = self.of.layer.matrices[matrix]
        stored = dequantise(made.extent, sections, m, made.version.at(matrix), torch.float32)
        plain: Tensor = stored
        return plain.to(dtype)

    def bias(self, expert: int, matrix: int, dtype: torch.dtype) -> Tensor | None:
        """One bias of an expert's active version, [rows] in `dtype`."""
        bias = self.handles[expert].biases[matrix]
        return None if bias is None else bias.to(dtype)


def seen(step: Step) -> Sequence[Snapshot]:
    """The experts of every layer as a step sees them."""
    return cast("Sequence[Snapshot]", step.snapshots)  # the step's own room is below this one


@dataclass(slots=True)
class LayerCall:
    """One call of a layer's experts."""

    module: ExpertsModule
    experts: Snapshot
    hidden: Tensor  # [tokens, hidden]
    index: Tensor  # [tokens, top_k]; an index past the last expert adds nothing
    weights: Tensor  # [tokens, top_k]
    routed: Routed | None = None  # of few tokens on a GPU


class LayerExperts:
    """The handles of one layer's experts, attached to the experts' module as `_moepack`."""

    model: object = None  # the key of the model, by which the running step is found (runtime/step/context.py)
    position = 0  # the layer's position among the model's layers of experts
    # The model's forward wrapper, which opens a step for a call outside any step; `None` once the model is freed
    steps: StepOpener | None = None
    number = -1  # the number under which op.py knows the module
    # Whether the layer hands on what its router made, so that the router's launch may count it; None if not seen yet
    passes_on: bool | None = None
    no_gradients = ""  # why gradients are refused; empty if they are allowed
    is_closed = False  # whether the experts' memory may be gone, but for steps that run

    def __init__(self, layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> None:
        """Start without experts: `publish` then gives each expert its first version."""
        self.of = ServedLayer(layer, versions, device)
        self.current = Snapshot(self.of, np.zeros(0, np.uint64), ())  # for a step that begins now

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied: handles are addresses of this process's memory."""
        raise InputError("a loaded bundle is neither copied nor pickled: load it again, with moepack.load")

    def let_go(self) -> None:
        """Forget what refers to this layer: a cycle of references would keep the memory."""
        self.steps = self.of.in_place = self.of.second = None

    def close(self) -> None:
        """Refuse calls outside a running step from now on: the experts' memory may go."""
        self.is_closed = True
        self.let_go()

    def publish(self, expert: int, made: Handle) -> None:
        """Make a placement active for steps that begin from now on. Only one thread may call this at a time.

        The first placements of all experts are published in the experts' order. A step that has begun reads the old
        placement, whose bytes the caller must keep until the last of these steps has ended.
        """
        before = self.current
        word = 0
        if made.version is not None and made.extent.numel():
            word = handle(made.extent.data_ptr(), self.of.numbers[made.version.name])
        if expert == len(before.handles):
            table = np.append(before.table, np.uint64(word))
        else:
            table = before.table.copy()
            table[expert] = word
        self.current = Snapshot(self.of, table, (*before.handles[:expert], made, *before.handles[expert + 1 :]))

    @property
    def resident_bytes(self) -> int:
        """Bytes that all active versions take on the device."""
        return sum(h.resident_bytes for h in self.current.handles)
