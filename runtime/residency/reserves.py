"""Bytes of the budget for KV caches beyond those asked for while loading: what is free, or what experts leave."""

from __future__ import annotations

from moepack.runtime.planning.budget import BudgetTracker

from .manager import ResidencyManager


class FreeReserve:
    """The bytes that a fixed map of placements leaves free."""

    one_at_a_time = False  # whether one pass runs at a time, and no other while it waits for room
    coming = 0  # bytes that were asked for and are not reserved yet

    def __init__(self, tracker: BudgetTracker) -> None:
        self._tracker = tracker
        self.most = tracker.free  # bytes that could be reserved, with every expert at its least

    @property
    def held(self) -> int:
        """Bytes reserved."""
        return self._tracker.held("kv")

    def grow(self, size: int) -> bool:
        """Ask for `size` bytes more; return whether they are reserved. Raises MemoryError where they never can be."""
        if not self._tracker.try_reserve("kv", size):
            raise MemoryError
        return True

    def shrink(self, size: int) -> None:
        """Give bytes back, first those asked for but not reserved."""
        self._tracker.release("kv", size)

    def advance(self) -> None:
        """Let experts leave for the bytes asked for. Called outside forward passes."""


class EvictionReserve:
    """The bytes that experts can be evicted from. Its members are those of `FreeReserve`."""

    def __init__(self, manager: ResidencyManager) -> None:
        self._transitions, self.one_at_a_time = manager.transitions, manager.policy.needs.layers
        self.grow, self.shrink = manager.grow_kv, manager.transitions.shrink_kv
        self.advance = manager.transitions.tick  # as the worker does; a policy that blocks has no worker

    @property
    def most(self) -> int:
        """Bytes left with every expert at its least."""
        return self._transitions.headroom.most_kv()

    @property
    def held(self) -> int:
        """Bytes reserved."""
        return self._transitions.kv_bytes

    @property
    def coming(self) -> int:
        """Bytes that experts have still to leave."""
        return self._transitions.kv_asked


Reserve = FreeReserve | EvictionReserve
