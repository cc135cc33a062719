"""Bytes of the budget for KV caches beyond those asked for while loading: what is free, or what experts leave.

Decides nothing: kv_reserve.py says how much.
"""

from __future__ import annotations

from typing import Protocol

from moepack.runtime.planning.budget import BudgetTracker

from .manager import ResidencyManager


class Reserve(Protocol):
    """Bytes of the budget for caches beyond those asked for while loading.

    Attributes:
        one_at_a_time: whether one pass runs at a time, and no other while it waits for room.
    """

    one_at_a_time: bool

    @property
    def held(self) -> int:
        """Bytes reserved."""

    @property
    def coming(self) -> int:
        """Bytes asked for that are not there yet."""

    @property
    def most(self) -> int:
        """Bytes that could be reserved, with every expert at its least."""

    def grow(self, size: int) -> bool:
        """Ask for `size` bytes more; whether they are there. Raises MemoryError where they can never be."""

    def shrink(self, size: int) -> None:
        """Give bytes back, and first those that are not there yet."""

    def advance(self) -> None:
        """Help what was asked for to come about. Called outside forward passes."""


class FreeReserve:
    """What a map that never changes leaves free."""

    def __init__(self, tracker: BudgetTracker) -> None:
        self._tracker = tracker
        self.most, self.coming, self.one_at_a_time = tracker.free, 0, False

    @property
    def held(self) -> int:
        """Bytes reserved."""
        return self._tracker.held("kv")

    def grow(self, size: int) -> bool:
        """Reserve at once, or never."""
        if not self._tracker.try_reserve("kv", size):
            raise MemoryError
        return True

    def shrink(self, size: int) -> None:
        """Give bytes back."""
        self._tracker.release("kv", size)

    def advance(self) -> None:
        """Nothing is ever under way."""


class EvictionReserve:
    """What experts can be pushed out of."""

    def __init__(self, manager: ResidencyManager) -> None:
        self._manager, self.one_at_a_time = manager, manager.policy.needs.layers

    @property
    def most(self) -> int:
        """Bytes that the experts leave at their least."""
        return self._manager.transitions.headroom.most_kv()

    @property
    def held(self) -> int:
        """Bytes reserved."""
        return self._manager.transitions.kv_bytes

    @property
    def coming(self) -> int:
        """Bytes that experts have still to leave."""
        return self._manager.transitions.kv_asked

    def grow(self, size: int) -> bool:
        """Push experts out, the least wanted first."""
        return self._manager.grow_kv(size)

    def shrink(self, size: int) -> None:
        """Give bytes back to the experts."""
        self._manager.transitions.shrink_kv(size)

    def advance(self) -> None:
        """A round of transitions, as the worker does them: a policy that blocks has no worker."""
        self._manager.transitions.tick()
