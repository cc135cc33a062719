"""A stream on the host: a thread that begins one piece of work after another, events, and a rate limit.

For a CPU the thread does the work itself, and releases the GIL. For a GPU it issues the work and polls for its end.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable

from moepack.runtime.store.files import Cancelled

FLOOR = 4 << 20  # under a rate limit a smaller copy counts as this many bytes: its calls cost about 0.5 ms
SHORT = 0.0002  # seconds; shorter delays are skipped, because a sleep would last a third longer than asked for
POLL = 0.0005  # seconds between two checks of work on a GPU

Going = Callable[[], bool]  # returns whether work has ended; raises the error of work that failed


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


class HostStream:
    """A thread that begins one piece of work after another, in order."""

    def __init__(self, name: str, on_event: Callable[[], None], depth: int = 1) -> None:
        """Start the thread, which calls `on_event` after each piece of work; at most `depth` pieces are under way."""
        self._on_event, self._depth = on_event, depth
        self._work: queue.SimpleQueue[tuple[HostEvent, Callable[[HostEvent], Going | None]] | None]
        self._work = queue.SimpleQueue()
        self._going: collections.deque[tuple[HostEvent, Going]] = collections.deque()
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[HostEvent], Going | None]) -> HostEvent:
        """Queue `work`, a function called with its event. Work that only issues something returns a check for its end.

        Events end in the order in which their work began.
        """
        event = HostEvent()
        self._work.put((event, work))
        if self._ended:  # the thread will not take it
            self._drain()
        return event

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._work.get_nowait()
                if item is not None:
                    self._end(item[0], Cancelled())

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

    def _begin(self, event: HostEvent, work: Callable[[HostEvent], Going | None]) -> None:
        try:
            if event.cancelled or self._closed:
                raise Cancelled
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

    def _end(self, event: HostEvent, error: BaseException | None) -> None:
        event.end(error)
        self._on_event()

    def close(self, wait: bool = True) -> None:
        """Cancel work that has not begun, and wait for the rest if `wait`."""
        self._closed = True
        self._work.put(None)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()


class Migration:
    """The common part of devices: one stream for copies, with a rate limit; `moved` counts the stored bytes copied."""

    def __init__(self, on_event: Callable[[], None], depth: int = 1) -> None:
        self.moved, self._due, self._least = 0, 0.0, FLOOR
        self._rate: float | None = None
        self._closing = False  # not an Event: a finalizer may set it on the thread that holds the Event's lock
        self.stream = HostStream("moepack-migration", on_event, depth)

    def gate(self, event: HostEvent, size: int) -> Callable[[int], None]:
        """Return a function to call before each chunk of a copy: it waits for the rate limit, or raises Cancelled."""

        def before(chunk: int) -> None:
            self.moved += chunk
            rate = self._rate  # `limit` may change it meanwhile
            if rate is not None:  # wait for the time of the chunks before this one; idle time earns no credit
                until, self._due = self._due, max(self._due, time.monotonic()) + chunk / rate
                while (wait := until - time.monotonic()) > SHORT and not (event.cancelled or self._closing):
                    time.sleep(min(wait, 0.05))
            if event.cancelled or self._closing:
                raise Cancelled

        if self._rate is not None and size < self._least:
            self._due = max(self._due, time.monotonic()) + (self._least - size) / self._rate
        return before

    def limit(self, bytes_per_second: float | None, least: int = FLOOR) -> None:
        """Limit copies to a rate of stored bytes (`None`: no limit); a copy counts as at least `least` bytes."""
        self._rate, self._least = bytes_per_second, least

    def close(self, wait: bool = True) -> None:
        """End the stream's thread, and stop copies that are under way; wait for the thread if `wait`."""
        self._closing = True
        self.stream.close(wait)
