"""A CUDA device for changing versions. Tests put a stand-in behind torch_cuda.py.

A thread issues copies on its own stream and polls for their end. An extent in pinned memory (pinned.py) takes one copy.
Otherwise the file is read into a staging buffer, whose chunks are copied while later chunks are read. A lossless
extent is decoded on another stream, while the next extent is copied. The forward pass waits for none of this.
FP8 codes, which no GPU kernel decodes yet, are decoded on the thread before the copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moepack.pack.codec.bits import Buffer
from moepack.pack.codec.exponent import HEADER, TILE
from moepack.pack.codec.lossless import directory_size
from moepack.pack.errors import BundleError, CodecError, InputError
from moepack.pack.spec import MEMORY_PAGE, ExpertLayer, Version, align
from moepack.runtime.experts.packed import CodedPart, GpuPackedExtent, parts_of
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.store.cudart import Cudart
from moepack.runtime.store.files import BackingStore, Stored
from moepack.runtime.store.host_limit import host_limits
from moepack.runtime.store.pinned import Held, HostStore

from .contract import Completion, Memory
from .cpu import CpuMemory
from .cuda_memory import BlockMemory, ReadMemory, RegisteredMemory
from .migration import Going, HostEvent, HostStream, Migration
from .torch_cuda import TorchGpu

log = logging.getLogger("moepack.runtime")
SLOTS = 2  # fetches under way: one is decoded while the next is copied, or copied while the next is read
MATRICES = 64  # an upper bound of the matrices of one expert, which has two or three


@dataclass(slots=True, eq=False)
class StreamMark:
    """The end of the work issued to a stream so far."""

    event: torch.cuda.Event
    error: BaseException | None = None
    cancelled: bool = False

    def done(self) -> bool:
        """Return whether the stream has reached the mark."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Block the host until the stream has reached the mark."""
        self.event.synchronize()

    def cancel(self) -> None:
        """Do nothing: work that was issued to a stream always completes."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Buffers of one fetch: host staging, device staging for lossless extents, and the decoder's report."""

    host: Tensor
    device: Tensor
    status: Tensor
    coded: Buffer  # not pinned: an extent that the host decodes into `host`


