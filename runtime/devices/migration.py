"""Streams on the host: threads that begin one piece of work after another, events, and a rate limit.

For a CPU a few threads do the work themselves, and release the GIL. For a GPU one thread issues the work and polls for
its end.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable

from moepack.runtime.policies.contract import FLOOR
from moepack.runtime.store.files import Cancelled

SHORT = 0.0002  # seconds; shorter delays are skipped, because a sleep would last a third longer than asked for
POLL = 0.0001  # seconds between two checks of work on a GPU: two copies of 2.5 MB at a time are then 50 GB/s at most

Going = Callable[[], bool]  # returns whether work has ended; raises the error of work that failed
Work = Callable[["HostEvent"], "Going | None"]


class HostEvent:
    """An event of a HostStream, or an event that has already ended."""

    def __init__(self, ended: bool = False) -> None:
        self.error: BaseException | None = None
        self.cancelled = False
        self._ended = threading.Event()
        if ended:
            self._ended.set()

    def done(self) -> bool:
        """Return whether the work has ended."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for the end."""
        self._ended.wait()

    def cancel(self) -> None:
        """Ask the work to stop at its next chunk."""
        self.cancelled = True

    def end(self, error: BaseException | None) -> None:
        """Mark the work as ended, with its error or `None`."""
        self.error = error
        self._ended.set()


class _Queue:
    """Work that threads take in the order in which it was submitted."""

    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event
        self._work: queue.SimpleQueue[tuple[HostEvent, Work] | None] = queue.SimpleQueue()
        self._closed = self._ended = False
        self._threads: tuple[threading.Thread, ...] = ()

    def _start(self, name: str, count: int) -> None:
        self._threads = tuple(threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count))
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def submit(self, work: Work) -> HostEvent:
        """Queue `work`, a function called with its event."""
        event = HostEvent()
        self._work.put((event, work))
        if self._ended:  # no thread will take it
            self._drain()
        return event

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._work.get_nowait()
                if item is not None:
                    self._end(item[0], Cancelled())

    def _check(self, event: HostEvent) -> None:
        if event.cancelled or self._closed:
            raise Cancelled

    def _end(self, event: HostEvent, error: BaseException | None) -> None:
        event.end(error)
        self._on_event()

    def close(self, wait: bool = True) -> None:
        """Cancel work that has not begun, and wait for the rest if `wait`."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            if wait and threading.current_thread() is not thread:
                thread.join()


class HostStream(_Queue):
    """A thread that begins one piece of work after another, in order. Events end in the order in which work began.

    Work that only issues something returns a check for its end.
    """

    def __init__(self, name: str, on_event: Callable[[], None], depth: int = 1) -> None:
        """Start the thread, which calls `on_event` after each piece of work; at most `depth` pieces are under way."""
        super().__init__(on_event)
        self._depth = depth
        self._going: collections.deque[tuple[HostEvent, Going]] = collections.deque()
        self._start(name, 1)

    def rest(self) -> None:
        """Wait until all work submitted so far has ended."""
        self.submit(lambda event: lambda: True).wait()

    def _run(self) -> None:
        open_ = True
        while open_ or self._going:
            self._retire()
            if len(self._going) >= self._depth or not open_:
                time.sleep(POLL)
                continue
            try:
                item = self._work.get(timeout=POLL if self._going else None)
            except queue.Empty:
                continue
            if item is None:
                open_ = False
                continue
            self._begin(*item)
            del item
        self._ended = True
        self._drain()

    def _begin(self, event: HostEvent, work: Work) -> None:
        try:
            self._check(event)
            going = work(event)
        except BaseException as error:
            self._end(event, error)
        else:
            if going is None:
                self._end(event, None)
            else:
                self._going.append((event, going))

    def _retire(self) -> None:
        while self._going:
            event, going = self._going[0]
            error: BaseException | None = None
            try:
                if not going():
                    return
            except BaseException as caught:
                error = caught
            self._going.popleft()
            self._end(event, error)


class HostThreads(_Queue):
    """Threads that begin pieces of work in order, and do them side by side: they may end in another order."""

    def __init__(self, name: str, on_event: Callable[[], None], threads: int) -> None:
        """Start the threads, which call `on_event` after each piece of work."""
        super().__init__(on_event)
        self._taking = threading.Lock()
        self._going: list[HostEvent] = []  # begun and not ended, in the order in which they began
        self._left = threads
        self._start(name, threads)

    def narrow(self, threads: int) -> None:
        """Keep this many threads; the others end once they have done what was submitted so far."""
        for _ in self._threads[threads:]:
            self._work.put(None)

    def rest(self) -> None:
        """Wait until all work submitted so far has ended."""
        self.submit(self._wait_for_earlier).wait()

    def _wait_for_earlier(self, mine: HostEvent) -> None:
        going = tuple(self._going)
        for event in going[: going.index(mine)]:
            event.wait()

    def _run(self) -> None:
        while True:
            with self._taking:
                item = self._work.get()
                if item is None:
                    self._left -= 1
                    break
                self._going.append(item[0])
            event, work = item
            error: BaseException | None = None
            try:
                self._check(event)
                work(event)
            except BaseException as caught:
                error = caught
            self._going.remove(event)
            self._end(event, error)
            del item, event, work, error
        if not self._left:
            self._ended = True
            self._drain()


class Migration:
    """The common part of devices: one stream for copies, with a rate limit; `moved` counts the bytes copied."""

    def __init__(self, stream: HostStream | HostThreads) -> None:
        self.stream = stream
        self._lock = threading.Lock()  # of the next three
        self.moved = 0
        self._due = 0.0
        self._least = FLOOR
        self._rate: float | None = None
        self._hurried: Callable[[], bool] = bool  # never
        self._closing = False  # not an Event: a finalizer may set it on the thread that holds the Event's lock

    def gate(self, event: HostEvent, size: int) -> Callable[[int], None]:
        """Return a function to call before each chunk of a copy: it waits for the rate limit, or raises Cancelled."""

        def before(chunk: int) -> None:
            with self._lock:
                self.moved += chunk
                until = self._due if self._limited else 0.0
                self._count(chunk)
            # Wait for the time of the chunks before this one; idle time earns no credit.
            while (
                (wait := until - time.monotonic()) > SHORT and self._limited and not (event.cancelled or self._closing)
            ):
                time.sleep(min(wait, 0.05))
            if event.cancelled or self._closing:
                raise Cancelled

        with self._lock:
            self._count(max(0, self._least - size))
        return before

    @property
    def _limited(self) -> bool:
        return self._rate is not None and not self._hurried()

    def _count(self, size: int) -> None:
        if self._rate is not None and self._limited:
            self._due = max(self._due, time.monotonic()) + size / self._rate

    def limit(self, bytes_per_second: float | None, least: int = FLOOR, hurried: Callable[[], bool] = bool) -> None:
        """Limit copies to a rate of stored bytes (`None`: no limit); a copy counts as at least `least` bytes.

        Nothing is limited while `hurried` returns True, which any thread may call.
        """
        with self._lock:
            self._rate = bytes_per_second
            self._least = least
            self._hurried = hurried

    def rest(self) -> None:
        """Wait until all copies that were asked for so far have ended."""
        self.stream.rest()

    def close(self, wait: bool = True) -> None:
        """End the stream's thread, and stop copies that are under way; wait for the thread if `wait`."""
        self._closing = True
        self.stream.close(wait)
