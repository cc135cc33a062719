"""A model's loading: the bytes it has read of those it will read, and several fetches under way at a time.

`loading_report` encloses a load; the loaders inside find its count by `loading`. What is fetched, and into what, is
theirs to know.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

Report = Callable[[int, int], None]
Item = TypeVar("Item")
AHEAD = 8  # fetches that wait behind those under way, so that no thread of the device waits for the loader


class LoadCount:
    """The bytes of one load. Any thread may call it."""

    def __init__(self, report: Report | None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self.done = self.total = 0

    def expect(self, size: int) -> None:
        """Add bytes that will be read."""
        with self._lock:
            self.total += size

    def add(self, size: int) -> None:
        """Count bytes as read, and report."""
        with self._lock:
            self.done += size
            if self._report is not None and size:
                self._report(self.done, self.total)


_count: contextvars.ContextVar[LoadCount] = contextvars.ContextVar("moepack load", default=LoadCount(None))  # noqa: B039


@contextlib.contextmanager
def loading_report(report: Report | None) -> Iterator[None]:
    """Call `report(bytes read so far, total bytes)` for loads inside the context, which transformers starts.

    The total grows once: dense tensors are read before it is known which experts fit.
    """
    token = _count.set(LoadCount(report))
    try:
        yield
    finally:
        _count.reset(token)


def loading() -> LoadCount:
    """Return the count of the load that is under way in this context."""
    return _count.get()


class Fetch(Protocol):
    """A fetch that was started."""

    error: BaseException | None  # why it failed, once it has ended; `None` after success

    def wait(self) -> None:
        """Wait for its end."""

    def cancel(self) -> None:
        """Ask it to stop early; it may still complete."""


def in_order(
    items: Iterable[Item], start: Callable[[Item], Fetch | None], ahead: int = AHEAD
) -> Iterator[tuple[Item, Fetch | None]]:
    """Start a fetch for each item, and yield the items in order, each once its fetch has ended.

    Up to `ahead` later items are started before an item is waited for. `start` returns None where nothing is fetched.
    A caller that stops early has the started fetches cancelled, and their end waited for: their memory is free then.
    """
    going: collections.deque[tuple[Item, Fetch | None]] = collections.deque()

    def ended() -> tuple[Item, Fetch | None]:
        fetch = going[0][1]
        if fetch is not None:
            fetch.wait()
        return going.popleft()

    try:
        for item in items:
            going.append((item, start(item)))
            if len(going) > ahead:
                yield ended()
        while going:
            yield ended()
    finally:
        for _, fetch in going:
            if fetch is not None:
                fetch.cancel()
        while going:
            ended()