class CudaDevice(Migration):
    """A GPU as a device: pinned extents if there are any, a staging buffer for each slot, one migration stream."""

    def __init__(
        self,
        largest: int,
        device: torch.device,
        on_event: Callable[[], None] = lambda: None,
        *,
        staging: int | None = None,
        slots: int = SLOTS,
        host: HostStore | None = None,
        gpu: TorchGpu | None = None,
        by_block: bool = False,
        pins: Cudart | None = None,
    ) -> None:
        """Allocate buffers for `slots` fetches at a time.

        `largest` is the size in bytes of the largest extent that is fetched, in memory where the host decodes it;
        `staging` that of the largest entropy-coded extent. `on_event` is called on the stream's thread after each fetch
        has ended. `host` is started by `serve` and closed with the device. With `by_block`, memory is taken and given
        back block by block. `pins` pins memory of experts that the host runs.
        """
        self.gpu = gpu = gpu or TorchGpu(device)
        size = align(max(largest, 1), MEMORY_PAGE)
        staging = align(largest if staging is None else staging, MEMORY_PAGE)
        self.pinned = host
        self._by_block = by_block
        self._memories: list[BlockMemory | ReadMemory] = []  # until `free`: kernels may read them
        self._pins = pins
        self._refused = threading.Event()
        self._registered: list[RegisteredMemory] = []
        on_device = gpu.memory(slots * staging)
        self._free = [
            _Slot(
                gpu.pinned(size),
                on_device[i * staging : (i + 1) * staging],
                gpu.pinned(4 * MATRICES).view(torch.int32),
                CpuMemory(staging).tensor.numpy(),
            )
            for i in range(slots)
        ]
        super().__init__(HostStream("moepack-migration", on_event, slots))

    def memory(self, size: int) -> Memory:
        """Allocate device memory; with `by_block`, `take` allocates each block."""
        if self._by_block:
            self._memories.append(BlockMemory(size, self.gpu))
            return self._memories[-1]
        return Memory(self.gpu.memory(align(max(size, 1), MEMORY_PAGE)))

    def host_memory(self, size: int) -> Memory:
        """Allocate host memory whose taken ranges are pinned; ordinary memory if `pins` was not given."""
        if self._pins is None:
            return CpuMemory(size)
        self._registered.append(RegisteredMemory(size, self._pins, self._refused))
        return self._registered[-1]

    def pinned_memory(self, block: int, blocks: int) -> Memory:
        """Allocate host memory, and pin it. Raises InputError if `pins` was not given, or the system refuses."""
        if self._pins is None:
            raise InputError("experts in pinned memory need CUDA's runtime, which this torch does not have")
        self._memories.append(ReadMemory(block, blocks, self._pins))
        return self._memories[-1]

    def fetch(
        self,
        find: Callable[[], Stored],
        target: Tensor,
        layer: ExpertLayer,
        version: Version,
        packed: bool = False,
        here: Tensor | None = None,
        coded: Tensor | None = None,
    ) -> Completion:
        """Copy an extent, or `here`; decode a lossless one on the device unless `packed`. `coded` is never given."""
        if here is not None:
            return self.stream.submit(lambda event: self._copy_here(event, here, target))
        return self.stream.submit(lambda event: self._issue(event, find(), target, layer, version, packed))

    def _issue(
        self, event: HostEvent, source: Stored, target: Tensor, layer: ExpertLayer, version: Version, packed: bool
    ) -> Going:
        on_host = version.entropy_coded and not packed and not version.plain
        decodes = version.entropy_coded and not packed and not on_host
        status: Tensor | None = None
        error: BaseException | None = None
        with contextlib.ExitStack() as stack:
            slot = self._free.pop()
            stack.callback(self._free.append, slot)
            before = self.gate(event, source.size)
            held = self.hold(source)
            if held is not None:
                stack.callback(held.release)
            with self.gpu.migrating():
                try:
                    if on_host:
                        self._bring_restored(source, target, slot, layer, version, held, before)
                    else:
                        self.bring(source, slot.device if decodes else target, slot.host, held, before)
                    before(0)
                except BaseException as caught:  # raised after the copies already issued have ended
                    error = caught
                issued = self.gpu.record()
            if decodes and error is None:
                with self.gpu.decoding():
                    try:
                        parts = find_parts(source, layer, slot.host, held)
                        forms = make_forms(layer.matrices, version)
                        coded = GpuPackedExtent(slot.device, layer, forms, source.where, parts)
                        status = self.decode([(coded, target)], range(len(parts)), slot.status)
                    except BaseException as caught:
                        error = caught
                    issued = self.gpu.record()
            over = stack.pop_all()  # closed when the device has ended the work

        def ended() -> bool:
            try:
                if not issued.query():
                    return False
            except BaseException:
                over.close()
                raise
            wrong = status is not None and bool(status.any())
            over.close()
            if error is not None:
                raise error
            if wrong:
                raise BundleError.single(source.where, "codec", "a matrix does not decode")
            return True

        return ended

    def _copy_here(self, event: HostEvent, here: Tensor, target: Tensor) -> Going:
        before = self.gate(event, len(here))
        with self.gpu.migrating():
            before(len(here))
            self.gpu.copy(target[: len(here)], here)
            issued = self.gpu.record()
        return lambda: bool(issued.query())

    def hold(self, source: Stored) -> Held | None:
        """Return the extent in pinned memory, or `None` if its file must be read."""
        return self.pinned.hold(source.place) if self.pinned is not None else None

    def bring(
        self,
        source: Stored,
        there: Tensor,
        host: Tensor,
        held: Held | None,
        before: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Issue the copies of an extent to `there`: from `held`, or else from its file through the buffer `host`.

        A file's digest is checked. `before` is called with the size of each chunk before it is read or copied.
        """
        copy = self.gpu.copy
        if held is not None:
            before(source.size)
            copy(there[: source.size], held.bytes)
            return

        def after(begin: int, end: int) -> None:
            copy(there[begin:end], host[begin:end])

        with self.pinned.fetching() if self.pinned is not None else contextlib.nullcontext():
            source.read_into(host.numpy(), before, None, after)

    def _bring_restored(
        self,
        source: Stored,
        target: Tensor,
        slot: _Slot,
        layer: ExpertLayer,
        version: Version,
        held: Held | None,
        before: Callable[[int], None],
    ) -> None:
        """Issue the copy of an extent to `target` that the host decodes first, on this thread, in its pinned buffer."""
        if held is not None and not held.mapped:
            before(source.size)
            coded: Buffer = held.bytes.numpy()
        else:
            coded = slot.coded[: source.size]
            with self.pinned.fetching() if self.pinned is not None else contextlib.nullcontext():
                source.read_into(coded, before)
        size = version.resident_size(layer.matrices)
        try:
            version.restore(layer.matrices, coded, slot.host.numpy()[:size], 1, lambda matrix: before(0))
        except CodecError as error:
            raise BundleError.single(source.where, "codec", str(error)) from None
        self.gpu.copy(target[:size], slot.host[:size])

    def decode(
        self,
        experts: Sequence[tuple[GpuPackedExtent, Tensor]],
        matrices: Sequence[int],
        report: Tensor | None = None,
    ) -> Tensor:
        """Decode matrices of some experts in one launch on the current stream, without waiting.

        `experts` are given with the memory that each is decoded to.

        Returns:
            int32 [experts x matrices] in pinned memory: the decoder's reports, at the start of `report` if given.

        Raises BundleError when any of them is not a coded matrix.
        """
        try:
            found = self.gpu.decode([packed.job(i, to, self.gpu.copy) for packed, to in experts for i in matrices])
        except ValueError as error:
            raise experts[0][0].damaged(str(error)) from None
        report = self.gpu.pinned(4 * len(found)).view(torch.int32) if report is None else report[: len(found)]
        self.gpu.copy(report, found)
        return report

    def mark(self) -> Completion:
        """Return an event on the compute stream."""
        return StreamMark(self.gpu.record())

    def serve(self) -> None:
        """Begin to pin extents in the background."""
        if self.pinned is not None:
            self.pinned.start()

    def host(self) -> dict[str, object]:
        """Return the state of the pinned store (`HostStore.state`), or the mode `staged` without one.

        `read_there` are the bytes of experts that kernels read in pinned memory, by the way in which they are pinned.
        """
        state = self.pinned.state() if self.pinned is not None else {"mode": "staged"}
        ways = [memory.ways() for memory in self._memories if isinstance(memory, ReadMemory)]
        return {**state, "read_there": dict(sum(ways, Counter()))}

    def free(self) -> None:
        """Give back and unpin what kernels read, after all issued work has ended. May be called twice."""
        for memory in self._memories:
            memory.close()

    def close(self, wait: bool = True) -> None:
        """End the stream's thread, then the filling of pinned memory; unpin the host tier's memory."""
        super().close(wait)
        if self.pinned is not None:
            self.pinned.close()
        for memory in self._registered:
            memory.close()


def find_parts(source: Stored, layer: ExpertLayer, staging: Tensor, held: Held | None) -> tuple[CodedPart, ...]:
    """Parse a lossless extent that `bring` has copied, and return its parts (coded matrices).

    If `held` is mapped, its headers are first read into `staging`. Raises BundleError when the extent is malformed.
    """
    extent: Buffer = staging.numpy()[: source.size]

    def read(at: int, size: int) -> None:
        end = min(at + size, source.size)
        while at < end:
            at += source.read_some(extent.data[at:end], at)

    if held is not None and held.mapped:
        read(0, directory_size(layer.matrices))
        table = np.array(extent[: 16 * len(layer.matrices)].view("<u4").reshape(-1, 4))
        for m, row in zip(layer.matrices, table, strict=True):
            read(int(row[0]), HEADER + 8 * (-(-m.weights // TILE) + 1))
    elif held is not None:
        extent = held.bytes.numpy()
    try:
        return parts_of(layer, extent)
    except CodecError as error:
        raise BundleError.single(source.where, "codec", str(error)) from None


def open_cuda(
    store: BackingStore,
    versions: Sequence[str],
    device: torch.device,
    largest: int,
    staging: int,
    slots: int,
    on_event: Callable[[], None],
    host_memory: int | None,
    by_block: bool = False,
) -> CudaDevice:
    """Open the device, and prepare to pin extents of `versions` in `host_memory` bytes (default: all that can be).

    `by_block` is as in `CudaDevice`.
    """
    gpu = TorchGpu(device)
    host = None
    calls = None
    try:
        calls = Cudart(gpu.device.index)
    except OSError as error:
        log.info("host memory: nothing is pinned: %s", error)
    else:
        limit = host_limits()["pinnable_bytes"] if host_memory is None else host_memory
        host = HostStore(store, versions, calls, limit)
    return CudaDevice(
        largest, device, on_event, staging=staging, slots=slots, host=host, gpu=gpu, by_block=by_block, pins=calls
    )
