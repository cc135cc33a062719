"""Where KV caches get bytes beyond those asked for while loading: free bytes of the budget, or evicted experts."""

from __future__ import annotations

from moepack.runtime.planning.budget import BudgetTracker

from .manager import ResidencyManager


class FreeReserve:
    """A reserve of the bytes that are free when placements never change."""

    one_at_a_time = False  # whether passes run one at a time, and none runs while one waits for room
    coming = 0  # bytes that were asked for and are not reserved yet

    def __init__(self, tracker: BudgetTracker) -> None:
        self._tracker = tracker
        self.most = tracker.free  # the most bytes that `held` can reach

    @property
    def held(self) -> int:
        """Bytes reserved."""
        return self._tracker.held("kv")

    def grow(self, size: int) -> bool:
        """Ask for `size` more bytes; return whether they are reserved. Raises MemoryError if they never can be."""
        if not self._tracker.try_reserve("kv", size):
            raise MemoryError
        return True

    def shrink(self, size: int) -> None:
        """Give `size` bytes back, first those that were asked for but are not reserved yet."""
        self._tracker.release("kv", size)

    def advance(self) -> None:
        """Do nothing: these bytes are free. While a pass waits, `EvictionReserve` evicts experts here."""


class EvictionReserve:
    """A reserve that evicts experts to get bytes. It has the members of `FreeReserve`."""

    def __init__(self, manager: ResidencyManager) -> None:
        self._transitions = manager.transitions
        self.one_at_a_time = manager.policy.needs.layers
        self.grow = manager.grow_kv
        self.shrink = manager.transitions.shrink_kv
        self.advance = manager.transitions.tick  # the worker calls `tick` too, but not under a policy that blocks

    @property
    def most(self) -> int:
        """The most bytes that `held` can reach, with every expert at the base."""
        return self._transitions.headroom.most_kv()

    @property
    def held(self) -> int:
        """Bytes reserved."""
        return self._transitions.kv_bytes

    @property
    def coming(self) -> int:
        """Bytes that were asked for and that evictions have still to free."""
        return self._transitions.kv_asked


Reserve = FreeReserve | EvictionReserve
