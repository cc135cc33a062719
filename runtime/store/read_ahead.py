"""Read ahead while a model is loaded: threads read and check the extents that the loader will ask for, in its order.

The loader takes one extent at a time, and waits only if the disk is slower than the loader.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from moepack.pack.processors import processors

READERS = 4  # the most threads: enough for a disk's queue; a core digests 0.5 to 2 GB/s
RUN = 4 << 20  # bytes that a thread reads before handing them over: handing over single small extents costs too much
WAITING = 32 << 20  # the most bytes read and not taken yet: on a CPU they come on top of the budget for a while

Place = tuple[str, int, int]  # version, layer position, expert
Read = dict[Place, Tensor | BaseException]  # what became of a run's extents


class ReadAhead:
    """Reads extents in its own threads. `take` may be called from any other thread."""

    def __init__(
        self,
        wanted: Sequence[tuple[Place, int]],
        load: Callable[[Place], Tensor],
        threads: int | None = None,
    ) -> None:
        """Start to read `wanted`, pairs of an extent's place and bytes; `load` reads and checks one extent.

        Extents above WAITING are left to the loader, which reads them in place: an output matrix may take 600 MB.
        """
        self._load = load
        self._lock = threading.Lock()  # of the next four
        self._later = {place: size for place, size in dict(wanted).items() if size <= WAITING}
        self._runs: collections.deque[list[Place]] = collections.deque()  # each is read by one thread, in order
        self._begun: dict[Place, tuple[Future[Read], int]] = {}
        self._waiting = 0
        size = RUN
        for place, more in self._later.items():
            if size >= RUN:
                self._runs.append([])
                size = 0
            self._runs[-1].append(place)
            size += more
        self._pool = ThreadPoolExecutor(readers() if threads is None else threads, "moepack-ahead")
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        """Begin runs as long as what they read may wait. The caller holds the lock."""
        while self._runs:
            run = {place: self._later[place] for place in self._runs[0] if place in self._later}
            size = sum(run.values())
            if self._waiting and self._waiting + size > WAITING:
                return
            self._runs.popleft()
            self._waiting += size
            reading = self._pool.submit(self._read, list(run))
            for place in run:
                self._begun[place] = reading, self._later.pop(place)

    def take(self, place: Place) -> Tensor | None:
        """Return a checked extent, or `None` if it was not wanted or its run has not begun: the caller then reads it.

        Raises BundleError when the extent cannot be read or is damaged.
        """
        with self._lock:
            self._later.pop(place, None)
            reading, size = self._begun.pop(place, (None, 0))
        if reading is None:
            return None
        made = reading.result().pop(place)
        with self._lock:
            self._waiting -= size
            self._begin()
        if isinstance(made, BaseException):
            raise made
        return made

    def _read(self, places: Sequence[Place]) -> Read:
        made: Read = {}
        for place in places:
            try:
                made[place] = self._load(place)
            except BaseException as error:
                made[place] = error
        return made

    def close(self) -> None:
        """End the threads; runs that have not begun stay unread."""
        with self._lock:
            self._runs.clear()
        self._pool.shutdown()


def readers() -> int:
    """Return the default number of threads that read."""
    return min(READERS, processors())
