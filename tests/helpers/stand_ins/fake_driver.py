"""The CUDA driver's virtual memory management on the host's memory: what is not mapped cannot be touched there either.

Functions take and return what cuda.bindings.driver's do, whose structures and enumerations they use. The driver's rules
are held to: sizes and addresses in whole pieces, no address mapped twice, nothing accessible before cuMemSetAccess, one
whole mapping unmapped at a time, and nothing unmapped that the device still reads or writes, which a GPU would answer
with an error that ends everything. Fresh memory holds garbage. A thread has no context but the one that it pushed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import Ranges, overlap

real = pytest.importorskip("cuda.bindings.driver", reason="torch brought no cuda-bindings")

_NONE, _BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE
_ANONYMOUS, _FIXED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
OK, INVALID, FULL, CONTEXT = (
    real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_INVALID_VALUE, real.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
    real.CUresult.CUDA_ERROR_INVALID_CONTEXT,
)  # fmt: skip


class FakeBindings:
    """Stands where the module does: `fails(name)` gives an error to answer with."""

    def __init__(
        self,
        granularity: int = 4096,
        capacity: int = 1 << 40,
        busy: Callable[[], Ranges] = list,
        fails: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self.granularity, self.capacity, self.busy, self.fails = granularity, capacity, busy, fails
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, tuple[int, int]] = {}  # file, bytes
        self.released: dict[int, tuple[int, int]] = {}  # mapped still
        self.mapped: dict[int, tuple[int, int]] = {}  # bytes, handle, by address
        self.open: set[int] = set()  # mappings with access
        self.wrong: list[str] = []
        self.calls: list[str] = []
        self.most = self._made = 0
        self._threads = threading.local()

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cuMem") or getattr(self._threads, "contexts", None):
            return found
        return lambda *_: self._refuse(name, "on a thread without a context", CONTEXT)

    def cuDeviceGet(self, number: int) -> tuple[Any, ...]:
        return OK, real.CUdevice(number)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        return OK, real.CUcontext(1 + int(device))

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self._threads.contexts = [*getattr(self._threads, "contexts", []), context]
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return OK, self._threads.contexts.pop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AttributeError(name)
        return getattr(real, name)

    @property
    def held(self) -> int:
        """Bytes of device memory."""
        return sum(size for _, size in (*self.handles.values(), *self.released.values()))

    def _refuse(self, name: str, why: str = "", code: Any = INVALID) -> tuple[Any, ...]:
        if why:
            self.wrong.append(f"{name}: {why}")
        return (code, None)

    def _fails(self, name: str) -> Any:
        self.calls.append(name)
        return self.fails(name)

    def _whole(self, *numbers: int) -> bool:
        return all(n % self.granularity == 0 for n in numbers)

    def cuMemGetAllocationGranularity(self, kind: Any, option: Any) -> tuple[Any, ...]:
        assert kind.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and kind.location.id == 0
        assert kind.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        return OK, self.granularity

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        if code := self._fails("reserve"):
            return self._refuse("reserve", code=code)
        if not size or not self._whole(size) or flags:
            return self._refuse("reserve", f"{size} bytes")
        at = _libc.mmap(None, size, _NONE, _ANONYMOUS, -1, 0)
        self.reserved[at] = size
        return OK, real.CUdeviceptr(at)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if self.reserved.get(address) != size or self._inside(address, size):
            return self._refuse("free", "not what was reserved, or something is mapped there")
        del self.reserved[address]
        _libc.munmap(address, size)
        return (OK,)

    def cuMemCreate(self, size: int, kind: Any, flags: int) -> tuple[Any, ...]:
        if code := self._fails("create"):
            return self._refuse("create", code=code)
        if not size or not self._whole(size):
            return self._refuse("create", f"{size} bytes")
        if self.held + size > self.capacity:
            return self._refuse("create", code=FULL)
        file = os.memfd_create("fake-driver")
        os.write(file, b"\xa5" * size)
        self._made += 1
        self.handles[self._made] = file, size
        self.most = max(self.most, self.held)
        return OK, real.CUmemGenericAllocationHandle(self._made)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if handle not in self.handles:
            return self._refuse("release", "no such handle, or released before")
        self.released[handle] = self.handles.pop(handle)
        self._free(handle)
        return (OK,)

    def _free(self, handle: int) -> None:
        if handle in self.released and all(other != handle for _, other in self.mapped.values()):
            os.close(self.released.pop(handle)[0])

    def _inside(self, address: int, size: int) -> list[int]:
        return [at for at, (n, _) in self.mapped.items() if at < address + size and address < at + n]

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if code := self._fails("map"):
            return self._refuse("map", code=code)
        if handle not in self.handles or self.handles[handle][1] != size or offset or flags or not self._whole(address):
            return self._refuse("map", "not all of a handle's memory, in whole pieces")
        if not any(at <= address and address + size <= at + n for at, n in self.reserved.items()):
            return self._refuse("map", "addresses that were not reserved")
        if self._inside(address, size):
            return self._refuse("map", "addresses that are mapped")
        if any(other == handle for _, other in self.mapped.values()):
            self.wrong.append("map: a block at two addresses")
        assert _libc.mmap(address, size, _NONE, mmap.MAP_SHARED | _FIXED, self.handles[handle][0], 0) == address
        self.mapped[address] = size, handle
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        if code := self._fails("allow"):
            return self._refuse("allow", code=code)
        assert count == len(access) == 1 and access[0].location.id == 0
        assert access[0].flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if address not in self.mapped or self.mapped[address][0] != size:
            return self._refuse("allow", "not a whole mapping")
        _libc.mprotect(address, size, _BOTH)
        self.open.add(address)
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        self._fails("unmap")
        if address not in self.mapped or self.mapped[address][0] != size:
            return self._refuse("unmap")
        if overlap([(address, size)], self.busy()):
            self.wrong.append("unmap: the device still reads or writes there")
        _libc.mmap(address, size, _NONE, _ANONYMOUS | _FIXED, -1, 0)
        _, handle = self.mapped.pop(address)
        self.open.discard(address)
        self._free(handle)
        return (OK,)

    def may_touch(self, ranges: Ranges) -> bool:
        """Whether every byte stands on a mapping with access."""
        for address, size in ranges:
            at, end = address, address + size
            while at < end:
                mapped = [(a, a + size) for a, (size, _) in tuple(self.mapped.items()) if a in self.open]
                stands = [b for a, b in mapped if a <= at < b]
                if not stands:
                    return False
                at = stands[0]
        return True

    def leaks(self) -> list[str]:
        """What was not given back."""
        return [
            *(f"handle {n}" for n in (*self.handles, *self.released)),
            *(f"mapping at {at:#x}" for at in self.mapped),
            *(f"addresses at {at:#x}" for at in self.reserved),
        ]
