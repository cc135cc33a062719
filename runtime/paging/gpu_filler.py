"""Pages on a GPU: all work is issued to streams, and a stream that reads a page waits for the page's load.

It has not run on a GPU yet: tests put stand-ins behind torch_cuda.py and driver.py. A step decodes the packed pages
that it misses in one launch on its own stream. The loaders' work goes to two streams, one for gate and up projections
and one for down projections: the first product begins before the second's weights are there (fluxmoe, Algorithm 1).
No stream orders unmapping: the loaders wait for it on the host (paging.py). The decoder's report is read when the next
layer is reached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import BundleError, CodecError, InputError
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.devices.cuda import CudaDevice, StreamMark, read_heads
from moepack.runtime.devices.torch_cuda import LOADS, TorchGpu
from moepack.runtime.experts.handles import Snapshot
from moepack.runtime.experts.packed import CodedPart, GpuPackedExtent, parts_of
from moepack.runtime.kernels.forms import Form
from moepack.runtime.planning.paging import LOADERS
from moepack.runtime.store.files import Stored
from moepack.runtime.store.pinned import Held

from .address_space import Page
from .cuda_space import CudaAddressSpace
from .filler import PageFiller, RunPages
from .paging import Paging
from .window import Filled, LayerRun, Mapped


@dataclass(frozen=True, slots=True)
class GpuFilled:
    """A page's load as issued: events by matrix, and the decoder's reports."""

    events: tuple[StreamMark, ...]
    packed: GpuPackedExtent
    reports: tuple[Tensor, ...]

    def error(self) -> BundleError | None:
        """Return what the decoder found wrong."""
        return self.packed.damaged() if any(bool(report.any()) for report in self.reports) else None


@dataclass(slots=True)
class GpuWork:
    """What a run had the device do, for `Paging` to check: the load of a page that it read, or a wait for loads."""

    # `mapped`, `filled`: the page and its load
    mapped: Mapped | None = None
    filled: Filled | None = None
    between: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # events before and after the wait
    seconds: float = 0.0  # of the wait, once it has ended

    def ended(self) -> BaseException | None:
        """Wait for the end; return what went wrong.

        A load's events lie before products that have ended, so that waiting costs nothing but after the last layer.
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
        """Wait until both may be written again."""
        for event in self.busy:
            event.wait()
        self.busy = ()
        if self.held is not None:
            self.held.release()
            self.held = None


