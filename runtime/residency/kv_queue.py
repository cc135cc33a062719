"""The queue of forward passes that wait for room: first come, first served, except passes that cannot be served now.

It takes no lock. The caller holds its own, except for `wake`, which may be called anywhere.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class PassClaim:
    """A forward pass that runs, or waits."""

    cache: int | None  # the identity of the cache that it was given; None where it makes one or has none
    size: int  # bytes that its cache will have
    beside: int  # bytes that it takes beside
    returned: int = 0  # of those, bytes of outputs beyond the workload
    began: float | None = None  # when it began to wait
    first: float | None = None  # when it became the first in the queue
    _wakeups: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def wake(self) -> None:
        """Let the pass look again. Takes no lock, so a weak reference's callback may call it."""
        self._wakeups.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until `wake`, or for some seconds."""
        with contextlib.suppress(queue.Empty):
            self._wakeups.get(timeout=seconds)
            while True:
                self._wakeups.get_nowait()


class PassQueue:
    """Passes that wait, the longest first."""

    def __init__(self) -> None:
        self.waiting: list[PassClaim] = []

    def enter(self, mine: PassClaim) -> bool:
        """Enter the queue; return False for a pass that is in it already."""
        if mine.began is not None:
            return False
        mine.began = time.perf_counter()
        self.waiting.append(mine)
        self._first()
        return True

    def leave(self, mine: PassClaim) -> None:
        """Leave the queue, if the pass is in it."""
        if mine in self.waiting:
            self.waiting.remove(mine)
            self._first()
            self.wake()

    def _first(self) -> None:
        if self.waiting and self.waiting[0].first is None:
            self.waiting[0].first = time.perf_counter()

    def is_next(self, mine: PassClaim, blocked: Callable[[PassClaim], bool], patience: float) -> bool:
        """Return whether a pass is first, or may overtake the first, which live passes and caches block.

        A blocked first pass is overtaken for `patience` seconds. After that small passes let a large one run.
        """
        if not self.waiting or self.waiting[0] is mine:
            return True
        first = self.waiting[0]
        assert first.first is not None
        return time.perf_counter() - first.first <= patience and blocked(first)

    def wake(self) -> None:
        """Let all passes look again."""
        for one in tuple(self.waiting):
            one.wake()
