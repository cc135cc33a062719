"""The calls that a CUDA device makes to torch: memory; streams for copies and decoding; events.

The module is small, so that tests can replace it on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU."""
    return device.type == "cuda"


class TorchGpu:
    """One GPU. `copy`, `decode`, `record` and `wait` use the current stream, which the contexts `migrating`,
    `decoding` and `computing` choose."""

    def __init__(self, device: torch.device) -> None:
        """Prepare streams on `device`; a device without an index means the current one."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._copies = torch.cuda.Stream(self.device)
        self._decoder = torch.cuda.Stream(self.device)

    def memory(self, size: int) -> Tensor:
        """Allocate device memory, uint8 [size]; called while loading."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def block(self, size: int) -> Tensor:
        """Allocate device memory that `free` gives back, uint8 [size]."""
        return self.memory(size)

    def free(self, block: Tensor) -> None:
        """Give a block back to torch's allocator, whoever has a view of it. The device must have stopped using it."""
        block.untyped_storage().resize_(0)

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

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Use the device, and the thread's own compute stream, inside the context."""
        return torch.cuda.device(self.device)

    def wait(self, event: torch.cuda.Event) -> None:
        """Make later work on the current stream wait for an event; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Issue one copy from or to pinned memory, or on the device. With other memory the call would wait."""
        to.copy_(source, non_blocking=True)

    def decode(self, jobs: Sequence[Any]) -> Tensor:
        """Decode coded matrices in one launch (`exponent_triton.decode`)."""
        from moepack.runtime.kernels.exponent_triton import decode

        return decode(jobs)

    def record(self) -> torch.cuda.Event:
        """Record an event on the current stream, by default the calling thread's compute stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event
