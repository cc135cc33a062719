"""Pages on a GPU: all work is issued to streams, and a stream that reads a page waits for the page's load.

It has not run on a GPU yet: tests put stand-ins behind torch_cuda.py and driver.py. A step decodes the packed pages
that it misses in one launch on its own stream. The loaders' work goes to two streams, one for gate and up projections
and one for down projections: the first product begins before the second's weights are there (fluxmoe, Algorithm 1).
Streams do not order unmapping: before it, the loaders wait on the host for work on the page (paging.py). The decoder
reports damaged bytes in a tensor, which is read when the next layer is reached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import BundleError, InputError
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.devices.cuda import CudaDevice, StreamMark, find_parts
from moepack.runtime.devices.torch_cuda import LOADS, TorchGpu
from moepack.runtime.experts.packed import CodedPart, GpuPackedExtent
from moepack.runtime.kernels.forms import Form
from moepack.runtime.planning.paging import LOADERS
from moepack.runtime.store.files import Stored
from moepack.runtime.store.pinned import Held

from .address_space import Page
from .cuda_space import CudaAddressSpace
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

        Raises BundleError when an expert is damaged.
        """
        gpu = self._device.gpu
        if matrix == 0:
            self._gather(0)
        with gpu.computing():
            filled = [f for m in self._needed[0] if (f := m.filled) is not None and id(f) not in self._mine]
            events = [f.events[matrix] for f in filled if not f.events[matrix].done()]
            own = self._own[0] if matrix == 0 else {}
            if events or own:
                first = gpu.record(timed=True)
                for event in events:
                    gpu.wait(event.event)
                if own:
                    self._decode(own)
                self.issued.append(GpuWork(between=(first, gpu.record(timed=True))))
        if matrix == 0:
            self.issued += [GpuWork(m, m.filled) for m in self._needed[0] if m.filled is not None]

    def _decode(self, own: dict[int, Mapped]) -> None:
        """Decode all matrices of all missing packed experts in one launch."""
        all_packed, count = [self._packed(expert) for expert in own], len(self._snapshot.of.layer.matrices)
        report = self._device.decode(all_packed, range(count))
        event = StreamMark(self._device.gpu.record())
        done = []
        for i, (mapped, packed) in enumerate(zip(own.values(), all_packed, strict=True)):
            filled = GpuFilled((event,) * count, packed, (report[i * count : (i + 1) * count],))
            self._mine[id(filled)] = filled
            done.append((mapped, filled))
        self._paging.loaded(done)
        own.clear()


class GpuFiller(PageFiller):
    """The `PageFiller` of a GPU."""

    run_pages = GpuRunPages
    space: CudaAddressSpace

    def __init__(
        self,
        device: CudaDevice,
        layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
        version: Version,
        stored: Callable[[int, int], Stored],
        staging: int,
    ) -> None:
        """Reserve the addresses, and allocate each loader's buffers of `staging` bytes.

        Other arguments are as in `CpuFiller`. Raises InputError when memory, addresses or Triton are missing.
        """
        try:
            import triton  # noqa: F401
        except ImportError:
            raise InputError("experts are paged on a GPU by Triton's kernels, which is not installed") from None
        assert device.calls is not None
        gpu = device.gpu
        described = [(layer.matrices, layer.experts) for layer, _ in layers]
        self.space = CudaAddressSpace(described, version, device.calls, gpu.over, device.granule)
        self.gpu: TorchGpu = gpu
        self.device, self._layers, self._stored = device, tuple(layers), stored
        self._slots = [_Slot(gpu.pinned(staging), gpu.memory(staging)) for _ in range(LOADERS)]

    def over(
        self, position: int, expert: int, extent: Tensor, where: str, parts: Sequence[CodedPart] = ()
    ) -> GpuPackedExtent:
        """See `PageFiller`. Without `parts`, use those that the device found when it fetched the extent."""
        layer, forms = self._layers[position]
        parts = parts or self.device.parts(extent)
        return GpuPackedExtent(extent, layer, forms, self.space.extent(position, expert), where, parts)

    def read(self, loader: int, position: int, expert: int) -> tuple[GpuPackedExtent, int]:
        """Bring an extent to the loader's buffer on the device.

        An extent in pinned memory is copied at once, another first read and digested in the loader's pinned buffer.
        """
        slot, device = self._slots[loader], self.device
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

    def fill(self, loader: int, packed: GpuPackedExtent, page: Page) -> GpuFilled:
        """Decode each matrix on its stream, after the copy of its bytes."""
        slot, gpu = self._slots[loader], self.gpu
        is_read = packed.extent.data_ptr() == slot.device.data_ptr()
        copied, events, reports = slot.busy if is_read else (), [], []
        for matrix in range(len(self._layers[page[1]][0].matrices)):
            with gpu.loading(matrix % LOADS):
                for event in copied:
                    gpu.wait(event.event)
                try:
                    reports.append(self.device.decode([packed], [matrix]))
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

    def follow(self) -> None:
        """Make the compute stream wait for the loaders' reads of packed extents."""
        events = self.issued()
        with self.gpu.computing():
            for event in events:
                self.gpu.wait(event.event)

    def rest(self, loader: int) -> None:
        """Wait until this loader's buffers are unused."""
        self._slots[loader].wait()

    def close(self) -> None:
        """Wait for the loaders' buffers, then free the window and the pools' mapped memory."""
        for slot in self._slots:
            slot.wait()
        self.space.close()
        self.device.unmap()
