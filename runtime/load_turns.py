"""Turns of threads that load models: transformers meanwhile sets the default dtype of the whole process.

One thread at a time loads a bundle, and no other thread constructs a model then. Loads of other models do not wait for
one another: what they do with threads and processes is theirs. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator

PATIENCE = 10.0  # seconds that a bundle and models under construction wait for one another: one may wait for the other
Turn = dict[object, threading.Thread]  # who has one


class LoadTurns:
    """Who loads a bundle, and who constructs a model."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # the threads that load are not in the child

    def _renew(self) -> None:
        self._changed = threading.Condition()
        self._loading: Turn = {}
        self._constructing: Turn = {}

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Enclose the load of a bundle: wait while other threads load one, and a while for those that construct."""
        mine = object()
        try:
            with self._changed:
                self._wait(self._loading)
                self._loading[mine] = threading.current_thread()
                self._wait(self._constructing, PATIENCE)
            yield
        finally:
            self._end(mine)

    @contextlib.contextmanager
    def constructing(self) -> Iterator[None]:
        """Enclose the construction of any model: wait a while for another thread that loads a bundle."""
        mine = object()
        try:
            with self._changed:
                self._wait(self._loading, PATIENCE)
                self._constructing[mine] = threading.current_thread()
            yield
        finally:
            self._end(mine)

    def _wait(self, turn: Turn, seconds: float = math.inf) -> None:
        """Wait until no other thread that lives has the turn."""
        me = threading.current_thread()
        until = time.monotonic() + seconds
        while any(thread is not me and thread.is_alive() for thread in turn.values()) and time.monotonic() < until:
            self._changed.wait(1.0)

    def _end(self, mine: object) -> None:
        with self._changed:
            self._loading.pop(mine, None)
            self._constructing.pop(mine, None)
            self._changed.notify_all()


load_turns = LoadTurns()
