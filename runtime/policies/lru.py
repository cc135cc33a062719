"""`lru`: the experts used last at high precision, loaded when they are asked for: forward passes wait. Pure.

A baseline. Low versions are kept beside the high ones: experts come and go inside a forward pass.
"""

from __future__ import annotations

from .contract import Entry, Key, LiveOptions, Observation, Wanted, read_options


class Recent:
    """The experts used last at high precision, loaded when they are asked for: what caches for offloading do.

    The room of all layers is one cache. Experts of one layer's call never displace each other: where there are more of
    them than room, those with the most tokens are loaded and the others run at the base version.
    """

    blocking = True
    patience = 0.1

    def __init__(self, version: int) -> None:
        """`version` is the number of the high one."""
        self.version = version
        self._used: dict[Key, None] = {}  # the least recent first

    def observe(self, seen: Observation) -> Wanted | None:
        """What the cache holds once those that are needed now are in it."""
        room = sum(seen.room)
        needed = [((p, e), n) for p, row in enumerate(seen.counts) for e, n in enumerate(row) if n]
        needed.sort(key=lambda item: -item[1])
        for key, _ in reversed(needed[:room]):
            self._used.pop(key, None)
            self._used[key] = None
        while len(self._used) > room:
            del self._used[next(iter(self._used))]
        return dict.fromkeys(reversed(self._used), self.version)

    def worth(self, key: Key) -> float:
        """Nothing is left to be chosen: what is not in the cache goes at once."""
        return 0.0


ENTRY = Entry(
    name="lru",
    usage="lru[:KEY=VALUE,...]",
    parse=lambda text: read_options(LiveOptions, text),
    needs_budget=True,
    make=lambda setting, options: Recent(setting.high),
)
