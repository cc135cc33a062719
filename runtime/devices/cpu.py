"""What the runtime needs of a device: memory set aside at once, a migration stream, events. And the CPU as one.

On the CPU a stream is a thread: copies run beside the forward pass, which releases the GIL as they do. Decides nothing
about what is copied, or when.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import BundleError, CodecError
from moepack.pack.exponent_fast import decode_into
from moepack.pack.lossless import directory
from moepack.pack.spec import PAGE, ExpertLayer, Version, align
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.residency.pools import Memory
from moepack.runtime.store.files import Stored

from .migration import FLOOR as FLOOR
from .migration import HostEvent, Migration

_forms = functools.lru_cache(maxsize=64)(make_forms)

Bytes = npt.NDArray[np.uint8]


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

    def serve(self) -> None:
        """Loading has ended: what fills host memory in the background may begin."""

    def host(self) -> dict[str, Any]:
        """How extents are kept on the host, ready for JSON; at the least `mode`."""

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


class CpuDevice(Migration):
    """The CPU: reads go straight into the block, the lossless version is decoded into it from a staging buffer.

    Attributes:
        staging_bytes: of the staging buffer, which is a part of what the device takes beside the experts.
    """

    def __init__(self, staging_bytes: int, on_event: Callable[[], None] = lambda: None) -> None:
        """`on_event` is called on the stream's thread after each fetch has ended."""
        super().__init__(on_event)
        self.staging_bytes = align(max(staging_bytes, PAGE), PAGE)
        self._staging: Bytes = CpuMemory(self.staging_bytes).tensor.numpy()
        self._now = HostEvent(ended=True)

    def memory(self, size: int) -> Memory:
        """Anonymous pages."""
        return CpuMemory(size)

    def fetch(self, source: Stored, target: Tensor, layer: ExpertLayer, version: Version) -> HostEvent:
        """Read an extent into a block, and decode it where it is lossless."""

        def work(event: HostEvent) -> None:
            before = self.gate(event, source.size)
            block: Bytes = target.numpy()
            if version.is_lossless:
                self._decode(source, block, layer, version, before)
            else:
                source.read_into(block, before)

        return self.stream.submit(work)

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

    def mark(self) -> HostEvent:
        """Compute on a CPU has ended when the call that did it returns."""
        return self._now

    def serve(self) -> None:
        """The page cache is the host's store: there is nothing to fill."""

    def host(self) -> dict[str, Any]:
        """Extents stay in files."""
        return {"mode": "files"}
