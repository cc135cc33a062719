"""The CUDA runtime's calls on host memory, through the library that torch has loaded.

torch's own binding (torch.cuda.cudart()) has cudaHostRegister and cudaHostUnregister, but no calls that clear an error
or read a device's attribute. torch's pinned allocator rounds up to a power of two. Every error is raised and cleared:
the thread's next kernel launch would report an error that stays set.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

import torch

HOST_REGISTER_SUPPORTED = 99  # cudaDevAttrHostRegisterSupported
READ_ONLY_SUPPORTED = 113  # cudaDevAttrHostRegisterReadOnlySupported
PORTABLE = 1  # cudaHostRegisterPortable, cudaHostAllocPortable: pinned for every context
MAPPED = 2  # cudaHostRegisterMapped: the device's kernels may read it
READ_ONLY = 8  # cudaHostRegisterReadOnly


class CudaError(RuntimeError):
    """A failed call, whose error has been cleared. `code` is the runtime's: 2 is out of memory, 801 not supported."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: error {code} ({text})")
        self.code = code


class Cudart:
    """The calls for one device. Any thread may make them; a call that fails clears its error and raises CudaError."""

    def __init__(self, device: int, library: object = None) -> None:
        """Open the library for the device with index `device`. `library` replaces the runtime in tests.

        Raises OSError when torch has no CUDA runtime.
        """
        self._device = device
        self._library: Any = _torchs_library() if library is None else library
        real = library is None and torch.cuda.is_available()
        self._current = functools.partial(torch.cuda.device, device) if real else contextlib.nullcontext
        void = ctypes.c_void_p
        number = ctypes.c_int
        size = ctypes.c_size_t
        flags = ctypes.c_uint
        for name, arguments in (
            ("DeviceGetAttribute", [ctypes.POINTER(number), number, number]),
            ("HostRegister", [void, size, flags]),
            ("HostUnregister", [void]),
            ("HostGetDevicePointer", [ctypes.POINTER(void), void, flags]),
            ("HostAlloc", [ctypes.POINTER(void), size, flags]),
            ("FreeHost", [void]),
            ("GetLastError", []),
        ):
            found = self._named(name)
            found.argtypes = arguments
            found.restype = number
        self._named("GetErrorString").argtypes = [number]
        self._named("GetErrorString").restype = ctypes.c_char_p

    def _named(self, name: str) -> Any:
        return getattr(self._library, f"cuda{name}")

    def _call(self, name: str, *arguments: object) -> None:
        # Each thread has its own current device, and registering makes a context on it. torch's guard restores the
        # former device without making a context there.
        with self._current():
            code = self._named(name)(*arguments)
            if code:
                self._named("GetLastError")()
        if code:
            raise CudaError(f"cuda{name}", code, self._named("GetErrorString")(code).decode())

    def attribute(self, number: int) -> int:
        """Return the device's attribute with this number (cudaDevAttr...)."""
        value = ctypes.c_int()
        self._call("DeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def register(self, address: int, size: int, flags: int) -> None:
        """Pin existing pages. The call is slow for gigabytes, and releases the GIL."""
        self._call("HostRegister", address, size, flags)

    def unregister(self, address: int) -> None:
        """Unpin pages that `register` pinned, by their first address."""
        self._call("HostUnregister", address)

    def device_address(self, address: int) -> int:
        """Return the address at which the device's kernels find a pinned byte of the host."""
        found = ctypes.c_void_p()
        self._call("HostGetDevicePointer", ctypes.byref(found), address, 0)
        return int(found.value or 0)

    def allocate(self, size: int) -> int:
        """Allocate pinned memory of exactly this size; returns its address."""
        address = ctypes.c_void_p()
        self._call("HostAlloc", ctypes.byref(address), size, PORTABLE | MAPPED)
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned."""
        self._call("FreeHost", address)


def _torchs_library() -> ctypes.CDLL:
    """Return the copy of the CUDA runtime that torch uses; another copy could not clear errors that this one keeps."""
    if torch.version.cuda is None:
        raise OSError("this torch was built without CUDA")
    # For the name that torch was linked with, the loader returns the copy that is loaded already.
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
