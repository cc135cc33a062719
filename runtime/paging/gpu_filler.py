"""Pages on a GPU: all work is issued to streams, and a stream that reads a page waits for the page's load.

Tests put a stand-in behind torch_cuda.py. A step decodes the packed pages that it misses in one launch on its own
stream, and writes where its experts are to its own table of handles. The loaders' work goes to two streams, one for
gate and up projections and one for down projections: the first product begins before the second's weights are there
(fluxmoe, Algorithm 1). A stream waits for the work on a slot's old page before it fills the slot; the host waits for
none of this. The decoder reports damaged bytes in a tensor, which is read when the next layer is reached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.pack.errors import BundleError
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.devices.cuda import CudaDevice, StreamMark, find_parts
from moepack.runtime.devices.torch_cuda import LOADS, TorchGpu
from moepack.runtime.experts.packed import CodedPart, GpuPackedExtent
from moepack.runtime.kernels.forms import Form
from moepack.runtime.planning.paging import LOADERS, WindowSize
from moepack.runtime.store.files import Stored
from moepack.runtime.store.pinned import Held

from .arena import Arena
from .filler import PageFiller, RunPages
from .window import Mapped


@dataclass(frozen=True, slots=True)
class GpuFilled:
    """The load of a page, issued to streams: an event for each matrix, and the decoder's reports of damaged bytes."""

    events: tuple[StreamMark, ...]
    packed: GpuPackedExtent
    reports: tuple[Tensor, ...]

    def error(self) -> BundleError | None:
        """Return an error if the decoder found damaged bytes, else None."""
        return self.packed.damaged() if any(bool(report.any()) for report in self.reports) else None


@dataclass(slots=True)
class GpuWork:
    """Work of a run on the device, for `Paging` to check: the load of a page that the run read, or a wait for loads."""

    mapped: Mapped | None = None  # the page
    filled: GpuFilled | None = None  # its load
    between: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # events before and after the wait
    seconds: float = 0.0  # length of the wait, once it has ended

    def ended(self) -> BaseException | None:
        """Wait until the work has ended; return its error, or None.

        At the next layer, the products that follow a load have ended already; only the last layer's loads take a wait.
        """
        if self.between is not None:
            first, last = self.between
            last.synchronize()
            self.seconds = first.elapsed_time(last) / 1000
        if self.filled is None:
            return None
        for event in self.filled.events:
            event.wait()
        return self.filled.error()


@dataclass(slots=True)
class _Slot:
    """A loader's buffers on the host and on the device."""

    host: Tensor
    device: Tensor
    busy: tuple[StreamMark, ...] = ()
    held: Held | None = None

    def wait(self) -> None:
        """Wait until both buffers may be overwritten."""
        for event in self.busy:
            event.wait()
        self.busy = ()
        if self.held is not None:
            self.held.release()
            self.held = None


