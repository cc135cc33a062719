"""Bytes of the budget that are free or soon will be: how many may be promised to promotions, and how to free them.

Every transition holds two versions of an expert for a while, then frees one. So promotions are promised the bytes that
will be free once all transitions under way have ended, whether they succeed or fail. A reserve is never promised:
demotions copy their low version into it, and give its bytes back when they end. So a demotion can always go on.
"""

from __future__ import annotations

from collections.abc import Iterable

from moepack.runtime.planning.budget import BudgetTracker

from .pools import Pool
from .residency import Residency


class Headroom:
    """Counts and frees bytes in the pools of one `Residency`."""

    def __init__(
        self,
        residency: Residency,
        tracker: BudgetTracker,
        pools: Iterable[Pool],
        reserve: int = 0,
        kept: int = 0,
    ) -> None:
        """Count over all `pools`, of the device and of the host.

        Args:
            reserve: bytes that promotions and the KV reserve leave to demotions: at least one block of the largest
                version that a demotion may go to. With n blocks, n demotions can start in one step.
            kept: bytes that the KV reserve leaves to experts beside their base versions.
        """
        self.residency = residency
        self.tracker = tracker
        self.reserve = reserve
        self.kept = kept
        every = tuple(pools)
        self.pools = tuple(pool for pool in every if pool.budget_bytes)  # on the device
        self._on_host = tuple(pool for pool in every if not pool.budget_bytes)
        self.shared = all(pool.returnable for pool in self.pools)  # whether pools can use each other's bytes

    def settled(self) -> int:
        """Return a lower bound of the bytes, less the reserve, that are free once transitions under way have ended."""
        spare = sum(pool.spare_bytes for pool in self.pools)
        return self.tracker.free + spare + self.available() - self.reserve

    def available(self) -> int:
        """Return the bytes of spare and leaving versions, plus a lower bound of those that other transitions will free.

        A transition frees its old version, or the new one if its copy fails: the smaller of the two counts. Bytes from
        which a better version was decoded (`Residency.source`) are not freed by it.
        """
        residency = self.residency
        with residency.lock:
            size = residency.spare_bytes + sum(residency.cost(key, version) for key, version in residency.leaving)
            for key in [*residency.flying, *residency.ready]:
                entry = residency.entries[key]
                version = entry.flying.version if entry.flying else entry.ready
                assert version is not None
                coming = residency.cost(key, version)
                if version == residency.source and residency.source_of(key) is not None:
                    continue
                freed = residency.cost(key, entry.active)
                if entry.active == residency.source and version < entry.active:
                    freed = 0
                size += coming if entry.coming is None else min(coming, freed)
            return size

    def going_bytes(self) -> int:
        """Return the bytes that demotions under way free if their copies succeed, beyond those in `available`."""
        residency = self.residency
        with residency.lock:
            size = 0
            for key in [*residency.flying, *residency.ready]:
                coming = residency.entries[key].coming
                size += max(0, -residency.growth(key, coming)) if coming is not None else 0
            return size

    def going_from(self, pool: Pool) -> int:
        """Count the blocks of a pool that transitions under way will free if their copies succeed."""
        residency = self.residency
        with residency.lock:
            count = sum(residency.pool(key[0], version) is pool for key, version in residency.leaving)
            for key in [*residency.flying, *residency.ready]:
                entry = residency.entries[key]
                if entry.coming is not None and residency.pool(key[0], entry.active) is pool:
                    count += residency.pool(key[0], entry.coming) is not pool
            return count

    def can_lessen(self) -> bool:
        """Return whether any expert takes, or will take, more bytes of the device's budget than its base version."""
        residency = self.residency
        with residency.lock:
            for position, expert in residency.above():
                entry = residency.entries[position, expert]
                least = residency.size(position, residency.base)
                coming = entry.flying.version if entry.flying is not None else entry.active
                if max(residency.size(position, entry.active), residency.size(position, coming)) > least:
                    return True
            return False

    def make_block(self, pool: Pool) -> bool:
        """Let a pool have one more free block, from unused memory; return whether that succeeded.

        On the device, drop a spare version in the pool, or free bytes by which the pool can grow. On the host, take
        bytes that other host pools hold without using them.
        """
        if not pool.budget_bytes:
            given = 0
            for other in self._on_host:
                given += other.trim(pool.block_bytes - given) if other is not pool else 0
            return given > 0 and pool.can_grow
        return self.residency.drop_spare(pool) > 0 or (pool.can_grow and self.make_bytes(pool.budget_bytes))

    def make_bytes(self, size: int) -> bool:
        """Free `size` bytes of the budget: first unused blocks, then spare versions; return whether they are free."""
        while (short := size - self.tracker.free) > 0:
            if not any(pool.trim(short) for pool in self.pools) and not self.residency.drop_spare():
                return False
        return True

    def reserve_kv(self, size: int) -> bool:
        """Free `size` bytes and reserve them for the KV cache; return whether that succeeded."""
        return self.make_bytes(size) and self.tracker.try_reserve("kv", size)

    def most_kv(self) -> int:
        """Return the most bytes for the KV reserve: those that base versions, or pools that cannot shrink, leave."""
        tracker = self.tracker
        if not self.shared:
            return tracker.free + tracker.held("kv")
        base = self.residency.base
        least = sum(n * self.residency.size(p, base) for p, n in enumerate(self.residency.experts))
        return tracker.budget - tracker.held("fixed") - least - self.kept
