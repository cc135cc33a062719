"""Host memory that is pinned while it is taken, for experts that the host runs beside a GPU.

Pinned pages are not swapped out, and the device can copy from them. Where the system refuses to pin more, the rest is
ordinary memory, with one line in the log. It has not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from moepack.runtime.store.cudart import PORTABLE, CudaError, Cudart

from .cpu import CpuMemory

log = logging.getLogger("moepack.runtime")


class Refusal:
    """Whether pinning was refused for any memory of a device: it is logged once, and not tried again."""

    def __init__(self) -> None:
        self.is_known = False
        self._lock = threading.Lock()

    def note(self, error: CudaError) -> None:
        """Note a refusal."""
        with self._lock:
            if not self.is_known:
                self.is_known = True
                log.info("host memory: experts that the host runs are in ordinary memory from here on: %s", error)


class RegisteredMemory(CpuMemory):
    """Anonymous pages; each range is registered when it is taken. A pool's lock guards it.

    Attributes:
        pinned: registered bytes.
    """

    def __init__(self, size: int, calls: Cudart, refusal: Refusal) -> None:
        super().__init__(size)
        self.pinned = 0
        self._calls, self._refusal = calls, refusal
        self._registered: dict[int, int] = {}

    def take(self, start: int, size: int) -> None:
        """Pin these bytes before they are written."""
        super().take(start, size)
        if self._refusal.is_known:
            return
        try:
            self._calls.register(self.tensor.data_ptr() + start, size, PORTABLE)
        except CudaError as error:
            self._refusal.note(error)
            return
        self._registered[start] = size
        self.pinned += size

    def give_back(self, start: int, size: int) -> int:
        """Return whole pages to the system."""
        self._let_go(start)
        return super().give_back(start, size)

    def _let_go(self, start: int) -> None:
        if (size := self._registered.pop(start, None)) is not None:
            self.pinned -= size
            with contextlib.suppress(CudaError):  # the device may be gone
                self._calls.unregister(self.tensor.data_ptr() + start)

    def close(self) -> None:
        """Unpin everything; the memory stays. May be called twice."""
        for start in list(self._registered):
            self._let_go(start)
