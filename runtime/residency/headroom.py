"""What memory the experts leave: what may be promised, and how it is got at. Decides nothing about who gets it.

Every transition holds two versions for a while and gives one back, so bytes are promised against what will be free once
everything under way has ended, however it ends. Of that a reserve is never promised: a demotion's low version is copied
into it. Where it is lent out, what borrowed it is on its way back, so that a demotion can always go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.policies.contract import Key

from .pools import Pool
from .residency import Residency


class Headroom:
    """The bytes of one residency's pools.

    Attributes:
        tracker: the budget.
        reserve: bytes that promotions and the KV reserve leave: a block of the largest version that a demotion may go
            to, or several, for as many demotions in one step.
        kept: bytes beside base versions that the KV reserve leaves.
        shared: whether bytes of one pool can become another's.
    """

    def __init__(
        self,
        residency: Residency,
        tracker: BudgetTracker,
        pools: Sequence[Pool],
        reserve: int,
        on_host: Sequence[Pool] = (),
        kept: int = 0,
    ) -> None:
        self.tracker, self.reserve, self.kept = tracker, reserve, kept
        self._residency, self._pools, self._on_host = residency, tuple(pools), tuple(on_host)
        self.shared = all(pool.returnable for pool in self._pools)

    def settled(self) -> int:
        """Bytes beyond the reserve that are free once everything under way has ended, at the least."""
        spare = sum(pool.spare_bytes for pool in self._pools)
        return self.tracker.free + spare + self.available() - self.reserve

    def available(self) -> int:
        """Bytes of spare versions, and those that come back at the least once everything under way has ended.

        However it ends: of a transition's two versions one goes, whether its copy arrives or fails.
        """
        residency = self._residency
        with residency.lock:
            size = residency.spare_bytes + sum(self._cost(key, version) for key, version in residency.leaving)
            for key in [*residency.flying, *residency.ready]:
                entry = residency.entries[key]
                version = entry.flying.version if entry.flying else entry.ready
                assert version is not None
                coming = self._cost(key, version)
                size += coming if entry.coming is None else min(coming, self._cost(key, entry.active))
            return size

    def going_bytes(self) -> int:
        """Bytes that demotions under way will free beyond `available`, if their copies arrive."""
        residency = self._residency
        with residency.lock:
            size = 0
            for key in [*residency.flying, *residency.ready]:
                coming = residency.entries[key].coming
                size += max(0, -residency.growth(key, coming)) if coming is not None else 0
            return size

    def going_from(self, pool: Pool) -> int:
        """How many blocks of a pool will be free once everything under way has ended, if its copies arrive."""
        residency = self._residency
        with residency.lock:
            count = sum(residency.pool(key[0], version) is pool for key, version in residency.leaving)
            for key in [*residency.flying, *residency.ready]:
                entry = residency.entries[key]
                if entry.coming is not None and residency.pool(key[0], entry.active) is pool:
                    count += residency.pool(key[0], entry.coming) is not pool
            return count

    def can_lessen(self) -> bool:
        """Whether any expert has more of the device's budget than at its base version, or is on its way to."""
        residency = self._residency
        with residency.lock:
            for position, expert in residency.above():
                entry, least = residency.entries[position, expert], residency.size(position, residency.base)
                coming = entry.flying.version if entry.flying is not None else entry.active
                if max(residency.size(position, entry.active), residency.size(position, coming)) > least:
                    return True
            return False

    def _cost(self, key: Key, version: int) -> int:
        """Bytes that an expert's being at a version takes beside a base version that stays."""
        residency = self._residency
        return 0 if residency.keeps_base and version == residency.base else residency.size(key[0], version)

    def make_block(self, pool: Pool) -> bool:
        """Get a block of a pool from what is spare: a version of that pool, or bytes where the pool can grow; on the
        host, from what other pools there hold and nobody has taken."""
        if not pool.budget_bytes:
            given = 0
            for other in self._on_host:
                given += other.trim(pool.block_bytes - given) if other is not pool else 0
            return given > 0 and pool.can_grow
        return self._residency.drop_spare(pool) > 0 or (pool.can_grow and self.make_bytes(pool.budget_bytes))

    def make_bytes(self, size: int) -> bool:
        """Get bytes into the budget from what is spare: blocks first, then versions. Whether they are free."""
        while (short := size - self.tracker.free) > 0:
            if not any(pool.trim(short) for pool in self._pools) and not self._residency.drop_spare():
                return False
        return True

    def most_kv(self) -> int:
        """Bytes that the KV reserve can have at the most: what base versions leave, or what pools that cannot shrink
        do."""
        tracker = self.tracker
        if not self.shared:
            return tracker.free + tracker.held("kv")
        base = self._residency.base
        least = sum(n * self._residency.size(p, base) for p, n in enumerate(self._residency.experts))
        return tracker.budget - tracker.held("fixed") - least - self.kept
