"""A CUDA runtime and a GPU that are not there: every call is written down, any can be made to fail.

Work on a stream is done as late as it may be, when an event after it is found to have ended: a buffer that is used
again too early is then seen in the bytes. What is copied from must be pinned when the copy is carried out. Compute is
done at once, as what is made is looked at at once; that it goes on reading until an event after it has ended is kept
as ranges, which nobody may write to or unmap.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.pack.codec import exponent_fast

REGISTERS, READS_ONLY = 99, 113
Ranges = list[tuple[int, int]]  # first address, bytes


def overlap(some: Ranges, others: Ranges) -> bool:
    return any(a < b + n and b < a + m for a, m in some for b, n in others)


ERRORS = {2: "out of memory", 713: "memory is not registered", 801: "operation not supported"}


class Function:
    """What ctypes makes of a library's symbol: it can be called, and told its types."""

    def __init__(self, name: str, work: Callable[..., Any]):
        self.name, self.work = name, work
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments):
        assert len(arguments) == len(self.argtypes), f"{self.name}: {arguments}"
        return self.work(*arguments)


class FakeCudart:
    """The library: `fails(name, size, flags)` gives an error code, or 0."""

    def __init__(self, attributes: dict[int, int] | None = None, fails: Callable[[str, int, int], int] = lambda *_: 0):
        self.attributes = attributes if attributes is not None else {REGISTERS: 1, READS_ONLY: 1}
        self.fails = fails
        self.calls: list[tuple[Any, ...]] = []
        self.sticky = 0
        self.registered: dict[int, int] = {}
        self.unpinned: Ranges = []  # what was registered once
        self.busy: Callable[[], Ranges] = list  # what the device reads or writes
        self.wrong: list[str] = []
        self.allocated: dict[int, Any] = {}
        self.seen: list[bytes] = []  # what stood in memory when it was registered
        self.elsewhere = 0  # added to the addresses at which the device finds registered memory
        for name in (
            "DeviceGetAttribute", "HostRegister", "HostUnregister", "HostGetDevicePointer", "HostAlloc", "FreeHost",
            "GetLastError",
        ):  # fmt: skip
            setattr(self, f"cuda{name}", Function(name, getattr(self, f"_{name}")))
        self.cudaGetErrorString = Function("GetErrorString", lambda code: ERRORS[code].encode())

    def _did(self, name: str, size: int = 0, flags: int = 0) -> int:
        self.calls.append((name, size, flags))
        code = self.fails(name, size, flags)
        self.sticky = code or self.sticky
        return code

    def _DeviceGetAttribute(self, value, number: int, device: int) -> int:
        value._obj.value = self.attributes[number]
        return 0

    def _HostRegister(self, address: int, size: int, flags: int) -> int:
        code = self._did("register", size, flags)
        if not code:
            self.registered[address] = size
            self.unpinned = [r for r in self.unpinned if not overlap([r], [(address, size)])]
            self.seen.append(ctypes.string_at(address, size))
        return code

    def _HostUnregister(self, address: int) -> int:
        if address not in self.registered:
            self.sticky = 713
            return 713
        self.unpinned.append((address, self.registered.pop(address)))
        if overlap(self.unpinned[-1:], self.busy()):
            self.wrong.append("unpinned while the device reads it")
        return self._did("unregister")

    def _HostGetDevicePointer(self, found, address: int, flags: int) -> int:
        registered = any(a <= address < a + n for a, n in list(self.registered.items()))
        found._obj.value = address + self.elsewhere * registered
        return 0

    def _HostAlloc(self, address, size: int, flags: int) -> int:
        code = self._did("allocate", size, flags)
        if not code:
            memory = np.zeros(size + 4096, np.uint8)
            address._obj.value = -(-memory.ctypes.data // 4096) * 4096
            self.allocated[address._obj.value] = (memory, size)
        return code

    def _FreeHost(self, address: int) -> int:
        del self.allocated[address]
        return self._did("free")

    def _GetLastError(self) -> int:
        self.calls.append(("clear", 0, 0))
        code, self.sticky = self.sticky, 0
        return code

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def is_pinned(self, start: int, size: int) -> bool:
        spans = list(self.registered.items()) + [(a, n) for a, (_, n) in list(self.allocated.items())]
        return any(a <= start and start + size <= a + n for a, n in spans)


class FakeEvent:
    """Ends after it was asked `patience` times; what was issued before it on its stream is then done."""

    def __init__(self, gpu: FakeGpu, stream: str, issued: int):
        self._gpu, self._stream, self._issued, self._left = gpu, stream, issued, gpu.patience

    def query(self) -> bool:
        if self._gpu.broken:
            raise RuntimeError("the device is lost")
        self._left -= 1
        if self._left > 0:
            return False
        self._gpu.carry_out(self._stream, self._issued)
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 0.001

    def synchronize(self):
        self._left = 0
        self.query()


class FakeGpu:
    """A GPU whose memory is the host's, with streams that know of each other only by waiting.

    Any thread may call it.
    """

    def __init__(self, cuda: FakeCudart, patience: int = 3, decodes_by: Callable[..., Any] | None = None):
        self.cuda, self.patience, self.broken = cuda, patience, False
        cuda.busy = self.busy
        self.log: list[str] = []
        self.wrong: list[str] = []
        self.own: list[tuple[int, int]] = []  # pinned by torch, or on the device
        self.blocks: dict[int, int] = {}  # of the latter, what is to be given back: bytes by address
        self.capacity, self.most = 1 << 40, 0  # of all blocks, and the most that there were
        streams = ("copies", "decoder", "load0", "load1", "compute")
        self._work: dict[str, list[tuple[Callable[[], None], Ranges]]] = {name: [] for name in streams}
        self._done = dict.fromkeys(self._work, 0)
        self.lock = threading.RLock()
        self.reading: dict[int, Ranges] = {}  # by the compute stream, until an event after it is found to have ended
        self.device = torch.device("cpu")
        self.decodes_by = decodes_by
        self._stream = threading.local()

    def memory(self, size: int) -> Tensor:
        made = torch.zeros(size + 64, dtype=torch.uint8)
        made = made[-made.data_ptr() % 64 :][:size]
        self.cuda.unpinned = [r for r in self.cuda.unpinned if not overlap([r], [(made.data_ptr(), size)])]
        self.own.append((made.data_ptr(), size))
        return made

    pinned = memory

    def block(self, size: int) -> Tensor:
        if sum(self.blocks.values()) + size > self.capacity:
            raise torch.OutOfMemoryError("out of memory")
        made = self.memory(size)
        self.blocks[made.data_ptr()] = size
        self.most = max(self.most, sum(self.blocks.values()))
        return made

    def free(self, block: Tensor):
        """Torch would give these bytes to whoever asks next, who writes to them."""
        if size := self.blocks.pop(block.data_ptr(), 0):
            given = block.data_ptr(), size
            if overlap([given], self.busy()):
                self.wrong.append("given back while it is read or written")
            self.own.remove(given)
            with torch.inference_mode():  # a pass may have taken it
                block.fill_(0xA5)

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        if self.cuda.sticky:
            self.wrong.append(f"an error was left set: {self.cuda.sticky}")
        before, self._stream.name = getattr(self._stream, "name", None), stream
        try:
            yield
        finally:
            self._stream.name = before

    def migrating(self) -> contextlib.AbstractContextManager[None]:
        return self._on("copies")

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        issued = len(self._work["copies"])
        self._work["decoder"].append((lambda: self.carry_out("copies", issued), []))
        return self._on("decoder")

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return self._on("compute")

    def _issue(self, name: str, work: Callable[[], None], *writes: Tensor):
        stream = getattr(self._stream, "name", None)
        if stream is None:
            self.wrong.append(f"{name} on no stream of its own")
            return
        ranges = [(t.data_ptr(), t.numel() * t.element_size()) for t in writes]
        with self.lock:
            self.log.append(name)
            self._work[stream].append((work, ranges))
            if stream == "compute":
                self._begin(ranges)
                work()
                self._work[stream][-1] = (lambda: None), ranges

    def wait(self, event: FakeEvent):
        with self.lock:
            if self._stream.name == "compute":
                self.carry_out(event._stream, event._issued)
            else:
                entry = (lambda: self.carry_out(event._stream, event._issued)), list[tuple[int, int]]()
                self._work[self._stream.name].append(entry)

    def launch(self, ranges: Ranges):
        """A kernel on the compute stream reads these; it goes on until an event after it has ended."""
        with self.lock:
            for stream, work in self._work.items():
                pending = [] if stream == "compute" else [r for _, more in work[self._done[stream] :] for r in more]
                if overlap(ranges, pending):
                    self.wrong.append("read before its load has ended")
            number = len(self._work["compute"])
            self.reading[number] = ranges
            kept = [(at, size, ctypes.string_at(at, size)) for at, size in ranges]

            def end():
                if any(ctypes.string_at(at, n) != bytes_ for at, n, bytes_ in kept):
                    self.wrong.append("written to while it is read")
                del self.reading[number]

            self._work["compute"].append((end, []))

    def _begin(self, ranges: Ranges):
        """Something is written."""
        if overlap(ranges, [r for own in self.reading.values() for r in own]):
            self.wrong.append("written to while it is read")

    def busy(self) -> Ranges:
        """What is read or will be written by what was issued and has not ended."""
        with self.lock:
            writes = [r for name, work in self._work.items() for _, more in work[self._done[name] :] for r in more]
            return writes + [r for own in self.reading.values() for r in own]

    def copy(self, to: Tensor, source: Tensor):
        if to.numel() != source.numel() or to.dtype != source.dtype:
            self.wrong.append("a copy of other sizes")

        def work():
            start, size = source.data_ptr(), source.numel() * source.element_size()
            if not self.cuda.is_pinned(start, size) and not any(a <= start < a + n for a, n in self.own):
                self.wrong.append("copied from memory that is not pinned")
            to.copy_(source)

        self._issue("copy", work, to)

    def decode(self, jobs: list[Any]) -> Tensor:
        if getattr(self._stream, "name", None) == "copies":
            self.wrong.append("decoded beside no copy")
        status = torch.zeros(len(jobs), dtype=torch.int32)
        self.own.append((status.data_ptr(), status.nbytes))

        def work():
            if self.decodes_by is not None:
                status.copy_(self.decodes_by(jobs))
                return
            for i, job in enumerate(jobs):
                try:
                    out = job.out.view(torch.int16).numpy().view(np.uint16)
                    exponent_fast.decode_into(job.coded.numpy(), out)
                except Exception:
                    status[i] = 1

        self._issue("decode", work, *(job.out for job in jobs))
        return status

    def record(self) -> FakeEvent:
        stream = getattr(self._stream, "name", None) or "compute"
        return FakeEvent(self, stream, len(self._work[stream]))

    def finish(self):
        with self.lock:
            for stream, work in self._work.items():
                self.carry_out(stream, len(work))

    def carry_out(self, stream: str, issued: int):
        with self.lock:
            work = self._work[stream]
            while self._done[stream] < issued:
                at = self._done[stream]
                do, ranges = work[at]
                if stream != "compute":
                    self._begin(ranges)
                self._done[stream] += 1
                do()
                work[at] = (lambda: None), []

    @property
    def idle(self) -> bool:
        return all(self._done[name] == len(work) for name, work in self._work.items())
