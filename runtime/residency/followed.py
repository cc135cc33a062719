"""What is kept for objects, such as KV caches, as long as these live."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Kept = TypeVar("Kept")


class Followed(dict[int, tuple[weakref.ref[object], Kept]]):
    """Values by the identity of the objects for which they are kept. Its owner's lock guards all but deaths.

    An object may die on any thread, even on one that holds the lock. So its death is only noted, until `bury`.
    """

    def __init__(self, died: Callable[[], None] = lambda: None) -> None:
        """Start empty. `died` is called at each death: it takes no lock, and does not refer to the owner."""
        self._dead: deque[int] = deque()
        self._died = died

    def follow(self, thing: object, kept: Kept) -> bool:
        """Keep a value until an object dies; return False for an object that takes no weak references."""
        try:
            self[id(thing)] = weakref.ref(thing, partial(_note, self._dead, self._died, id(thing))), kept
        except TypeError:
            return False
        return True

    def of(self, thing: object) -> Kept | None:
        """Return what is kept for an object; `None` if nothing is."""
        found = self.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def bury(self) -> list[Kept]:
        """Forget the objects that have died, and return what was kept for them."""
        gone = []
        while self._dead:
            found = self.get(key := self._dead.popleft())
            if found is not None and found[0]() is None:  # else the address is another object's by now
                del self[key]
                gone.append(found[1])
        return gone


def _note(dead: deque[int], died: Callable[[], None], key: int, _: object) -> None:
    dead.append(key)
    died()
