"""The calls that a CUDA device makes to torch: memory; streams for copies, decoding and filling pages; events.

The module is small, so that tests can replace it on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

LOADS = 2  # streams that fill pages: one for gate and up projections, one for the others (fluxmoe, Algorithm 1)


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU."""
    return device.type == "cuda"


class TorchGpu:
    """One GPU. `copy`, `decode`, `record` and `wait` use the current stream, which the contexts `migrating`,
    `decoding`, `loading` and `computing` choose."""

    def __init__(self, device: torch.device) -> None:
        """Prepare streams on `device`; a device without an index means the current one."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._copies, self._decoder = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._loads = [torch.cuda.Stream(self.device) for _ in range(LOADS)]

    def memory(self, size: int) -> Tensor:
        """Allocate device memory, uint8 [size]; called while loading."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pinned(self, size: int) -> Tensor:
        """Allocate pinned host memory, uint8 [size]; called while loading."""
        with torch.cuda.device(self.device):  # elsewhere pinning makes a context on another GPU
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):  # a new thread's device is the first
            yield

    def migrating(self) -> contextlib.AbstractContextManager[None]:
        """Use the device and the stream for copies inside the context."""
        return self._on(self._copies)

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        """Use the stream for decoding inside the context; the stream waits for the copies issued so far."""
        self._decoder.wait_stream(self._copies)
        return self._on(self._decoder)

    def loading(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Use one of the streams that fill pages inside the context."""
        return self._on(self._loads[number])

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Use the device, and the thread's own compute stream, inside the context."""
        return torch.cuda.device(self.device)

    def wait(self, event: Any) -> None:
        """Make later work on the current stream wait for an event; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def over(self, address: int, size: int) -> Tensor:
        """Return a tensor, uint8 [size], over device addresses (`tensor_over`)."""
        return tensor_over(address, size, self.device)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Issue one copy from or to pinned memory, or on the device. With other memory the call would wait."""
        to.copy_(source, non_blocking=True)

    def decode(self, jobs: Sequence[Any]) -> Tensor:
        """Decode coded matrices in one launch (`exponent_triton.decode`)."""
        from moepack.runtime.kernels.exponent_triton import decode

        return decode(jobs)

    def record(self, timed: bool = False) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark(self) -> torch.cuda.Event:
        """Record an event on the calling thread's compute stream."""
        return self.record()


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h. The fields of its nested structures stand in a row, at the same offsets."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


_given: list[Any] = []  # kept: torch reads an entry when the last view of its tensor is freed


def tensor_over(address: int, size: int, device: torch.device) -> Tensor:
    """Return a tensor, uint8 [size], over addresses that may have no memory yet, made through DLPack.

    DLPack names the device. With `__cuda_array_interface__` torch asks the driver, which knows only mapped addresses.
    """
    kind = {"cpu": 1, "cuda": 2}[device.type]
    shape, strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
    managed = _Managed(address, kind, device.index or 0, 1, 1, 8, 1, shape, strides, 0, None, None)
    _given.append((managed, shape, strides))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    made: Tensor = torch.utils.dlpack.from_dlpack(make(ctypes.addressof(managed), b"dltensor", None))
    return made
