"""The CUDA driver's calls on virtual memory, through the bindings that torch's CUDA wheels install (cuda-bindings).

cuMemAddressReserve reserves addresses, cuMemCreate makes memory, cuMemMap and cuMemSetAccess map memory to addresses.
Every error is raised. This code has not run on a GPU yet: tests use bindings that enforce the driver's rules.
"""

from __future__ import annotations

from typing import Any

from moepack.pack.errors import InputError


class DriverError(MemoryError):
    """A failed call, with the driver's code: 1 is an invalid value, 2 out of memory."""


class Driver:
    """The calls for one device. Any thread may make them; a call that fails raises DriverError.

    Sizes and addresses are multiples of `granularity`. Calls do not wait for work on a stream: before `unmap`, wait for
    all work that reads or writes there.
    """

    def __init__(self, device: int, bindings: Any = None) -> None:
        """Prepare calls for the device with index `device`. `bindings` replaces cuda.bindings.driver in tests.

        Raises InputError where the bindings are not installed.
        """
        self._cuda = cuda = bindings or _bindings()
        # The device's context, which torch uses too and which this process keeps. A fresh thread has none, and torch's
        # guard gives it none where the device is 0 already: every call brings the context along.
        self._context = self._made("cuDevicePrimaryCtxRetain", self._made("cuDeviceGet", device))
        where = cuda.CUmemLocation()
        where.type, where.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
        self._kind = cuda.CUmemAllocationProp()
        self._kind.type, self._kind.location = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, where
        self._access = cuda.CUmemAccessDesc()
        self._access.location = where
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _made(self, name: str, *arguments: Any) -> Any:
        code, *out = getattr(self._cuda, name)(*arguments)
        if int(code):
            raise DriverError(f"{name}: error {int(code)} ({getattr(code, 'name', 'unknown')})")
        return out[0] if out else 0

    def _call(self, name: str, *arguments: Any) -> int:
        self._made("cuCtxPushCurrent", self._context)
        try:
            return int(self._made(name, *arguments))
        finally:
            self._cuda.cuCtxPopCurrent()

    def granularity(self) -> int:
        """Return the bytes of the smallest unit of device memory: 2 MiB on GPUs so far."""
        least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return self._call("cuMemGetAllocationGranularity", self._kind, least)

    def reserve(self, size: int) -> int:
        """Reserve addresses without memory; returns the first."""
        return self._call("cuMemAddressReserve", size, 0, 0, 0)

    def unreserve(self, address: int, size: int) -> None:
        """Release all addresses of one `reserve`, once nothing is mapped there."""
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        """Make device memory without an address; returns its handle."""
        return self._call("cuMemCreate", size, self._kind, 0)

    def release(self, handle: int) -> None:
        """Release memory that is mapped nowhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        """Map all memory of a handle to an address; it is accessible only after `allow`."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int) -> None:
        """Let the device read and write the memory mapped at these addresses."""
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`: address and size must be those of that call."""
        self._call("cuMemUnmap", address, size)


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise InputError(
            "the policy paged maps GPU memory through cuda-bindings, which is not installed: pip install cuda-bindings"
        ) from None
    return driver
