"""The interface of a device: memory that is allocated while loading, a migration stream, and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.store.files import Stored
from moepack.runtime.store.loading import Fetch


class Memory:
    """A range of device memory. The methods are called only if `returnable`."""

    returnable = False  # whether parts of the range can be given back; otherwise all of it is taken from the start

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # all of it, uint8 [bytes], beginning on a page

    def at(self, start: int, size: int) -> Tensor:
        """Return these bytes, which are taken, uint8 [size]."""
        return self.tensor[start : start + size]

    def take(self, start: int, size: int) -> None:
        """Take these bytes before they are written. If memory is short, take nothing and raise MemoryError."""

    def give_back(self, start: int, size: int) -> None:
        """Give taken bytes back; their contents are lost."""

    def filled(self, start: int, size: int) -> None:
        """Note that these taken bytes have been written. Memory that is pinned only now may move: call `at` again."""


class Completion(Fetch, Protocol):
    """The end of some work on a stream. The forward pass waits for it only under a policy that may block."""

    cancelled: bool  # whether the work is no longer wanted

    def done(self) -> bool:
        """Return whether the work has ended, with or without success. Never waits."""


class Device(Protocol):
    """A device: its memory, a migration stream (for copies) beside the compute stream, and events on both."""

    @property
    def moved(self) -> int:
        """Bytes copied since the start: stored ones, or those of pinned host memory."""

    def memory(self, size: int) -> Memory:
        """Allocate `size` bytes. Called only while a model is loaded."""

    def host_memory(self, size: int) -> Memory:
        """Allocate `size` bytes of host memory, for experts that the host runs."""

    def pinned_memory(self, block: int, blocks: int) -> Memory:
        """Allocate `blocks` blocks of host memory that this device's kernels may read once all have been filled.

        Each has `block` bytes.

        Raises InputError where the system does not allow it.
        """

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
        """Copy an extent into the block `target` on the migration stream; decode a lossless extent unless `packed`.

        `here` are the bytes that `target` is to have, if they are in this device's pinned memory: they are copied.
        `coded` are an entropy-coded extent's bytes, if they are in a CPU's memory: they are decoded from there.

        `find` locates the extent. It is called on the migration stream because it may open a file. The returned event
        ends without an error only after every byte of the block is in place and the digest was checked.
        """

    def mark(self) -> Completion:
        """Return an event that ends when the compute issued so far has ended."""

    def limit(self, bytes_per_second: float | None, least: int = ..., hurried: Callable[[], bool] = ...) -> None:
        """Limit the migration stream's rate; `None` removes the limit. A copy counts as at least `least` bytes.

        Nothing is limited while `hurried` returns True.
        """

    def free(self) -> None:
        """Free and unpin the memory that the device's kernels read, once no step can read it. May be called twice."""

    def rest(self) -> None:
        """Wait until all copies that were asked for so far have ended."""

    def serve(self) -> None:
        """Begin background work. Called once the model is loaded."""

    def host(self) -> dict[str, object]:
        """Return how extents are kept on the host, ready for JSON. The key `mode` is always present."""

    def close(self, wait: bool = True) -> None:
        """End the migration stream, and wait for its thread if `wait`; work that has not begun is cancelled."""
