"""The transition pipeline: from wanted versions to copies, demotions and blocks given back (dynaexq, section 3.4).

`tick` does one round of work and never waits, so a thread may call it, or a test, or a simulator. Decides nothing about
which versions are wanted: a policy says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moepack.pack.errors import MoepackError

from .budget import BudgetTracker
from .pools import Pool
from .residency import Key, Outcome, Residency

log = logging.getLogger("moepack.runtime")
AHEAD = 16  # promotions that evictions make room for at a time


@dataclass(frozen=True, slots=True)
class Queues:
    """Lengths of the queues, and the copies in flight."""

    updates: int
    evictions: int
    in_flight: int


class Transitions:
    """Carries out what is wanted, inside the budget. Every method may be called from any thread.

    Attributes:
        refusals: how often a promotion was put off for want of room.
        failures: copies that failed; each message was logged once.
        kv_asked: bytes that the KV reserve is still to grow by.
    """

    def __init__(
        self,
        residency: Residency,
        tracker: BudgetTracker,
        pools: Sequence[Pool],
        in_flight: int = 2,
        retry_after: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`in_flight` bounds the copies on the migration stream; a failed one is tried again after `retry_after`
        seconds, if it is still wanted then."""
        self.residency, self.tracker, self.pools = residency, tracker, tuple(pools)
        self._limit, self._retry, self._clock = in_flight, retry_after, clock
        self._lock = threading.RLock()
        self._wanted: dict[Key, int] = {}
        self._updates: dict[Key, int] = {}
        self._evictions: dict[Key, None] = {}
        self._failed: dict[tuple[Key, int], float] = {}
        self._logged: set[str] = set()
        self.kv_asked = 0
        self.refusals = self.failures = 0

    def want(self, wanted: Mapping[Key, int]) -> None:
        """What every expert should be at: those that are not named at their base version.

        Promotions are carried out in the order of `wanted`; evictions from its end, those not named first. What is on
        its way and no longer wanted is cancelled.
        """
        with self._lock:
            self._wanted = dict(wanted)
            self._updates.clear()
            self._evictions.clear()
            residency = self.residency
            for key in residency.above() | self._wanted.keys():
                entry, target = residency.entries[key], self._target(key)
                coming = entry.flying.version if entry.flying else entry.ready
                if coming is not None and coming != target:
                    residency.cancel(key)
                if target == entry.base and entry.active != entry.base and entry.ready != entry.base:
                    self._evictions[key] = None
            for key, target in wanted.items():
                entry = residency.entries[key]
                if target != entry.base and entry.active != target and entry.ready != target:
                    self._updates[key] = target

    def _target(self, key: Key) -> int:
        return self._wanted.get(key, self.residency.base)

    def tick(self) -> None:
        """One round: note what has ended, free blocks, evict where memory is tight, admit promotions. Never waits."""
        with self._lock:
            for key, version, error in self.residency.poll(lambda key, version: self._target(key) == version):
                self.note_failure(key, version, error)
            self.residency.reclaim()
            if self.kv_asked and not self._settle_kv():
                return
            self._admit()

    def _admit(self) -> None:
        for key, version in list(self._updates.items()):
            if self.residency.in_flight() >= self._limit:
                return
            if not self.may_try(key, version):
                continue
            try:
                outcome = self.residency.start(key, version)
                if outcome is Outcome.REFUSED and self._trim(key, version):
                    outcome = self.residency.start(key, version)
            except (MoepackError, OSError) as error:
                self.note_failure(key, version, error)
                continue
            if outcome is Outcome.REFUSED:
                self.refusals += 1
                self._evict_for(list(self._updates.items())[:AHEAD])
                return
            if outcome is not Outcome.BUSY:
                del self._updates[key]

    def _trim(self, key: Key, version: int) -> bool:
        """Take spare blocks of other pools into the budget, where the pool in question has room to grow."""
        mine = self.residency.pool(key[0], version)
        short = mine.block_bytes - self.tracker.free
        return short > 0 and sum(p.trim(short) for p in self.pools if p is not mine and p.spare_bytes) >= short

    def _evict_for(self, heads: Sequence[tuple[Key, int]]) -> None:
        """Evictions first: as many as make room for the promotions at the head of the queue."""
        needed = sum(self.residency.pool(key[0], version).block_bytes for key, version in heads)
        for key in list(self._evictions):
            if self.residency.going_bytes() >= needed:
                return
            if self.residency.start(key, self.residency.base) is not Outcome.BUSY:
                del self._evictions[key]

    def may_try(self, key: Key, version: int) -> bool:
        """Whether a version's copy did not fail lately."""
        failed = self._failed.get((key, version))
        return failed is None or self._clock() - failed >= self._retry

    def note_failure(self, key: Key, version: int, error: BaseException) -> None:
        """Count a copy that failed, and log it unless the same was logged before."""
        self.failures += 1
        self._failed[key, version] = self._clock()
        if self._target(key) == version:
            self._updates[key] = version
        if str(error) not in self._logged:
            self._logged.add(str(error))
            log.warning("position %d, expert %d stays on its version: %s", *key, error)

    # --- the KV reserve

    def grow_kv(self, size: int) -> bool:
        """Reserve `size` bytes more for the KV cache; never waits.

        Where they are not free, experts are pushed out, the least wanted first, and the reserve grows as soon as they
        have left: `kv_bytes` tells. Promotions wait until then.

        Returns:
            Whether the bytes are reserved already.

        Raises:
            MemoryError: when the base versions leave less than that.
        """
        with self._lock:
            most = self.tracker.budget - self.tracker.held("fixed") - self._base_bytes()
            if self.kv_bytes + self.kv_asked + size > most:
                raise MemoryError(f"a KV reserve of {self.kv_bytes + size} bytes: the base versions leave {most}")
            self.kv_asked += size
            return self._settle_kv()

    def shrink_kv(self, size: int) -> None:
        """Give back bytes of the KV reserve, and first what was asked for and is not there yet."""
        with self._lock:
            asked = min(size, self.kv_asked)
            self.kv_asked -= asked
            self.tracker.release("kv", size - asked)

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""
        return self.tracker.held("kv")

    def _base_bytes(self) -> int:
        base = self.residency.base
        return sum(n * self.residency.pool(p, base).block_bytes for p, n in enumerate(self.residency.experts))

    def _settle_kv(self) -> bool:
        short = self.kv_asked - self.tracker.free
        if short > 0:
            for pool in self.pools:
                short -= pool.trim(short) if short > 0 else 0
        if short <= 0 and self.tracker.try_reserve("kv", self.kv_asked):
            self.kv_asked = 0
            return True
        for key in self._victims():
            if self.residency.going_bytes() >= short:
                break
            self.residency.start(key, self.residency.base)
        return False

    def _victims(self) -> list[Key]:
        """Experts above their base version that could leave, the least wanted first; what is in flight is given up."""
        order = list(self._wanted)
        rank = {key: i for i, key in enumerate(order)}
        residency, out = self.residency, []
        for key in residency.above():
            entry = residency.entries[key]
            if entry.flying is not None or (entry.ready is not None and entry.ready != entry.base):
                residency.cancel(key)
                if key in self._wanted:
                    self._updates[key] = self._wanted[key]
            if entry.active != entry.base and entry.ready is None and entry.flying is None:
                out.append(key)
        return sorted(out, key=lambda key: -rank.get(key, len(order)))

    # --- seeing

    def waiting(self) -> dict[Key, int]:
        """Promotions that have not begun, and the versions they go to."""
        with self._lock:
            return dict(self._updates)

    def queues(self) -> Queues:
        """Lengths of the queues."""
        with self._lock:
            return Queues(len(self._updates), len(self._evictions), self.residency.in_flight())
