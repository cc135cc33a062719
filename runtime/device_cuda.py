"""A CUDA device for changing versions. It has not run on a GPU yet: only its types were checked.

A thread reads each extent into pinned memory, copies it on a stream of its own, decodes a lossless one there, and waits
for that stream: the compute stream and the forward pass's thread wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moepack.pack.errors import BundleError, CodecError
from moepack.pack.exponent import parse
from moepack.pack.lossless import directory
from moepack.pack.spec import PAGE, ExpertLayer, Version, align

from .device import Bytes, Cancelled, CpuEvent, CpuStream, Event, Pace
from .kernels.forms import make_forms
from .pools import Memory
from .store import Stored


class CudaMemory:
    """One allocation, made while loading; parts of it cannot be given back."""

    returnable = False

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.empty(max(align(size, PAGE), PAGE), dtype=torch.uint8, device=device)

    def give_back(self, start: int, size: int) -> None:
        """Never called: nothing is returnable."""


class ComputeMark:
    """That the compute issued before it has ended."""

    def __init__(self, device: torch.device) -> None:
        self.error: BaseException | None = None
        self.cancelled = False
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        """Whether it has."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait until it has."""
        self._event.synchronize()

    def cancel(self) -> None:
        """Compute is not cancelled."""


class CudaDevice:
    """A GPU: a pinned staging buffer on the host, one of the same size on the device, one migration stream."""

    def __init__(self, staging_bytes: int, device: torch.device, on_event: Callable[[], None] = lambda: None) -> None:
        """`staging_bytes` holds the largest extent that is ever fetched."""
        size = align(max(staging_bytes, PAGE), PAGE)
        self._device = device
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._staging = torch.empty(size, dtype=torch.uint8, device=device)
        self._migration = torch.cuda.Stream(device)
        self._pace = Pace()
        self._stream = CpuStream("moepack-migration", on_event)

    def memory(self, size: int) -> Memory:
        """Device memory, allocated at once."""
        return CudaMemory(size, self._device)

    def fetch(self, source: Stored, target: Tensor, layer: ExpertLayer, version: Version) -> Event:
        """Read into pinned memory, copy, decode a lossless extent on the device."""

        def work(event: CpuEvent) -> None:
            def before(size: int) -> None:
                self._pace(size, lambda: event.cancelled)
                if event.cancelled or self._pace.closing.is_set():
                    raise Cancelled

            host: Bytes = self._pinned.numpy()
            source.read_into(host, before)
            with torch.cuda.stream(self._migration):
                there = self._staging if version.is_lossless else target
                there[: source.size].copy_(self._pinned[: source.size], non_blocking=True)
                status = self._decode(source, host, target, layer, version) if version.is_lossless else None
            self._migration.synchronize()
            if status is not None and bool(status.any()):
                raise BundleError.single(source.where, "codec", "a matrix does not decode")

        return self._stream.submit(work)

    def _decode(self, source: Stored, host: Bytes, target: Tensor, layer: ExpertLayer, version: Version) -> Tensor:
        from .kernels.exponent_triton import Job, decode

        jobs = []
        try:
            parts = directory(layer.matrices, host[: source.size])
            for m, (coded, _) in zip(layer.matrices, parts, strict=True):
                parse(coded, m.weights)
        except CodecError as error:
            raise BundleError.single(source.where, "codec", str(error)) from None
        for m, form, (coded, bias) in zip(layer.matrices, make_forms(layer.matrices, version), parts, strict=True):
            at = coded.ctypes.data - host.ctypes.data
            out = target[form.low : form.low + 2 * m.weights].view(torch.bfloat16)
            jobs.append(Job(self._staging[at : at + len(coded)], coded[:48], out))
            if bias is not None:
                at = bias.ctypes.data - host.ctypes.data
                target[form.bias : form.bias + 2 * m.rows].copy_(self._staging[at : at + 2 * m.rows])
        try:
            return decode(jobs)
        except ValueError as error:
            raise BundleError.single(source.where, "codec", str(error)) from None

    def mark(self) -> Event:
        """An event on the compute stream."""
        return ComputeMark(self._device)

    def limit(self, bytes_per_second: float | None) -> None:
        """Hold reads to a rate of stored bytes."""
        self._pace.rate = bytes_per_second

    @property
    def moved(self) -> int:
        """Stored bytes read since the start."""
        return self._pace.moved

    def close(self) -> None:
        """End the stream's thread."""
        self._pace.closing.set()
        self._stream.close()
