"""The CPU as a device: its migration stream is a thread; copies run beside the forward pass, which releases the GIL.

Decides nothing about what is copied, or when.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import BundleError, CodecError
from moepack.pack.spec import PAGE, ExpertLayer, Version, align
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.store.files import Stored

from .contract import Memory
from .migration import HostEvent, Migration

HUGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_forms = functools.lru_cache(maxsize=64)(make_forms)


class CpuMemory:
    """Anonymous pages: those that were never written take no memory.

    Where all of a huge page (2 MiB) has been taken it becomes one: a thread that reads weights is then twice as fast
    (`python -m benchmarks.kernels`), as it walks no tables of 4 KiB pages. Where a part is not taken, writing its
    neighbour must not take it: the budget would not know.

    Two threads may be at it at once.
    """

    returnable = True

    def __init__(self, size: int) -> None:
        # Private: shared anonymous pages stay where they are when they are given back.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(align(size, PAGE), PAGE), flags=flags)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._first = -self.tensor.data_ptr() % HUGE  # where the first huge page begins
        self._taken = np.zeros(max(len(self.tensor) - self._first, 0) // HUGE, np.int64)  # bytes, by huge page
        self._late: set[int] = set()  # taken in parts: pages of 4 KiB until they are collapsed
        self._lock = threading.Lock()

    def _change(self, start: int, size: int, by: int) -> list[int]:
        """Count bytes in or out; returns the huge pages that were, or are now, taken as a whole."""
        at, changed = start - self._first, []
        for i in range(max(at // HUGE, 0), min(-(-(at + size) // HUGE), len(self._taken))):
            before = int(self._taken[i])
            self._taken[i] += by * (min(at + size, (i + 1) * HUGE) - max(at, i * HUGE))
            if HUGE in (before, int(self._taken[i])):
                changed.append(i)
                (self._late.add if 0 < before < HUGE else self._late.discard)(i)
        return changed

    def _advise(self, advice: int | None, pages: list[int]) -> None:
        for i in pages:
            with contextlib.suppress(OSError, TypeError):  # a system without them
                self._map.madvise(advice, self._first + i * HUGE, HUGE)  # type: ignore[arg-type]

    def cost(self, start: int, size: int) -> int:
        """Pages, no more."""
        return size

    def take(self, start: int, size: int) -> None:
        """Writing takes the pages; whole huge ones are asked for."""
        with self._lock:
            self._advise(getattr(mmap, "MADV_HUGEPAGE", None), self._change(start, size, 1))

    def settle(self, start: int, size: int) -> None:
        """After these bytes were written: make huge pages of what was written before all of them was taken."""
        at = start - self._first
        with self._lock:
            late = [i for i in range(at // HUGE, -(-(at + size) // HUGE)) if i in self._late]
            self._advise(COLLAPSE, late)
            self._late.difference_update(late)

    def give_back(self, start: int, size: int) -> int:
        """Return whole pages to the system."""
        with self._lock:
            self._advise(getattr(mmap, "MADV_NOHUGEPAGE", None), self._change(start, size, -1))
            self._map.madvise(mmap.MADV_DONTNEED, start, size)
        return size


class CpuDevice(Migration):
    """The CPU: reads go straight into the block, the lossless version is decoded into it from a staging buffer.

    Attributes:
        staging_bytes: of the staging buffer, which is a part of what the device takes beside the experts.
    """

    def __init__(
        self, staging_bytes: int, on_event: Callable[[], None] = lambda: None, threads: int | None = 1
    ) -> None:
        """Set the staging buffer aside.

        Args:
            staging_bytes: of the largest lossless extent that is ever fetched.
            on_event: called on the stream's thread after each fetch has ended.
            threads: that decode: one beside a forward pass, all cores where there is none.
        """
        super().__init__(on_event)
        self._threads = threads
        self.staging_bytes = align(max(staging_bytes, PAGE), PAGE)
        self._staging: Buffer = CpuMemory(self.staging_bytes).tensor.numpy()
        self._now = HostEvent(ended=True)
        self._memories: list[CpuMemory] = []

    def memory(self, size: int) -> Memory:
        """Anonymous pages."""
        self._memories.append(CpuMemory(size))
        return self._memories[-1]

    host_memory = memory

    def fetch(
        self, find: Callable[[], Stored], target: Tensor, layer: ExpertLayer, version: Version, packed: bool = False
    ) -> HostEvent:
        """Read an extent into a block, and decode it where it is entropy-coded and not to stay packed."""

        def work(event: HostEvent) -> None:
            source = find()
            before = self.gate(event, source.size)
            block: Buffer = target.numpy()
            if version.entropy_coded and not packed:
                self._decode(source, block, layer, version, before)
            else:
                source.read_into(block, before)
            self._settle(target)

        return self.stream.submit(work)

    def _settle(self, written: Tensor) -> None:
        for memory in self._memories:
            at = written.data_ptr() - memory.tensor.data_ptr()
            if 0 <= at < len(memory.tensor):
                memory.settle(at, len(written))

    def _decode(
        self, source: Stored, block: Buffer, layer: ExpertLayer, version: Version, before: Callable[[int], None]
    ) -> None:
        """Read an entropy-coded extent in chunks, then decode it."""
        source.read_into(self._staging, before)
        coded = self._staging[: source.size]
        try:
            version.restore(layer.matrices, coded, block, self._threads, lambda matrix: before(0))
        except CodecError as error:
            raise BundleError.single(source.where, "codec", str(error)) from None

    def mark(self) -> HostEvent:
        """Compute on a CPU has ended when the call that did it returns."""
        return self._now

    def serve(self) -> None:
        """The page cache is the host's store: there is nothing to fill."""

    def host(self) -> dict[str, Any]:
        """Extents stay in files."""
        return {"mode": "files"}
