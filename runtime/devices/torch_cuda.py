"""What a CUDA device needs of torch: memory, streams for copies, for decoding and for filling pages, events.

Small, so that tests can put a machine without a GPU in its place. Decides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

LOADS = 2  # streams that fill pages: one for gate and up projections, one for the others (fluxmoe, Algorithm 1)


def is_gpu(device: torch.device) -> bool:
    """Whether experts on a device are a CUDA device's matter."""
    return device.type == "cuda"


class GpuEvent(Protocol):
    """That what was issued before it has ended."""

    def query(self) -> bool:
        """Whether it has; raises what the device failed with."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to another, both timed, once both have ended."""


class Gpu(Protocol):
    """One device. `copy`, `decode`, `record`, `wait` are called within `migrating`, `decoding`, `loading` or
    `computing`, on whose stream they are."""

    def memory(self, size: int) -> Tensor:
        """Device memory, uint8 [size]. Called while loading."""

    def pinned(self, size: int) -> Tensor:
        """Pinned host memory, uint8 [size], of torch's allocator. Called while loading."""

    def migrating(self) -> contextlib.AbstractContextManager[Any]:
        """The device and the stream for copies are the current ones inside."""

    def decoding(self) -> contextlib.AbstractContextManager[Any]:
        """The device and the stream for decoding are; that first waits, on the device, for the copies issued so far."""

    def loading(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """The device and one of the streams that fill pages are."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """The device is, and the calling thread's compute stream stays what it was."""

    def wait(self, event: Any) -> None:
        """What is issued to this stream from now on waits, on the device, for an event."""

    def over(self, address: int, size: int) -> Tensor:
        """uint8 [size] over device addresses, with memory or without. It keeps nothing alive."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """One copy, from pinned memory, to it, or on the device; does not wait."""

    def decode(self, jobs: Sequence[Any]) -> Tensor:
        """exponent_triton.decode."""

    def record(self, timed: bool = False) -> GpuEvent:
        """An event."""

    def mark(self) -> GpuEvent:
        """An event on the calling thread's compute stream."""


class TorchGpu:
    """The real one."""

    def __init__(self, device: torch.device) -> None:
        """`device` may lack an index: it is then the current one, and stays so whatever becomes current."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._copies, self._decoder = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._loads = [torch.cuda.Stream(self.device) for _ in range(LOADS)]

    def memory(self, size: int) -> Tensor:
        """Device memory."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pinned(self, size: int) -> Tensor:
        """Pinned host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def migrating(self) -> Any:
        """A thread's current device is its own, and the first one at its start: launches would go there."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
            yield

    @contextlib.contextmanager
    def decoding(self) -> Any:
        """The other stream, behind the copies that were issued."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._decoder):
            self._decoder.wait_stream(self._copies)
            yield

    @contextlib.contextmanager
    def loading(self, number: int) -> Any:
        """One of the streams that fill pages."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._loads[number]):
            yield

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """The stream that is current where a forward pass runs."""
        return torch.cuda.device(self.device)

    def wait(self, event: Any) -> None:
        """cudaStreamWaitEvent."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def over(self, address: int, size: int) -> Tensor:
        """See `tensor_over`."""
        return tensor_over(address, size, self.device)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """cudaMemcpyAsync. From memory that is not pinned it would wait, and say nothing."""
        to.copy_(source, non_blocking=True)

    def decode(self, jobs: Sequence[Any]) -> Tensor:
        """Decode in one launch."""
        from moepack.runtime.kernels.exponent_triton import decode

        return decode(jobs)

    def record(self, timed: bool = False) -> GpuEvent:
        """An event."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark(self) -> GpuEvent:
        """An event on the compute stream: the one that is current where a forward pass runs."""
        return self.record()


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Kind(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", _Device), ("dimensions", ctypes.c_int32), ("kind", _Kind),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_given: list[Any] = []  # torch looks at it once more when the last view of a tensor goes, whenever that is


def tensor_over(address: int, size: int, device: torch.device) -> Tensor:
    """uint8 [size] over addresses that may have no memory yet, by DLPack, which says what device they are of.

    A tensor made of `__cuda_array_interface__` asks the driver for that, which knows it of mapped addresses alone.
    """
    kind = {"cpu": 1, "cuda": 2}[device.type]
    shape, strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
    described = _Tensor(address, _Device(kind, device.index or 0), 1, _Kind(1, 8, 1), shape, strides, 0)
    managed = _Managed(described, None, None)
    _given.append((managed, shape, strides))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    made: Tensor = torch.utils.dlpack.from_dlpack(make(ctypes.addressof(managed), b"dltensor", None))
    return made
