"""Read ahead while a model is loaded: threads read and check the extents that the loader will ask for, in its order.

The loader takes one extent at a time, and waits only if the disk is slower than the loader.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moepack.pack.processors import processors

READERS = 4  # the most threads: enough for a disk's queue; a core digests 0.5 to 2 GB/s
RUN = 4 << 20  # bytes that a thread reads before handing them over: handing over single small extents costs too much
WAITING = 32 << 20  # the most bytes read and not taken yet: on a CPU they come on top of the budget for a while

Place = tuple[str, int, int]  # version, layer position, expert


@dataclass(slots=True)
class _Run:
    """A run: extents that one thread reads in order and hands over together, and their results."""

    places: list[Place] = field(default_factory=list)
    size: int = 0
    begun: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    read: dict[Place, Tensor | BaseException] = field(default_factory=dict)


class ReadAhead:
    """Reads extents in its own threads. `take` may be called from any thread."""

    def __init__(
        self,
        wanted: Sequence[tuple[Place, int]],
        load: Callable[[Place], Tensor],
        threads: int | None = None,
    ) -> None:
        """Start to read `wanted`, pairs of an extent's place and bytes; `load` reads and checks one extent.

        Extents above WAITING are left to the loader, which reads them in place: an output matrix may take 600 MB.
        """
        self._runs: collections.deque[_Run] = collections.deque()
        self._of: dict[Place, tuple[_Run, int]] = {}
        run = _Run()
        for place, size in dict(wanted).items():
            if size > WAITING:
                continue
            run.places.append(place)
            run.size += size
            self._of[place] = run, size
            if run.size >= RUN:
                self._runs.append(run)
                run = _Run()
        if run.places:
            self._runs.append(run)
        self._load = load
        self._change = threading.Condition()
        self._waiting = 0
        self._mine = threading.local()
        self._threads = [
            threading.Thread(target=self._read, name="moepack-ahead", daemon=True)
            for _ in range(min(readers() if threads is None else threads, len(self._runs)))
        ]
        for thread in self._threads:
            thread.start()

    def take(self, place: Place) -> Tensor | None:
        """Return a checked extent, or `None` if it was not wanted or no thread has begun it: the caller then reads it.

        Raises BundleError when the extent cannot be read or is damaged.
        """
        if getattr(self._mine, "reading", False):
            return None
        with self._change:
            run, size = self._of.pop(place, (None, 0))
            if run is None:
                return None
            begun = run.begun
            if not begun:  # waiting until a thread reads it would take longer
                run.places.remove(place)
                run.size -= size
        result: Tensor | BaseException | None = None
        if begun:
            run.over.wait()
            with self._change:
                result = run.read.pop(place)
                self._waiting -= size
                self._change.notify()
        if isinstance(result, BaseException):
            raise result
        return result

    def _read(self) -> None:
        self._mine.reading = True
        while (run := self._next()) is not None:
            for place in run.places:
                try:
                    run.read[place] = self._load(place)
                except BaseException as error:
                    run.read[place] = error
            run.over.set()

    def _next(self) -> _Run | None:
        with self._change:
            while self._runs:
                size = self._runs[0].size
                if not self._waiting or self._waiting + size <= WAITING:
                    run = self._runs.popleft()
                    run.begun = True
                    self._waiting += size
                    return run
                self._change.wait()
            return None

    def close(self) -> None:
        """End the threads; runs that no thread has begun stay unread."""
        with self._change:
            self._runs.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join()


def readers() -> int:
    """Return the default number of threads that read."""
    return min(READERS, processors())
