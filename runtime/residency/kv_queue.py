"""The queue of forward passes that wait for room: first come, first served, but for those that cannot be served now.

Knows no bytes and takes no lock: its owner's is held, but around `wake`, which anybody may call anywhere.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class PassClaim:
    """A forward pass that runs, or waits.

    Attributes:
        cache: the identity of the cache that it was given; None where it makes one or has none.
        size: bytes that its cache will have.
        beside: bytes that it takes beside.
        returned: of those, bytes of what it is asked to return beyond the workload.
        began: when it began to wait.
        first: since when nobody waits before it.
    """

    cache: int | None
    size: int
    beside: int
    returned: int = 0
    began: float | None = None
    first: float | None = None
    _wakeups: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def wake(self) -> None:
        """Let it look again. From anywhere, a weak reference's callback included: no lock is taken."""
        self._wakeups.put(None)

    def wait(self, seconds: float) -> None:
        """Until it is rung, or for so long."""
        with contextlib.suppress(queue.Empty):
            self._wakeups.get(timeout=seconds)
            while True:
                self._wakeups.get_nowait()


class PassQueue:
    """Passes that wait, the first come first."""

    def __init__(self) -> None:
        self.waiting: list[PassClaim] = []

    def enter(self, mine: PassClaim) -> bool:
        """Wait; whether it did not yet."""
        if mine.began is not None:
            return False
        mine.began = time.perf_counter()
        self.waiting.append(mine)
        self._first()
        return True

    def leave(self, mine: PassClaim) -> None:
        """Wait no longer."""
        if mine in self.waiting:
            self.waiting.remove(mine)
            self._first()
            self.wake()

    def _first(self) -> None:
        if self.waiting and self.waiting[0].first is None:
            self.waiting[0].first = time.perf_counter()

    def is_next(self, mine: PassClaim, blocked: Callable[[PassClaim], bool], patience: float) -> bool:
        """Whether a pass may run before those that wait: the first; any while the first is blocked by what lives.

        Such a first one is passed for `patience` seconds, and then no longer: else a large pass would wait for ever
        for a moment without small ones.
        """
        if not self.waiting or self.waiting[0] is mine:
            return True
        first = self.waiting[0]
        assert first.first is not None
        return time.perf_counter() - first.first <= patience and blocked(first)

    def wake(self) -> None:
        """Let all of them look again."""
        for one in tuple(self.waiting):
            one.wake()
