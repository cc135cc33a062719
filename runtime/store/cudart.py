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
READ_ONLY = 8  # cudaHostRegisterReadOnly


class CudaError(RuntimeError):
    """A failed call, whose error has been cleared. `code` is the runtime's: 2 is out of memory, 801 not supported."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: error {code} ({text})")
        self.code = code


class Cudart:
    """The calls for one device. Any thread may make them; a call that fails clears its error and raises CudaError."""

    def __init__(self, device: int, library: Any = None) -> None:
        """Open the library for the device with index `device`. `library` replaces the CUDA runtime in tests.

        Raises OSError when torch has no CUDA runtime.
        """
        self._device = device
        self._library = library if library is not None else _torchs_library()
        real = library is None and torch.cuda.is_available()
        self._current = functools.partial(torch.cuda.device, device) if real else contextlib.nullcontext
        void, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        for name, arguments in (
            ("cudaDeviceGetAttribute", [ctypes.POINTER(number), number, number]),
            ("cudaHostRegister", [void, size, ctypes.c_uint]),
            ("cudaHostUnregister", [void]),
            ("cudaHostAlloc", [ctypes.POINTER(void), size, ctypes.c_uint]),
            ("cudaFreeHost", [void]),
            ("cudaGetLastError", []),
        ):
            getattr(self._library, name).argtypes = arguments
            getattr(self._library, name).restype = number
        self._library.cudaGetErrorString.argtypes = [number]
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        # Each thread has its own current device, and registering makes a context on it. torch's guard restores the
        # former device without making a context there.
        with self._current():
            code = getattr(self._library, name)(*arguments)
            if code:
                self._library.cudaGetLastError()
        if code:
            raise CudaError(name, code, self._library.cudaGetErrorString(code).decode())

    def attribute(self, number: int) -> int:
        """Return the device's attribute with this number (cudaDevAttr...)."""
        value = ctypes.c_int()
        self._call("cudaDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def register(self, address: int, size: int, flags: int) -> None:
        """Pin existing pages. The call is slow for gigabytes, and releases the GIL."""
        self._call("cudaHostRegister", address, size, flags)

    def unregister(self, address: int) -> None:
        """Unpin pages that `register` pinned, by their first address."""
        self._call("cudaHostUnregister", address)

    def allocate(self, size: int) -> int:
        """Allocate pinned memory of exactly this size; returns its address."""
        address = ctypes.c_void_p()
        self._call("cudaHostAlloc", ctypes.byref(address), size, PORTABLE)
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned."""
        self._call("cudaFreeHost", address)


def _torchs_library() -> Any:
    """Return the copy of the CUDA runtime that torch uses; another copy could not clear errors that this one keeps."""
    if torch.version.hip is not None:
        raise OSError("this torch is for ROCm, whose runtime pins memory by other calls")
    if torch.version.cuda is None:
        raise OSError("this torch was built without CUDA")
    # For the name that torch was linked with, the loader returns the copy that is loaded already.
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