class GpuFiller(PageFiller):
    """`PageFiller` of a GPU."""

    space: CudaAddressSpace

    def __init__(
        self,
        device: CudaDevice,
        layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
        version: Version,
        stored: Callable[[int, int], Stored],
        staging: int,
    ) -> None:
        """Reserve the addresses, and allocate the loaders' buffers of `staging` bytes. The rest as in `CpuFiller`.

        Raises:
            InputError: without the memory, the addresses, or Triton.
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
        self._device, self._layers, self._stored = device, tuple(layers), stored
        self._slots = [_Slot(gpu.pinned(staging), gpu.memory(staging)) for _ in range(LOADERS)]
        self._closed = False

    def chosen(self, index: Tensor) -> npt.NDArray[np.int64]:
        """See `PageFiller`; it waits for the stream."""
        out: npt.NDArray[np.int64] = index.cpu().numpy()
        return out

    def pages(
        self, paging: Paging, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> RunPages:
        """See `PageFiller`."""
        return GpuRunPages(self, paging, run, snapshot, position, active, step)

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> GpuPackedExtent:
        """See `PageFiller`."""
        return self._packed(position, expert, extent, self._device.parts(extent), where)

    def _packed(
        self, position: int, expert: int, extent: Tensor, parts: Sequence[CodedPart], where: str
    ) -> GpuPackedExtent:
        layer, forms = self._layers[position]
        return GpuPackedExtent(extent, layer, forms, self.space.extent(position, expert), where, parts)

    def read(self, loader: int, position: int, expert: int) -> tuple[GpuPackedExtent, int]:
        """Bring an extent to the loader's buffer on the device.

        From pinned memory by one copy; else from the file through the loader's pinned buffer, where it is digested.
        """
        slot, gpu, host = self._slots[loader], self.gpu, self._device.pinned
        slot.wait()
        stored = self._stored(position, expert)
        staging: Buffer = slot.host.numpy()
        slot.held = host.hold(stored.place) if host is not None else None
        with gpu.loading(0):
            try:
                if slot.held is not None:
                    gpu.copy(slot.device[: stored.size], slot.held.bytes)
                else:
                    with host.fetching() if host is not None else contextlib.nullcontext():
                        stored.read_into(staging, after=lambda a, b: gpu.copy(slot.device[a:b], slot.host[a:b]))
            finally:
                slot.busy = (StreamMark(gpu.record()),)
        extent = staging[: stored.size]
        if slot.held is not None and slot.held.mapped:
            read_heads(stored, extent, self._layers[position][0])
        elif slot.held is not None:
            extent = slot.held.bytes.numpy()
        try:
            parts = parts_of(self._layers[position][0], extent)
        except CodecError as error:
            raise BundleError.single(stored.where, "codec", str(error)) from None
        return self._packed(position, expert, slot.device[: stored.size], parts, stored.where), stored.size

    def fill(self, loader: int, packed: GpuPackedExtent, page: Page) -> GpuFilled:
        """Decode each matrix on its stream, behind the copy of its bytes."""
        slot, gpu = self._slots[loader], self.gpu
        is_read = packed.extent.data_ptr() == slot.device.data_ptr()
        copied, events, reports = slot.busy if is_read else (), [], []
        for matrix in range(len(self._layers[page[1]][0].matrices)):
            with gpu.loading(matrix % LOADS):
                for event in copied:
                    gpu.wait(event.event)
                try:
                    reports.append(self.decode([packed], [matrix]))
                finally:
                    events.append(StreamMark(gpu.record()))
                    slot.busy = (*slot.busy, events[-1]) if is_read else slot.busy
        return GpuFilled(tuple(events), packed, tuple(reports))

    def decode(self, all_packed: Sequence[GpuPackedExtent], matrices: Sequence[int]) -> Tensor:
        """Decode matrices of some experts in one launch on the current stream, without waiting.

        Returns:
            int32 [experts x matrices] in pinned memory: the decoder's reports.

        Raises:
            BundleError: when one is not a coded matrix.
        """
        jobs = [packed.job(matrix, self.gpu.copy) for packed in all_packed for matrix in matrices]
        try:
            found = self.gpu.decode(jobs)
        except ValueError as error:
            raise all_packed[0].damaged(str(error)) from None
        report = self.gpu.pinned(4 * len(jobs)).view(torch.int32)
        self.gpu.copy(report, found)
        return report

    def issued(self) -> tuple[StreamMark, ...]:
        """Return an event for each stream; none when the device fails."""
        events: list[StreamMark] = []
        with contextlib.suppress(RuntimeError):
            for number in range(LOADS):
                with self.gpu.loading(number):
                    events.append(StreamMark(self.gpu.record()))
        return tuple(events)

    def follow(self) -> None:
        """Order this thread's marks behind the loaders' reads of packed extents."""
        events = self.issued()
        with self.gpu.computing():
            for event in events:
                self.gpu.wait(event.event)

    def rest(self, loader: int) -> None:
        """Wait until its buffers are free."""
        self._slots[loader].wait()

    def close(self) -> None:
        """Free the window and the pools' mapped memory."""
        if self._closed:
            return
        self._closed = True
        for slot in self._slots:
            slot.wait()
        self.space.close()
        self._device.unmap()


class GpuRunPages(RunPages):
    """A run's pages on a GPU; a page is all matrices of an expert."""

    def __init__(self, filler: GpuFiller, *of: Any) -> None:
        super().__init__(*of)
        self._filler = filler
        self._mine: dict[int, GpuFilled] = {}

    def ready(self, matrix: int) -> None:
        """Have the compute stream decode one matrix's bytes, or wait for their loads. The host waits for neither.

        Raises:
            BundleError: when one is damaged.
        """
        gpu = self._filler.gpu
        if matrix == 0:
            self._gather(0)
        with gpu.computing():
            events = [e for m in self._needed[0] for e in self._others(m, matrix) if not e.done()]
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

    def _others(self, mapped: Mapped, matrix: int) -> tuple[StreamMark, ...]:
        """Return the event that one matrix of a page waits for, unless this run issued it."""
        filled = mapped.filled
        if filled is None or id(filled) in self._mine:
            return ()
        assert isinstance(filled, GpuFilled)
        return filled.events[matrix : matrix + 1]

    def _decode(self, own: dict[int, Mapped]) -> None:
        """Decode all matrices of all missing packed experts in one launch."""
        all_packed, count = [self._packed(expert) for expert in own], len(self._snapshot.of.layer.matrices)
        report = self._filler.decode(all_packed, range(count))
        event = StreamMark(self._filler.gpu.record())
        done = []
        for i, (mapped, packed) in enumerate(zip(own.values(), all_packed, strict=True)):
            filled = GpuFilled((event,) * count, packed, (report[i * count : (i + 1) * count],))
            self._mine[id(filled)] = filled
            done.append((mapped, filled))
        self._paging.loaded(done)
        own.clear()
