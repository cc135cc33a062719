"""The CUDA driver's calls on virtual memory, through the bindings that torch's CUDA wheels bring (cuda-bindings).

Addresses are reserved, memory is made, and one is mapped to the other: cuMemAddressReserve, cuMemCreate, cuMemMap,
cuMemSetAccess, and what undoes them. Every error is raised. It has not run on a GPU yet: tests put bindings in place
that hold their callers to the driver's rules. Decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Protocol

from moepack.pack.errors import InputError


class DriverError(MemoryError):
    """A call that failed.

    Attributes:
        code: the driver's number: 1 is an invalid value, 2 out of memory.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: error {code} ({name})")
        self.code = code


class MappingCalls(Protocol):
    """What mapping needs of the driver. Every call may come from any thread, and raises DriverError.

    Sizes and addresses are multiples of `granularity`. None of the calls is ordered behind work on a stream: whoever
    unmaps has waited for all that reads or writes there.
    """

    def granularity(self) -> int:
        """Bytes that memory of this device comes in."""

    def reserve(self, size: int) -> int:
        """Addresses, without memory; returns the first."""

    def unreserve(self, address: int, size: int) -> None:
        """Give addresses back, all that one `reserve` gave, with nothing mapped there."""

    def create(self, size: int) -> int:
        """Memory of the device, without an address; returns its handle."""

    def release(self, handle: int) -> None:
        """Give memory back that is mapped nowhere."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Let all of a handle's memory stand at an address. Nobody may touch it before `allow`."""

    def allow(self, address: int, size: int) -> None:
        """Let the device read and write what is mapped there."""

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`, whole."""


class Driver:
    """`MappingCalls` of one device."""

    def __init__(self, device: int, bindings: Any = None) -> None:
        """`device` is its index; `bindings` stands in for cuda.bindings.driver in tests.

        Raises:
            InputError: where the bindings are not installed.
        """
        real = bindings is None
        self._cuda = cuda = _bindings() if bindings is None else bindings
        self._current: Any = contextlib.nullcontext
        if real:
            import torch

            self._current = functools.partial(torch.cuda.device, device)  # a thread may have no context yet
        where = cuda.CUmemLocation()
        where.type, where.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
        self._kind = cuda.CUmemAllocationProp()
        self._kind.type, self._kind.location = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, where
        self._access = cuda.CUmemAccessDesc()
        self._access.location = where
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._current():
            code, *out = getattr(self._cuda, name)(*arguments)
        if int(code):
            raise DriverError(name, int(code), getattr(code, "name", "unknown"))
        return int(out[0]) if out else None

    def granularity(self) -> int:
        """The least there is: 2 MiB on GPUs so far."""
        least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size: int = self._call("cuMemGetAllocationGranularity", self._kind, least)
        return size

    def reserve(self, size: int) -> int:
        """Addresses, wherever the driver has them."""
        address: int = self._call("cuMemAddressReserve", size, 0, 0, 0)
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Give addresses back."""
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        """Memory of the device, for this process alone."""
        handle: int = self._call("cuMemCreate", size, self._kind, 0)
        return handle

    def release(self, handle: int) -> None:
        """Give memory back."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        """From the memory's first byte: the driver takes no other offset."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int) -> None:
        """For this device."""
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        """Undo one mapping."""
        self._call("cuMemUnmap", address, size)


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise InputError(
            "the policy paged maps GPU memory through cuda-bindings, which is not installed: pip install cuda-bindings"
        ) from None
    return driver
