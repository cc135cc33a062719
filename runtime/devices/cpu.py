"""The CPU as a device: its migration stream is threads that read files. Copies run beside the forward pass."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import BundleError, CodecError
from moepack.pack.spec import MEMORY_PAGE, ExpertLayer, Version, align
from moepack.runtime.store.files import Stored
from moepack.runtime.store.page_file import READERS

from .contract import Memory
from .glibc import madvise
from .migration import HostEvent, HostThreads, Migration

HUGE = 2 << 20
COLLAPSE = 25 if sys.platform == "linux" else None  # MADV_COLLAPSE, Linux 6.1


class CpuMemory(Memory):
    """Anonymous pages, which take memory once they are written. Several threads may use an object.

    A huge page (2 MiB) is used where all of it has been taken: a thread then reads weights twice as fast (`python -m
    benchmarks.kernels`). Elsewhere pages stay small, so that writing one part does not take memory for the rest.
    """

    returnable = True

    def __init__(self, size: int) -> None:
        # Private: shared anonymous pages keep their memory when they are given back.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, align(max(size, 1), MEMORY_PAGE), flags=flags)
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8))
        self._first = -self.tensor.data_ptr() % HUGE  # where the first huge page begins
        self._taken = np.zeros(max(len(self.tensor) - self._first, 0) // HUGE, np.int64)  # bytes, by huge page
        self._late: set[int] = set()  # huge pages taken in parts: small pages until they are collapsed
        self._lock = threading.Lock()

    def _change(self, start: int, size: int, by: int) -> list[int]:
        """Count bytes in or out; return the huge pages that were wholly taken before, or are now."""
        at = start - self._first
        changed = []
        for i in range(max(at // HUGE, 0), min(-(-(at + size) // HUGE), len(self._taken))):
            before = int(self._taken[i])
            self._taken[i] += by * (min(at + size, (i + 1) * HUGE) - max(at, i * HUGE))
            if HUGE in (before, int(self._taken[i])):
                changed.append(i)
                (self._late.add if 0 < before < HUGE else self._late.discard)(i)
        return changed

    def _advise(self, advice: int | None, pages: Iterable[int]) -> None:
        if advice is not None:
            for i in pages:
                madvise(self.tensor.data_ptr() + self._first + i * HUGE, HUGE, advice)  # refused without huge pages

    def take(self, start: int, size: int) -> None:
        """Count the bytes, and request huge pages; the system provides memory when they are written."""
        with self._lock:
            self._advise(getattr(mmap, "MADV_HUGEPAGE", None), self._change(start, size, 1))

    def settle(self, start: int, size: int) -> None:
        """Collapse ranges that were taken in parts into huge pages (MADV_COLLAPSE); call this after a write."""
        at = start - self._first
        for i in range(at // HUGE, -(-(at + size) // HUGE)):
            with self._lock:  # for one page at a time: a pass may wait for it
                if i in self._late:
                    self._advise(COLLAPSE, (i,))
                    self._late.discard(i)

    def give_back(self, start: int, size: int) -> None:
        """Give pages back to the system. Raises ValueError for parts of pages, whose other bytes would be lost."""
        if start % MEMORY_PAGE or size % MEMORY_PAGE:
            raise ValueError(f"{size} bytes from {start} on are not whole pages of {MEMORY_PAGE} bytes")
        with self._lock:
            self._advise(getattr(mmap, "MADV_NOHUGEPAGE", None), self._change(start, size, -1))
            if error := madvise(self.tensor.data_ptr() + start, size, mmap.MADV_DONTNEED):
                raise OSError(error, f"memory cannot be given back: {os.strerror(error)}")


class CpuDevice(Migration):
    """The CPU: extents are read into their block; a lossless extent is decoded into its block from a staging buffer."""

    def __init__(
        self,
        staging_bytes: int,
        on_event: Callable[[], None] = lambda: None,
        threads: int | None = 0,
        readers: int = READERS,
    ) -> None:
        """Allocate the staging buffer: `staging_bytes` is the size of the largest lossless extent that is fetched.

        `on_event` is called on the stream's threads after each fetch has ended. READERS extents are read at a time
        until `serve` is called, and `readers` from then on; lossless ones share the staging buffer, and are decoded one
        at a time, by `threads`; `None` takes all cores. 0 takes torch's threads if `readers` are several, because
        passes wait for them then, and else 1, which leaves the other cores to the forward pass.
        """
        super().__init__(threaded := HostThreads("moepack-migration", on_event, max(readers, READERS)))
        if threads == 0:
            threads = torch.get_num_threads() if readers > 1 else 1
        self._threads = threads
        self._narrow = partial(threaded.narrow, readers)
        self._staged = threading.Lock()  # held while the staging buffer is used
        self._staging: Buffer = CpuMemory(staging_bytes).tensor.numpy()
        self._now = HostEvent(ended=True)
        self._memories: list[CpuMemory] = []

    def memory(self, size: int) -> Memory:
        """Allocate anonymous pages."""
        self._memories.append(CpuMemory(size))
        return self._memories[-1]

    host_memory = memory

    def pinned_memory(self, block: int, blocks: int) -> Memory:
        """Allocate anonymous pages."""
        return self.memory(block * blocks)

    def fetch(
        self,
        find: Callable[[], Stored],
        target: Tensor,
        layer: ExpertLayer,
        version: Version,
        packed: bool = False,
        here: Tensor | None = None,
        coded: Tensor | None = None,
    ) -> HostEvent:
        """Read an extent into a block, and decode a lossless one unless `packed`; or copy `here`, or decode `coded`."""

        def work(event: HostEvent) -> None:
            if here is not None:
                self.gate(event, len(here))(len(here))
                target[: len(here)].copy_(here)
                self._settle(target)
                return
            if coded is not None:
                with self._staged:
                    self._decode(coded.numpy(), lambda: find().where, layer, version, target, self.gate(event, 0))
                self._settle(target)
                return
            source = find()
            before = self.gate(event, source.size)
            block: Buffer = target.numpy()
            if version.entropy_coded and not packed:
                with self._staged:
                    source.read_into(self._staging, before)
                    extent = self._staging[: source.size]
                    self._decode(extent, lambda: source.where, layer, version, target, before)
            else:
                source.read_into(block, before)
            self._settle(target)

        return self.stream.submit(work)

    def _decode(
        self,
        coded: Buffer,
        where: Callable[[], str],
        layer: ExpertLayer,
        version: Version,
        target: Tensor,
        before: Callable[[int], None],
    ) -> None:
        try:
            version.restore(layer.matrices, coded, target.numpy(), self._threads, lambda matrix: before(0))
        except CodecError as error:
            raise BundleError.single(where(), "codec", str(error)) from None

    def _settle(self, written: Tensor) -> None:
        for memory in self._memories:
            at = written.data_ptr() - memory.tensor.data_ptr()
            if 0 <= at < len(memory.tensor):
                memory.settle(at, len(written))

    def mark(self) -> HostEvent:
        """Return an event that has ended: on a CPU, compute has ended when its call returns."""
        return self._now

    def free(self) -> None:
        """Do nothing, because Python frees the memory with its last reference."""

    def serve(self) -> None:
        """Keep the threads that serving may use: the files are the host's store."""
        self._narrow()

    def host(self) -> dict[str, object]:
        """Return the mode `files`: extents are kept in the bundle's files alone."""
        return {"mode": "files"}
