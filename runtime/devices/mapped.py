"""Device memory that is mapped and unmapped under fixed addresses, for pools of paged experts.

The driver maps pieces of 2 MiB. Several blocks may share a piece, which stays mapped while any of them is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import align

from .contract import Memory
from .driver import Driver, DriverError

TensorAt = Callable[[int, int], Tensor]  # from an address and a size to a tensor, uint8 [size]


def reserve(calls: Driver, tensor_at: TensorAt, size: int, granule: int) -> tuple[int, Tensor]:
    """Reserve `size` addresses without memory; return the first, and a tensor over all of them.

    Raises InputError if the driver refuses, or cannot map memory in units of `granule` bytes.
    """
    least = calls.granularity()
    if granule % least:
        raise InputError(f"this GPU hands memory out by {least} bytes, and experts are paged by {granule}")
    try:
        at = calls.reserve(size)
    except DriverError as error:
        raise InputError(f"{size} bytes of addresses cannot be reserved for experts: {error}") from None
    return at, tensor_at(at, size)


class MappedMemory(Memory):
    """A reserved range of addresses; a piece has memory while bytes on it are taken. The lock of its pool guards it."""

    returnable = True

    def __init__(self, size: int, calls: Driver, tensor_at: TensorAt, granule: int) -> None:
        """Reserve addresses without memory. Raises InputError if `reserve` does."""
        self._calls, self._granule = calls, granule
        self._size = max(align(size, granule), granule)
        self._at, tensor = reserve(calls, tensor_at, self._size, granule)
        super().__init__(tensor)
        self._handles: dict[int, int] = {}
        self._users: dict[int, int] = {}

    def _pieces(self, start: int, size: int) -> range:
        return range(start // self._granule, -(-(start + size) // self._granule))

    def cost(self, start: int, size: int) -> int:
        """Return the device bytes that `take` would use now."""
        return self._granule * sum(i not in self._handles for i in self._pieces(start, size))

    def take(self, start: int, size: int) -> None:
        """Put device memory behind this range, until `give_back`."""
        with contextlib.ExitStack() as undo:
            for i in self._pieces(start, size):
                if i not in self._handles:
                    self._make(i)
                    undo.callback(self._drop, i)
            undo.pop_all()
        for i in self._pieces(start, size):
            self._users[i] = self._users.get(i, 0) + 1

    def give_back(self, start: int, size: int) -> int:
        """Give back bytes that the device no longer uses; return how many were unmapped."""
        given = 0
        for i in self._pieces(start, size):
            self._users[i] -= 1
            if not self._users[i]:
                self._drop(i)
                given += self._granule
        return given

    def _make(self, i: int) -> None:
        at, size, calls = self._at + i * self._granule, self._granule, self._calls
        handle = calls.create(size)
        with contextlib.ExitStack() as undo:
            undo.callback(calls.release, handle)
            calls.map(at, size, handle)
            undo.callback(calls.unmap, at, size)
            calls.allow(at, size)
            undo.pop_all()
        self._handles[i] = handle

    def _drop(self, i: int) -> None:
        self._users.pop(i, None)
        handle = self._handles.pop(i)
        self._calls.unmap(self._at + i * self._granule, self._granule)
        self._calls.release(handle)

    def close(self) -> None:
        """Give everything back. The device must have stopped using it. May be called twice."""
        if not self._at:
            return
        for i in list(self._handles):
            with contextlib.suppress(DriverError):  # the device may be gone when the process ends
                self._drop(i)
        with contextlib.suppress(DriverError):
            self._calls.unreserve(self._at, self._size)
        self._at = 0
