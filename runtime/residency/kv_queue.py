"""The queue of forward passes that wait for memory: first come, first served, but a blocked first pass is overtaken.

The queue takes no lock: callers hold one of their own. Only `wake` may be called without a lock, from anywhere.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class PassClaim:
    """The memory that a forward pass claims while it waits and runs."""

    cache: int | None  # id() of the KV cache that the pass was given; None if it makes one or has none
    size: int  # bytes of its KV cache after the pass
    beside: int  # bytes that the pass takes beside its cache: activations, outputs
    returned: int = 0  # the part of `beside` for outputs that the workload does not cover
    began: float | None = None  # when the pass began to wait, in perf_counter seconds
    first: float | None = None  # when the pass became the first in the queue
    thread: int = field(default_factory=threading.get_ident)
    _wakeups: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def wake(self) -> None:
        """Wake the pass to check again for room. Takes no lock, so a weak reference's callback may call it."""
        self._wakeups.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until `wake` is called, at most `seconds`."""
        with contextlib.suppress(queue.Empty):
            self._wakeups.get(timeout=seconds)
            while True:
                self._wakeups.get_nowait()


class PassQueue:
    """Passes that wait, in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: list[PassClaim] = []

    def enter(self, mine: PassClaim) -> bool:
        """Append a pass to the queue; return False if it was queued before."""
        if mine.began is not None:
            return False
        mine.began = time.perf_counter()
        self.waiting.append(mine)
        self._first()
        return True

    def leave(self, mine: PassClaim) -> None:
        """Remove a pass from the queue, if it is there, and wake the others."""
        if mine in self.waiting:
            self.waiting.remove(mine)
            self._first()
            self.wake()

    def _first(self) -> None:
        if self.waiting and self.waiting[0].first is None:
            self.waiting[0].first = time.perf_counter()

    def is_next(self, mine: PassClaim, blocked: Callable[[PassClaim], bool], patience: float) -> bool:
        """Return whether a pass is first, or may overtake a first pass that running passes and live caches block.

        Others overtake a blocked first pass for `patience` seconds. After that they wait, so that it can run.
        """
        if not self.waiting or self.waiting[0] is mine:
            return True
        first = self.waiting[0]
        assert first.first is not None
        return time.perf_counter() - first.first <= patience and blocked(first)

    def wake(self) -> None:
        """Wake all waiting passes to check again for room."""
        for one in tuple(self.waiting):
            one.wake()
