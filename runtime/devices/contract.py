"""The interface of a device: memory that is allocated while loading, a migration stream, and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.store.files import Stored


class Memory:
    """A range of device memory. The methods are called only where parts of it are returnable."""

    returnable = False  # whether parts of it can be given back; otherwise all of it is taken from the start

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # all of it, uint8 [bytes], beginning on a page

    def cost(self, start: int, size: int) -> int:
        """Return the device's bytes that `take` would take; in memory of large pieces they may not be `size`."""
        return size

    def take(self, start: int, size: int) -> None:
        """Take these bytes before they are written. Raises MemoryError, and takes nothing, where there are none."""

    def give_back(self, start: int, size: int) -> int:
        """Give taken bytes back, and lose their contents. Returns the bytes that the device has back."""
        return size


class Completion(Protocol):
    """The end of some work on a stream."""

    error: BaseException | None  # why the ended work failed; None for success
    cancelled: bool  # whether the work is no longer wanted

    def done(self) -> bool:
        """Return whether the work has ended, with or without success. Never waits."""

    def wait(self) -> None:
        """Wait for the end. The forward pass never calls this under a policy that does not block."""

    def cancel(self) -> None:
        """Cancel the work: it ends early, or completes."""


class Device(Protocol):
    """Memory, one migration stream beside the compute stream, and events on both."""

    @property
    def moved(self) -> int:
        """Stored bytes copied since the start."""

    def memory(self, size: int) -> Memory:
        """Allocate `size` bytes. Called only while a model is loaded."""

    def host_memory(self, size: int) -> Memory:
        """Allocate `size` bytes of host memory, for experts that the host runs."""

    def fetch(
        self, find: Callable[[], Stored], target: Tensor, layer: ExpertLayer, version: Version, packed: bool = False
    ) -> Completion:
        """Copy an extent into a block on the migration stream; a lossless one is decoded there, unless `packed`.

        `find` locates the extent, on the migration stream, because it may open a file. The event ends without an error
        only after every byte of the block is in place and the digest was checked.
        """

    def mark(self) -> Completion:
        """Return an event that ends with the compute issued so far."""

    def limit(self, bytes_per_second: float | None, least: int = ...) -> None:
        """Limit the migration stream's rate; None: no limit. A copy counts as at least `least` bytes."""

    def serve(self) -> None:
        """Begin background work: loading has ended."""

    def host(self) -> dict[str, Any]:
        """Return how extents are kept on the host, ready for JSON; at least `mode`."""

    def close(self, wait: bool = True) -> None:
        """End the migration stream, and wait for it; work that has not begun is cancelled."""
