"""What the runtime needs of a device: memory set aside at once, a migration stream, events. And the CPU as one.

On the CPU a stream is a thread: copies run beside the forward pass, which releases the GIL as they do. Decides nothing
about what is copied, or when.
"""

from __future__ import annotations

import functools
import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import BundleError, CodecError
from moepack.pack.exponent_fast import decode_into
from moepack.pack.lossless import directory
from moepack.pack.spec import PAGE, ExpertLayer, Version, align

from .kernels.forms import make_forms
from .pools import Memory
from .store import Stored

FLOOR = 4 << 20  # bytes that a copy counts as at least under a rate limit: a small one costs its calls, about 0.5 ms
_forms = functools.lru_cache(maxsize=64)(make_forms)

Bytes = npt.NDArray[np.uint8]


class Cancelled(Exception):
    """What an event holds whose work was no longer wanted."""


class Event(Protocol):
    """That some work on a stream has ended.

    Attributes:
        error: why it failed, once it has ended; None where it did not.
        cancelled: whether the work is no longer wanted.
    """

    error: BaseException | None
    cancelled: bool

    def done(self) -> bool:
        """Whether the work has ended, well or not. Never waits."""

    def wait(self) -> None:
        """Wait until it has. The forward pass never calls this under a policy that does not block."""

    def cancel(self) -> None:
        """Say that the work is no longer wanted: it ends early, or as if nothing had been said."""


class Device(Protocol):
    """Memory, one migration stream beside the compute stream, and events on both."""

    @property
    def moved(self) -> int:
        """Stored bytes copied since the start."""

    def memory(self, size: int) -> Memory:
        """Set aside `size` bytes. Called while a model is loaded and never after."""

    def fetch(self, source: Stored, target: Tensor, layer: ExpertLayer, version: Version) -> Event:
        """Bring an extent into a block on the migration stream; a lossless one is decoded there.

        The event ends without an error only after every byte of the block is in place and the digest was checked.
        """

    def mark(self) -> Event:
        """An event that ends when the compute that was issued until now has."""

    def limit(self, bytes_per_second: float | None) -> None:
        """Hold the migration stream to a rate; None lifts the limit."""

    def close(self) -> None:
        """End the migration stream; work that has not begun is cancelled."""


class CpuMemory:
    """Anonymous pages: those that were never written take no memory."""

    returnable = True

    def __init__(self, size: int) -> None:
        # Private: shared anonymous pages stay where they are when they are given back.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(align(size, PAGE), PAGE), flags=flags)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def give_back(self, start: int, size: int) -> None:
        """Return whole pages to the system."""
        self._map.madvise(mmap.MADV_DONTNEED, start, size)


class CpuEvent:
    """An event of a CpuStream, or one that ended before it was made."""

    def __init__(self, ended: bool = False) -> None:
        self.error: BaseException | None = None
        self.cancelled = False
        self._ended = threading.Event()
        if ended:
            self._ended.set()

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it has."""
        self._ended.wait()

    def cancel(self) -> None:
        """End the work at its next chunk."""
        self.cancelled = True

    def end(self, error: BaseException | None) -> None:
        """Say that the work has ended."""
        self.error = error
        self._ended.set()


class Pace:
    """Holds a stream to bytes a second: work waits before each chunk until the chunks before it are paid for."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self.moved = 0
        self.closing = threading.Event()
        self._due = 0.0

    def charge(self, size: int) -> None:
        """Let the next chunk wait as if `size` bytes more had gone."""
        if self.rate is not None and size > 0:
            self._due = max(self._due, time.monotonic()) + size / self.rate

    def __call__(self, size: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until `size` bytes may go, or until `stop`. Idle time saves nothing up."""
        self.moved += size
        rate, now = self.rate, time.monotonic()
        if rate is None:
            return
        until, self._due = self._due, max(self._due, now) + size / rate
        while (wait := until - time.monotonic()) > 0 and not (stop() or self.closing.wait(min(wait, 0.05))):
            pass


class CpuStream:
    """A thread that does one piece of work after another, in the order they were given."""

    def __init__(self, name: str, on_event: Callable[[], None]) -> None:
        """`on_event` is called on the thread after each piece of work."""
        self._on_event = on_event
        self._work: queue.SimpleQueue[tuple[CpuEvent, Callable[[CpuEvent], None]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[CpuEvent], None]) -> CpuEvent:
        """Queue work; it is given its own event, to see whether it is still wanted."""
        event = CpuEvent()
        self._work.put((event, work))
        return event

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            event, work = item
            error: BaseException | None = None
            try:
                if event.cancelled or self._closed:
                    raise Cancelled
                work(event)
            except BaseException as caught:
                error = caught
            event.end(error)
            self._on_event()
            del item, event, work

    def close(self) -> None:
        """Cancel what has not begun and wait for what has."""
        self._closed = True
        self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class CpuDevice:
    """The CPU: reads go straight into the block, the lossless version is decoded into it from a staging buffer.

    Attributes:
        staging_bytes: of the staging buffer, which is a part of what the device takes beside the experts.
    """

    def __init__(self, staging_bytes: int, on_event: Callable[[], None] = lambda: None) -> None:
        """`on_event` is called on the stream's thread after each fetch has ended."""
        self.staging_bytes = align(max(staging_bytes, PAGE), PAGE)
        self._staging: Bytes = CpuMemory(self.staging_bytes).tensor.numpy()
        self._pace = Pace()
        self._stream = CpuStream("moepack-migration", on_event)
        self._now = CpuEvent(ended=True)

    def memory(self, size: int) -> Memory:
        """Anonymous pages."""
        return CpuMemory(size)

    def fetch(self, source: Stored, target: Tensor, layer: ExpertLayer, version: Version) -> CpuEvent:
        """Read an extent into a block, and decode it where it is lossless."""

        def work(event: CpuEvent) -> None:
            def before(size: int) -> None:
                self._pace(size, lambda: event.cancelled)
                if event.cancelled or self._pace.closing.is_set():
                    raise Cancelled

            self._pace.charge(FLOOR - source.size)
            block: Bytes = target.numpy()
            if version.is_lossless:
                self._decode(source, block, layer, version, before)
            else:
                source.read_into(block, before)

        return self._stream.submit(work)

    def _decode(
        self, source: Stored, block: Bytes, layer: ExpertLayer, version: Version, before: Callable[[int], None]
    ) -> None:
        """A lossless extent: read in chunks, then decoded on this one thread."""
        source.read_into(self._staging, before)
        try:
            parts = directory(layer.matrices, self._staging[: source.size])
            for m, form, (coded, bias) in zip(layer.matrices, _forms(layer.matrices, version), parts, strict=True):
                before(0)
                decode_into(coded, block[form.low : form.low + 2 * m.weights].view(np.uint16), threads=1)
                if bias is not None:
                    block[form.bias : form.bias + 2 * m.rows].view(np.uint16)[:] = bias
        except CodecError as error:
            raise BundleError.single(source.where, "codec", str(error)) from None

    def mark(self) -> CpuEvent:
        """Compute on a CPU has ended when the call that did it returns."""
        return self._now

    def limit(self, bytes_per_second: float | None) -> None:
        """Hold reads to a rate of stored bytes."""
        self._pace.rate = bytes_per_second

    @property
    def moved(self) -> int:
        """Stored bytes read since the start."""
        return self._pace.moved

    def close(self) -> None:
        """End the stream's thread."""
        self._pace.closing.set()
        self._stream.close()
