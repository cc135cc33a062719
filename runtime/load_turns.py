"""Turns of threads that load models: transformers meanwhile sets the default dtype of the whole process.

One thread at a time loads a bundle, and no other thread constructs a model then. Loads of other models do not wait for
one another: what they do with threads and processes is theirs. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

PATIENCE = 10.0  # seconds that a bundle waits for models under construction: one of these may wait for the bundle


class LoadTurns:
    """Who loads a bundle, and who constructs a model."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # the threads that load are not in the child

    def _renew(self) -> None:
        self._changed = threading.Condition()
        self._loader: int | None = None  # the thread that loads a bundle
        self._depth = 0  # of bundles that it loads inside one another
        self._constructing = Counter[int]()  # threads

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Enclose the load of a bundle: wait for others' turns to end."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._loader in (None, me))
            self._loader = me
            self._depth += 1
            self._changed.wait_for(lambda: not self._constructing.keys() - {me}, PATIENCE)
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._loader = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def constructing(self) -> Iterator[None]:
        """Enclose the construction of any model: wait while another thread loads a bundle."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._loader in (None, me))
            self._constructing[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._constructing[me] -= 1
                if not self._constructing[me]:
                    del self._constructing[me]
                self._changed.notify_all()


load_turns = LoadTurns()
