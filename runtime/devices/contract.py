"""What the runtime needs of a device: memory set aside at once, a migration stream, events.

Decides nothing about what is copied, or when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.store.files import Stored


class Memory(Protocol):
    """A range of device memory.

    Attributes:
        tensor: all of it, uint8 [bytes], beginning on a page.
        returnable: whether parts of it can be given back; where they cannot, all of it is taken from the start.
    """

    tensor: Tensor
    returnable: bool

    def cost(self, start: int, size: int) -> int:
        """Bytes of the device that `take` would take now: of memory in large pieces, more than `size` or fewer."""

    def take(self, start: int, size: int) -> None:
        """Before these bytes are written. Raises MemoryError where the device has none; nothing is taken then."""

    def give_back(self, start: int, size: int) -> int:
        """Let the device have what was taken, until it is again; contents are lost. Returns the bytes it has back."""


class Completion(Protocol):
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

    def host_memory(self, size: int) -> Memory:
        """The same of the host, for experts that the host runs."""

    def fetch(
        self, find: Callable[[], Stored], target: Tensor, layer: ExpertLayer, version: Version, packed: bool = False
    ) -> Completion:
        """Bring an extent into a block on the migration stream; a lossless one is decoded there, unless `packed`.

        `find` says where it stands, and is called there too: it may open a file, and nobody else is to wait for that.
        The event ends without an error only after every byte of the block is in place and the digest was checked.
        """

    def mark(self) -> Completion:
        """An event that ends when the compute that was issued until now has."""

    def limit(self, bytes_per_second: float | None, least: int = ...) -> None:
        """Hold the migration stream to a rate at which a copy counts as `least` bytes at the least; None lifts the
        limit."""

    def serve(self) -> None:
        """Loading has ended: what fills host memory in the background may begin."""

    def host(self) -> dict[str, Any]:
        """How extents are kept on the host, ready for JSON; at the least `mode`."""

    def close(self, wait: bool = True) -> None:
        """End the migration stream, and wait until it has; work that has not begun is cancelled."""
