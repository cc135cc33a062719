"""Device memory that comes and goes under addresses that stay: what pools of packed experts are cut from.

A pool's blocks are smaller than what the driver hands out (2 MiB) or end inside it, so neighbours share: a piece is
there as long as any block on it is. Decides nothing about which blocks are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.spec import align

from .driver import DriverError, MappingCalls

TensorAt = Callable[[int, int], Tensor]  # address and bytes: uint8


def whole_pieces(calls: MappingCalls, granule: int) -> None:
    """See that memory can be had in pieces of `granule` bytes.

    Raises:
        InputError: on a GPU that has it in others.
    """
    least = calls.granularity()
    if granule % least:
        raise InputError(f"this GPU hands memory out by {least} bytes, and experts are paged by {granule}")


class MappedMemory:
    """A reserved range whose pieces have memory while somebody has taken bytes on them.

    Not for two threads at once: a pool holds its lock.
    """

    returnable = True

    def __init__(self, size: int, calls: MappingCalls, tensor_at: TensorAt, granule: int) -> None:
        """Reserve addresses; no memory is taken.

        Raises:
            InputError: where the driver does not give them, or not such pieces.
        """
        whole_pieces(calls, granule)
        self._calls, self._granule = calls, granule
        self._size = max(align(size, granule), granule)
        try:
            self._at = calls.reserve(self._size)
        except DriverError as error:
            raise InputError(f"{size} bytes of addresses cannot be reserved: {error}") from None
        self.tensor = tensor_at(self._at, self._size)
        self._handles: dict[int, int] = {}
        self._users: dict[int, int] = {}

    def _pieces(self, start: int, size: int) -> range:
        return range(start // self._granule, -(-(start + size) // self._granule))

    def cost(self, start: int, size: int) -> int:
        """Bytes of the device that `take` would take now."""
        return self._granule * sum(i not in self._handles for i in self._pieces(start, size))

    def take(self, start: int, size: int) -> None:
        """Give these bytes memory; `give_back` undoes it.

        Raises:
            MemoryError: when the device has none; nothing is taken then.
        """
        made: list[int] = []
        try:
            for i in self._pieces(start, size):
                if i not in self._handles:
                    self._make(i)
                    made.append(i)
        except DriverError:
            for i in made:
                self._drop(i)
            raise
        for i in self._pieces(start, size):
            self._users[i] = self._users.get(i, 0) + 1

    def give_back(self, start: int, size: int) -> int:
        """Let these bytes go, which nothing on the device reads or writes any more; returns how many the device has
        back."""
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
        try:
            calls.map(at, size, handle)
        except DriverError:
            calls.release(handle)
            raise
        try:
            calls.allow(at, size)
        except DriverError:
            calls.unmap(at, size)
            calls.release(handle)
            raise
        self._handles[i] = handle

    def _drop(self, i: int) -> None:
        self._users.pop(i, None)
        handle = self._handles.pop(i)
        self._calls.unmap(self._at + i * self._granule, self._granule)
        self._calls.release(handle)

    def close(self) -> None:
        """Give everything back; nothing on the device may read or write it any more. May be called twice."""
        if not self._at:
            return
        for i in list(self._handles):
            with contextlib.suppress(DriverError):  # the process may be ending, and the device gone
                self._drop(i)
        with contextlib.suppress(DriverError):
            self._calls.unreserve(self._at, self._size)
        self._at = 0
