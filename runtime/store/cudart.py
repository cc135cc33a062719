"""The CUDA runtime's calls on host memory, through the library that torch has loaded: registering, allocating, asking.

torch's own binding (torch.cuda.cudart()) has cudaHostRegister and cudaHostUnregister, but neither the call that clears
an error nor the one that asks a device for an attribute; its pinned allocator rounds up to a power of two. Every error
is raised and cleared: an error that stays set would be reported by the next kernel launch of this thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, Protocol

HOST_REGISTER_SUPPORTED = 99  # cudaDevAttrHostRegisterSupported
READ_ONLY_SUPPORTED = 113  # cudaDevAttrHostRegisterReadOnlySupported
PORTABLE = 1  # cudaHostRegisterPortable, cudaHostAllocPortable: pinned for every context, whichever thread asks
READ_ONLY = 8  # cudaHostRegisterReadOnly


class CudaError(RuntimeError):
    """A call that failed; its error has been cleared.

    Attributes:
        code: the runtime's number: 2 is out of memory, 801 not supported.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: error {code} ({text})")
        self.code = code


class HostCalls(Protocol):
    """What pinning needs of CUDA. Every call may come from any thread, and raises CudaError with nothing left set."""

    def attribute(self, number: int) -> int:
        """An attribute of the device."""

    def register(self, address: int, size: int, flags: int) -> None:
        """Pin pages that exist."""

    def unregister(self, address: int) -> None:
        """Let pages go that `register` pinned, by their first address."""

    def allocate(self, size: int) -> int:
        """Pinned memory of exactly this size; returns its address."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""


class Cudart:
    """`HostCalls` of one device."""

    def __init__(self, device: int, library: Any = None) -> None:
        """`device` is its index; `library` stands in for the CUDA runtime in tests.

        Raises:
            OSError: when torch has no CUDA runtime to share.
        """
        import torch

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
        # The current device is a thread's own, and registering makes a context on it where there is none. torch's guard
        # puts back what was current, without making a context there.
        with self._current():
            code = getattr(self._library, name)(*arguments)
            if code:
                self._library.cudaGetLastError()
        if code:
            raise CudaError(name, code, self._library.cudaGetErrorString(code).decode())

    def attribute(self, number: int) -> int:
        """An attribute of the device."""
        value = ctypes.c_int()
        self._call("cudaDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def register(self, address: int, size: int, flags: int) -> None:
        """Pin pages that exist. Takes long for gigabytes, and holds no interpreter lock."""
        self._call("cudaHostRegister", address, size, flags)

    def unregister(self, address: int) -> None:
        """Let pages go that `register` pinned."""
        self._call("cudaHostUnregister", address)

    def allocate(self, size: int) -> int:
        """Pinned memory of exactly this size."""
        address = ctypes.c_void_p()
        self._call("cudaHostAlloc", ctypes.byref(address), size, PORTABLE)
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        self._call("cudaFreeHost", address)


def _torchs_library() -> Any:
    """The CUDA runtime that torch has loaded: errors are kept by the library, and another copy would clear its own."""
    import torch

    if torch.version.cuda is None:
        raise OSError("this torch was built without CUDA")
    # Asked for by the name that torch was linked with, the loader hands out the copy that is there.
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
