"""The thread that carries transitions on, round by round, and its health.

A round that fails is tried again, after a delay that doubles each time. Meanwhile the resident versions are served, and
they change again once a round succeeds.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger("moepack.runtime")
LONGEST = 60.0  # the most seconds between two tries of a round that fails


class Worker:
    """Calls `round` when it is woken, and at least every `interval` seconds, once it is started."""

    def __init__(self, round_: Callable[[float], None], shut: Callable[[], None], interval: float) -> None:
        """Prepare the thread. It calls `round_` with the time, and at its end `shut`, after it was told to stop."""
        self._round = round_
        self._shut = shut
        self._interval = max(interval, 0.01)
        # Not an Event: setting one takes its lock, and a finalizer that sets it may run on this very thread.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._in_a_row = 0
        self._ended_at = time.monotonic()
        # failed rounds; whether the thread was told to stop
        self.failures = 0
        self.closing = False
        self._thread = threading.Thread(target=self._run, name="moepack-transitions", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread run a round at once. Any thread may call this, at any point."""
        if self._thread.is_alive() and self._wakeups.empty():
            self._wakeups.put(None)

    def stop(self) -> bool:
        """Tell the thread to stop, without waiting; return whether it still runs and will call `shut` itself."""
        self.closing = True
        self._wakeups.put(None)
        if not self._thread.is_alive():
            self._round = self._shut = _nothing  # they refer to their owner: a cycle would keep its memory
            return False
        return True

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self.closing:
            self._wait()
            if self.closing:
                break
            try:
                self._round(time.monotonic())
            except Exception as error:
                self._failed(error)
            else:
                self._in_a_row = 0
                self._error = None
            self._ended_at = time.monotonic()
        shut = self._shut
        self._round = _nothing
        self._shut = _nothing
        shut()

    def _wait(self) -> None:
        until = time.monotonic() + min(LONGEST, 2.0**self._in_a_row) if self._in_a_row else 0.0
        while not self.closing:
            with contextlib.suppress(queue.Empty):
                self._wakeups.get(timeout=max(self._interval, until - time.monotonic()))
                for _ in range(self._wakeups.qsize()):
                    self._wakeups.get_nowait()
            if time.monotonic() >= until:
                return

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self._in_a_row += 1
        if str(error) != str(self._error):
            log.error("versions do not change for now: a round failed, and will be tried again", exc_info=error)
        self._error = error

    def health(self) -> dict[str, object]:
        """Describe the worker's state, as `Serving.health` does."""
        since = time.monotonic() - self._ended_at
        if not self._thread.is_alive():
            state = "stopped" if self.closing or self._thread.ident else "none"
        elif self._error is not None:
            state = "failing"
        else:
            state = "stuck" if since > max(10 * self._interval, 5.0) else "running"
        error = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return {
            "ok": state in ("none", "running"),
            "worker": state,
            "error": error,
            "failed_rounds": self.failures,
            "last_round_seconds_ago": since,
        }


def _nothing(*_: float) -> None:
    """Do nothing, in place of the round of a stopped worker."""
