"""Reading ahead while a model is loaded: threads read and check what the loader will ask for, in its order.

The loader goes on one extent at a time. What is digested in threads is waited for only where the disk is slower than
that. Decides nothing about what is read, or into what it is put.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

READERS = 4  # threads: enough for a disk's queue; a digest takes one core 0.5 to 2 GB/s
WAITING = 256 << 20  # bytes read and not taken yet, beside what is being read, at the most

Place = tuple[str, int, int]
Report = Callable[[int, int], None]
_report: contextvars.ContextVar[Report | None] = contextvars.ContextVar("moepack loading report", default=None)


@contextlib.contextmanager
def loading_report(report: Report | None) -> Iterator[None]:
    """Reports of whatever is loaded inside go to `report`: transformers stands between it and the loader."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


class Ahead:
    """Reads in threads of its own. `take` may be called from any thread."""

    def __init__(
        self,
        wanted: Sequence[tuple[Place, int]],
        load: Callable[[Place], Tensor],
        report: Report | None = None,
        threads: int = READERS,
    ) -> None:
        """`wanted` are extents and their bytes; `load` reads and checks one; see BackingStore.reading_ahead."""
        self._size = dict(wanted)
        self._queue = dict.fromkeys(self._size)  # in order; not begun
        self._read: dict[Place, Tensor | BaseException] = {}
        self._load, self._report = load, report or _report.get()
        self._change = threading.Condition()
        self._waiting = self._taken = 0
        self._total = sum(self._size.values())
        self._mine = threading.local()
        self._threads = [
            threading.Thread(target=self._run, name="moepack-ahead", daemon=True)
            for _ in range(min(threads, len(self._size)))
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def take(self, place: Place) -> Tensor | None:
        """An extent, checked; None where the caller reads it, because it was not asked for or nobody has begun.

        Raises:
            BundleError: when it could not be read or is damaged.
        """
        if getattr(self._mine, "reading", False):
            return None
        with self._change:
            size = self._size.pop(place, None)
            if size is None:
                return None
            self._taken += size
            if place in self._queue:  # nobody has begun: to wait for a place in the queue would take longer
                del self._queue[place]
                result: Tensor | BaseException | None = None
                self._change.notify_all()
            else:
                self._change.wait_for(lambda: place in self._read)
                result = self._read.pop(place)
                self._waiting -= size
                self._change.notify_all()
            taken = self._taken
        if self._report is not None:
            self._report(taken, self._total)
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self) -> None:
        self._mine.reading = True
        while (place := self._next()) is not None:
            try:
                result: Tensor | BaseException = self._load(place)
            except BaseException as error:
                result = error
            with self._change:
                self._read[place] = result
                self._change.notify_all()

    def _next(self) -> Place | None:
        with self._change:
            while self._queue:
                place = next(iter(self._queue))
                size = self._size[place]
                if not self._waiting or self._waiting + size <= WAITING:
                    del self._queue[place]
                    self._waiting += size
                    return place
                self._change.wait()
            return None

    def close(self) -> None:
        """End the threads; what was not begun is not read."""
        with self._change:
            self._queue.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