class GpuRunPages(RunPages):
    """A run's pages on a GPU; a page is all matrices of an expert."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._device: CudaDevice = self._paging.filler.device
        self._mine: dict[int, GpuFilled] = {}  # the loads that this run issued, by id()

    def ready(self, matrix: int) -> None:
        """Have the compute stream decode one matrix of needed experts, or wait for loads. The host waits for neither.

        Before the first, write the experts' addresses to the step's table of handles. Raises BundleError when an expert
        is damaged.
        """
        gpu = self._device.gpu
        if matrix == 0:
            self._gather(0)
        with gpu.computing():
            if matrix == 0 and self._needed[0]:
                self._write_handles()
            filled = [f for m in self._needed[0] if (f := m.filled) is not None and id(f) not in self._mine]
            events = [f.events[matrix] for f in filled if not f.events[matrix].done()]
            own = self._own[0] if matrix == 0 else {}
            if events or own:
                first = gpu.record(timed=True)
                self._paging.filler.follow(events)
                if own:
                    self._decode(own)
                self.issued.append(GpuWork(between=(first, gpu.record(timed=True))))
        if matrix == 0:
            self.issued += [GpuWork(m, m.filled) for m in self._needed[0] if m.filled is not None]

    def _write_handles(self) -> None:
        """Copy the layer's handles to the step's table, which no other step reads, from memory used for this alone."""
        gpu = self._device.gpu
        snapshot = self._snapshot
        number = snapshot.of.numbers[self._paging.filler.version.name]
        words = self._paging.space.words(snapshot.table, self._needed[0], number)
        pinned = gpu.pinned(words.nbytes)
        pinned.numpy()[:] = words.view(np.uint8)
        gpu.copy(snapshot.device_table(), pinned.view(torch.int64))

    def _decode(self, own: dict[int, Mapped]) -> None:
        """Decode all matrices of all missing packed experts in one launch."""
        gpu = self._device.gpu
        space = self._paging.space
        count = len(self._snapshot.of.layer.matrices)
        self._paging.filler.follow(event for mapped in own.values() for event in mapped.after)
        experts = [(self._packed(expert), space.slot(mapped)) for expert, mapped in own.items()]
        report = self._device.decode(experts, range(count))
        event = StreamMark(gpu.record())
        done = []
        for i, (mapped, (packed, _)) in enumerate(zip(own.values(), experts, strict=True)):
            filled = GpuFilled((event,) * count, packed, (report[i * count : (i + 1) * count],))
            self._mine[id(filled)] = filled
            done.append((mapped, filled))
        self._paging.loaded(done)
        own.clear()


class GpuFiller(PageFiller):
    """The `PageFiller` of a GPU."""

    run_pages = GpuRunPages
    space: Arena

    def __init__(
        self,
        device: CudaDevice,
        layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
        version: Version,
        stored: Callable[[int, int], Stored],
        staging: int,
        size: WindowSize,
    ) -> None:
        """Allocate the window, and each loader's buffers of `staging` bytes.

        Other arguments are as in `CpuFiller`.
        """
        gpu: TorchGpu = device.gpu
        self.space = Arena(gpu, [layer for layer, _ in layers], version, size)
        self.gpu = gpu
        self.device = device
        self.version = version
        self._layers = tuple(layers)
        self._stored = stored
        self._none = torch.empty(0, dtype=torch.uint8)
        self._slots = [_Slot(gpu.pinned(staging), gpu.memory(staging)) for _ in range(LOADERS)]

    def extent(self, position: int, expert: int) -> Tensor:
        """Return nothing: a handle gets its address when a step has a slot for its expert."""
        return self._none

    def over(
        self, position: int, expert: int, extent: Tensor, where: str, parts: Sequence[CodedPart] = ()
    ) -> GpuPackedExtent:
        """See `PageFiller`. Without `parts`, use those that the device found when it fetched the extent."""
        layer, forms = self._layers[position]
        parts = parts or self.device.parts(extent)
        return GpuPackedExtent(extent, layer, forms, where, parts)

    def read(self, loader: int, position: int, expert: int) -> tuple[GpuPackedExtent, int]:
        """Bring an extent to the loader's buffer on the device.

        An extent in pinned memory is copied at once, another first read and digested in the loader's pinned buffer.
        """
        slot = self._slots[loader]
        device = self.device
        slot.wait()
        stored = self._stored(position, expert)
        slot.held = device.hold(stored)
        with self.gpu.loading(0):
            try:
                device.bring(stored, slot.device, slot.host, slot.held)
            finally:
                slot.busy = (StreamMark(self.gpu.record()),)
        parts = find_parts(stored, self._layers[position][0], slot.host, slot.held)
        return self.over(position, expert, slot.device[: stored.size], stored.where, parts), stored.size

    def fill(self, loader: int, packed: GpuPackedExtent, mapped: Mapped) -> GpuFilled:
        """Decode each matrix on its stream, after the copy of its bytes and all work on the slot's old page."""
        slot = self._slots[loader]
        gpu = self.gpu
        to = self.space.slot(mapped)
        is_read = packed.extent.data_ptr() == slot.device.data_ptr()
        copied = slot.busy if is_read else ()
        events = []
        reports = []
        for matrix in range(len(self._layers[mapped.page[1]][0].matrices)):
            with gpu.loading(matrix % LOADS):
                self.follow((*copied, *mapped.after))
                try:
                    reports.append(self.device.decode([(packed, to)], [matrix]))
                finally:
                    events.append(StreamMark(gpu.record()))
                    slot.busy = (*slot.busy, events[-1]) if is_read else slot.busy
        return GpuFilled(tuple(events), packed, tuple(reports))

    def issued(self) -> tuple[StreamMark, ...]:
        """Return an event at the end of each loading stream; no more events once the device fails."""
        events: list[StreamMark] = []
        with contextlib.suppress(RuntimeError):
            for number in range(LOADS):
                with self.gpu.loading(number):
                    events.append(StreamMark(self.gpu.record()))
        return tuple(events)

    def follow(self, events: Iterable[Any]) -> None:
        """Make the current stream wait for events of streams; the host does not wait."""
        for event in dict.fromkeys(events):
            self.gpu.wait(event.event)

    def follow_all(self) -> None:
        """Make the compute stream wait for the loaders' reads of packed extents."""
        events = self.issued()
        with self.gpu.computing():
            self.follow(events)

    def rest(self, loader: int) -> None:
        """Wait until this loader's buffers are unused."""
        self._slots[loader].wait()

    def close(self) -> None:
        """Wait for the loaders' buffers, then free the window and the pools' memory."""
        for slot in self._slots:
            slot.wait()
        self.space.close()
        self.device.free()
