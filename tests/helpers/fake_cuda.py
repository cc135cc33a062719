"""A CUDA runtime and a GPU that are not there: every call is written down, any can be made to fail.

Work on the stream is done as late as it may be, when an event after it is found to have ended: a buffer that is used
again too early is then seen in the bytes. What is copied from must be pinned when the copy is carried out.
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

from moepack.pack import exponent_fast

REGISTERS, READS_ONLY = 99, 113
ERRORS = {2: "out of memory", 801: "operation not supported"}


class Function:
    """What ctypes makes of a library's symbol: it can be called, and told its types."""

    def __init__(self, name: str, work: Callable[..., Any]) -> None:
        self.name, self.work = name, work
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes), f"{self.name}: {arguments}"
        return self.work(*arguments)


class FakeCudart:
    """The library: `fails(name, size, flags)` gives an error code, or 0."""

    def __init__(
        self, attributes: dict[int, int] | None = None, fails: Callable[[str, int, int], int] = lambda *_: 0
    ) -> None:
        self.attributes = attributes if attributes is not None else {REGISTERS: 1, READS_ONLY: 1}
        self.fails = fails
        self.calls: list[tuple[Any, ...]] = []
        self.sticky = 0
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, Any] = {}
        self.seen: list[bytes] = []  # what stood in memory when it was registered
        for name in ("DeviceGetAttribute", "HostRegister", "HostUnregister", "HostAlloc", "FreeHost", "GetLastError"):
            setattr(self, f"cuda{name}", Function(name, getattr(self, f"_{name}")))
        self.cudaGetErrorString = Function("GetErrorString", lambda code: ERRORS[code].encode())

    def _did(self, name: str, size: int = 0, flags: int = 0) -> int:
        self.calls.append((name, size, flags))
        code = self.fails(name, size, flags)
        self.sticky = code or self.sticky
        return code

    def _DeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        value._obj.value = self.attributes[number]
        return 0

    def _HostRegister(self, address: int, size: int, flags: int) -> int:
        code = self._did("register", size, flags)
        if not code:
            self.registered[address] = size
            self.seen.append(ctypes.string_at(address, size))
        return code

    def _HostUnregister(self, address: int) -> int:
        del self.registered[address]
        return self._did("unregister")

    def _HostAlloc(self, address: Any, size: int, flags: int) -> int:
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

    def __init__(self, gpu: FakeGpu, stream: str, issued: int) -> None:
        self._gpu, self._stream, self._issued, self._left = gpu, stream, issued, gpu.patience

    def query(self) -> bool:
        if self._gpu.broken:
            raise RuntimeError("the device is lost")
        self._left -= 1
        if self._left > 0:
            return False
        self._gpu.carry_out(self._stream, self._issued)
        return True

    def synchronize(self) -> None:
        self._left = 0
        self.query()


class FakeGpu:
    """A GPU whose memory is the host's, with two streams that know of each other only by waiting."""

    def __init__(self, cuda: FakeCudart, patience: int = 3) -> None:
        self.cuda, self.patience, self.broken = cuda, patience, False
        self.log: list[str] = []
        self.wrong: list[str] = []
        self.own: list[tuple[int, int]] = []  # pinned by torch, or on the device
        self._work: dict[str, list[Callable[[], None]]] = {"copies": [], "decoder": [], "compute": []}
        self._done = dict.fromkeys(self._work, 0)
        self._stream = threading.local()

    def memory(self, size: int) -> Tensor:
        made = torch.zeros(size + 64, dtype=torch.uint8)
        made = made[-made.data_ptr() % 64 :][:size]
        self.own.append((made.data_ptr(), size))
        return made

    pinned = memory

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        if self.cuda.sticky:
            self.wrong.append(f"an error was left set: {self.cuda.sticky}")
        self._stream.name = stream
        yield
        self._stream.name = None

    def migrating(self) -> contextlib.AbstractContextManager[None]:
        return self._on("copies")

    def decoding(self) -> contextlib.AbstractContextManager[None]:
        issued = len(self._work["copies"])
        self._work["decoder"].append(lambda: self.carry_out("copies", issued))
        return self._on("decoder")

    def _issue(self, name: str, work: Callable[[], None]) -> None:
        stream = getattr(self._stream, "name", None)
        if stream is None:
            self.wrong.append(f"{name} on no stream of its own")
            return
        self.log.append(name)
        self._work[stream].append(work)

    def copy(self, to: Tensor, source: Tensor) -> None:
        if to.numel() != source.numel() or to.dtype != source.dtype:
            self.wrong.append("a copy of other sizes")

        def work() -> None:
            start, size = source.data_ptr(), source.numel() * source.element_size()
            if not self.cuda.is_pinned(start, size) and not any(a <= start < a + n for a, n in self.own):
                self.wrong.append("copied from memory that is not pinned")
            to.copy_(source)

        self._issue("copy", work)

    def decode(self, jobs: list[Any]) -> Tensor:
        if getattr(self._stream, "name", None) != "decoder":
            self.wrong.append("decoded beside no copy")
        status = torch.zeros(len(jobs), dtype=torch.int32)
        self.own.append((status.data_ptr(), status.nbytes))

        def work() -> None:
            for i, job in enumerate(jobs):
                try:
                    out = job.out.view(torch.int16).numpy().view(np.uint16)
                    exponent_fast.decode_into(job.coded.numpy(), out)
                except Exception:
                    status[i] = 1

        self._issue("decode", work)
        return status

    def record(self) -> FakeEvent:
        stream = self._stream.name
        return FakeEvent(self, stream, len(self._work[stream]))

    def mark(self) -> FakeEvent:
        return FakeEvent(self, "compute", 0)

    def carry_out(self, stream: str, issued: int) -> None:
        work = self._work[stream]
        while self._done[stream] < issued:
            at = self._done[stream]
            self._done[stream] += 1
            work[at]()
            work[at] = lambda: None

    @property
    def idle(self) -> bool:
        return all(self._done[name] == len(work) for name, work in self._work.items())
