"""What a CUDA device needs of torch: memory, a stream for copies and one for decoding, events.

Small, so that tests can put a machine without a GPU in its place. Decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class GpuEvent(Protocol):
    """That what was issued before it has ended."""

    def query(self) -> bool:
        """Whether it has; raises what the device failed with."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Gpu(Protocol):
    """One device. `copy`, `decode`, `record` are called within `migrating` or `decoding`, on whose stream they are."""

    def memory(self, size: int) -> Tensor:
        """Device memory, uint8 [size]. Called while loading."""

    def pinned(self, size: int) -> Tensor:
        """Pinned host memory, uint8 [size], of torch's allocator. Called while loading."""

    def migrating(self) -> contextlib.AbstractContextManager[Any]:
        """The device and the stream for copies are the current ones inside."""

    def decoding(self) -> contextlib.AbstractContextManager[Any]:
        """The device and the stream for decoding are; that first waits, on the device, for the copies issued so far."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """One copy, from pinned memory, to it, or on the device; does not wait."""

    def decode(self, jobs: Sequence[Any]) -> Tensor:
        """exponent_triton.decode."""

    def record(self) -> GpuEvent:
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

    def copy(self, to: Tensor, source: Tensor) -> None:
        """cudaMemcpyAsync. From memory that is not pinned it would wait, and say nothing."""
        to.copy_(source, non_blocking=True)

    def decode(self, jobs: Sequence[Any]) -> Tensor:
        """Decode in one launch."""
        from moepack.runtime.kernels.exponent_triton import decode

        return decode(jobs)

    def record(self) -> GpuEvent:
        """An event."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark(self) -> GpuEvent:
        """An event on the compute stream: the one that is current where a forward pass runs."""
        return self.record()
