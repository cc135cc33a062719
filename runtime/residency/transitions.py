"""The transition pipeline: from wanted versions to copies, demotions and freed blocks (dynaexq, section 3.4).

`tick` does one round of work and never waits, so a thread, a test or a simulator may call it. A policy says which
versions are wanted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moepack.pack.errors import MoepackError
from moepack.runtime.policies.contract import Key, in_turns

from .entries import Outcome
from .headroom import Headroom
from .pools import Pool

log = logging.getLogger("moepack.runtime")
# How many waiting promotions evictions make room for at a time, for each running step. With more, experts would be
# demoted long before others are promoted.
AHEAD = 4
IN_FLIGHT = 2  # the most promotions on the migration stream at a time; only memory limits demotions
RETRY = 30.0  # seconds until a failed copy is tried again, if it is still wanted then


@dataclass(frozen=True, slots=True)
class Queues:
    """Lengths of the queues, and the copies in flight."""

    updates: int  # promotions that have not begun
    evictions: int  # demotions that have not begun
    in_flight: int  # copies in flight


def fails(key: Key, version: int, error: BaseException) -> None:
    """Raise the error of a failed copy: without this version an expert would be absent."""
    raise error


def makes_room(transitions: weakref.ref[Transitions]) -> bool:
    """Return whether the KV reserve waits for room; weak, as the device, which asks, goes with the model at once."""
    of = transitions()
    return of is not None and of.kv_asked > 0


class Transitions:
    """Brings experts to their target placements, inside the budget. Every method may be called from any thread."""

    def __init__(
        self, headroom: Headroom, stays: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with every expert's target at the base, until `want` is called.

        Args:
            stays: a version to which experts go for the KV reserve before any goes to a base that takes no memory.
            clock: returns seconds.
        """
        self.residency = residency = headroom.residency
        self.headroom = headroom
        self._clock = clock
        sizes = sorted({residency.size(p, v) for p in range(len(residency.experts)) for v in range(residency.base + 1)})
        self._least = min([b - a for a, b in itertools.pairwise(sizes)], default=0)  # the least that a promotion adds
        self.lock = threading.RLock()  # while it is held, no other thread changes transitions
        self._wanted: dict[Key, int] = {}
        self._worth: Callable[[Key], float] = lambda key: 0.0
        self._exact = False
        self._updates: dict[Key, int] = {}  # moves that have not begun and are not evictions: mostly promotions
        self._evictions: dict[Key, int] = {}  # experts to be demoted, and the placements they go to
        self._pushed: dict[Key, int] = {}  # where experts went for the KV reserve, whatever `_wanted` says
        self._lowered = (residency.base,) if stays is None else (stays, residency.base)
        self._failed: dict[tuple[Key, int], float] = {}
        self._logged: set[str] = set()
        self.kv_asked = 0  # bytes that the KV reserve is still to grow by
        self.refusals = self.failures = 0  # rounds that put off a promotion for lack of room; failed copies

    def want(
        self, wanted: Mapping[Key, int], worth: Callable[[Key], float] = lambda key: 0.0, exact: bool = False
    ) -> None:
        """Set the target placements. Experts that `wanted` does not name go to the base.

        Named experts whose move frees no device bytes move in the order of `wanted`. Moves that free bytes wait until
        bytes are needed; experts that go to the base then move first, in the order of increasing `worth`. With `exact`,
        named experts that leave the device move at once, before all others. An expert that is not named and would free
        no bytes stays. Transitions that are no longer wanted are cancelled.
        """
        with self.lock:
            self._wanted = dict(wanted)
            self._worth = worth
            self._exact = exact
            self._queue()

    def _queue(self) -> None:
        self._updates.clear()
        residency = self.residency
        evicted = []
        for key in in_turns(residency.above() | self._wanted.keys()):
            entry = residency.entries[key]
            target = self._target(key)
            if entry.coming is not None and entry.coming != target:
                residency.cancel(key)
            if entry.active != target and entry.coming != target and self._lessens(key, target):
                evicted.append(key)
        evicted.sort(key=lambda key: (self._target(key) != residency.base, self._worth(key)))
        self._evictions = {key: self._target(key) for key in evicted}
        leaving: dict[Key, int] = {}
        for key, target in in_turns(self._wanted.items()):
            entry = residency.entries[key]
            if self._target(key) != target or entry.active == target or entry.coming == target:
                continue
            if not self._lessens(key, target):
                (leaving if residency.growth(key, target) < 0 else self._updates)[key] = target
        self._updates = leaving | self._updates

    def _lessens(self, key: Key, target: int) -> bool:
        growth = self.residency.growth(key, target)
        base = self.residency.base
        named = self._wanted.get(key) == target
        leaves = named and self._exact and not self.residency.size(key[0], target)
        return (growth < 0 and not leaves) or (target == base and not named)

    def _target(self, key: Key) -> int:
        return self._pushed.get(key, self._wanted.get(key, self.residency.base))

    def tick(self) -> None:
        """Run one round: publish arrived versions, mark old ones spare, begin evictions and promotions. Never waits."""
        with self.lock:
            for key, version, error in self.residency.poll(lambda key, version: self._target(key) == version):
                self.note_failure(key, version, error)
            self.residency.publish_ready()
            self.residency.reclaim()
            if not self.kv_asked or self._settle_kv():
                self._admit() if self.headroom.shared else self._admit_divided()
            if self.residency.publish_ready():  # versions that were resident already
                self.residency.reclaim()

    def _admit(self) -> None:
        """Begin the updates (`_updates`: promotions and the like) that fit, in order; evict experts for the others.

        Let R be the headroom (bytes not promised yet), D the bytes that demotions under way will free, and E the bytes
        that evictions not yet begun could free. An update that adds g bytes begins when g <= R. It waits for evictions
        when R < g <= R + D + E, and keeps g bytes of this sum; an update that begins later takes its bytes from both R
        and the sum. So every waiting update gets its bytes in the end, and memory does not idle meanwhile. An update
        larger than the sum holds up no other.

        Evictions begin for the first AHEAD * (running steps) waiting updates, to free the sum of their g less R and D.

        A block is free once every step that can read it has ended. That takes longer the more steps run at once, so
        each step has a reserve for demotions. With one reserve for all, four threads got a third of the promotions that
        one thread got.
        """
        residency = self.residency
        steps = max(1, len(self.residency.steps.open))
        ahead = AHEAD * steps
        headroom = self.headroom.settled() - (steps - 1) * self.headroom.reserve  # R
        after_evictions: int | None = None  # R + D + E, less what waiting updates keep; None while none waits
        waiting = short = fitting = 0  # waiting updates, bytes of the first ones, updates that wait for the stream
        for key, version in list(self._updates.items()):
            full = len(residency.flying) >= IN_FLIGHT
            pool = residency.pool(key[0], version)
            if pool is None or not pool.budget_bytes:  # it takes no device memory, so it waits for no other
                begins = not full and self.may_try(key, version)
                if begins and self._begin(key, version) not in (Outcome.REFUSED, Outcome.BUSY):
                    self._updates.pop(key, None)
                continue
            if (full or headroom < self._least) and max(waiting, fitting) >= ahead:
                continue
            growth = max(0, residency.growth(key, version))
            if not self.may_try(key, version):
                continue
            if growth > max(headroom, 0):
                if after_evictions is None:
                    after_evictions = headroom + self.headroom.going_bytes() + self._evictable()
                if growth <= after_evictions:
                    after_evictions -= growth
                    waiting += 1
                    short += growth if waiting <= ahead else 0
                continue
            if after_evictions is not None:
                if growth > max(after_evictions, 0):
                    continue
                after_evictions -= growth
            headroom -= growth
            if full:
                fitting += 1
            elif self._begin(key, version) not in (Outcome.REFUSED, Outcome.BUSY):
                self._updates.pop(key, None)
        if waiting:
            self.refusals += 1
            self._evict(short - headroom - self.headroom.going_bytes())

    def _admit_divided(self) -> None:
        """Begin updates where pools cannot share bytes: an update without a block waits for an eviction in its pool."""
        residency = self.residency
        waiting = dict[int, int]()
        for key, version in list(self._updates.items()):
            if len(residency.flying) >= IN_FLIGHT or sum(waiting.values()) >= AHEAD:
                break
            if not self.may_try(key, version):
                continue
            outcome = self._begin(key, version)
            if outcome is Outcome.REFUSED:
                pool = residency.pool(key[0], version)
                assert pool is not None, "a version without memory is never refused"
                waiting[id(pool)] = waiting.get(id(pool), 0) + 1
                if self.headroom.going_from(pool) < waiting[id(pool)]:
                    self._evict_from(pool)
            elif outcome is not Outcome.BUSY:
                self._updates.pop(key, None)
        if waiting:
            self.refusals += 1

    def _evict_from(self, pool: Pool) -> None:
        residency = self.residency
        for key, to in list(self._evictions.items()):
            if residency.pool(key[0], residency.entries[key].active) is not pool or not self.may_try(key, to):
                continue
            outcome = self._begin(key, to)
            if outcome is Outcome.REFUSED and to != residency.base:
                outcome = self._begin(key, residency.base)  # else two that want each other's blocks would never move
                if outcome in (Outcome.STARTED, Outcome.READY):
                    self._updates[key] = to
            if outcome in (Outcome.STARTED, Outcome.READY):
                self._evictions.pop(key, None)
                return

    def _evictable(self) -> int:
        growth = self.residency.growth
        return sum(-growth(key, to) for key, to in self._evictions.items() if self.may_try(key, to))

    def _evict(self, needed: int) -> None:
        for key, to in list(self._evictions.items()):
            if needed <= 0:
                return
            if not self.may_try(key, to):
                continue
            gain = -self.residency.growth(key, to)
            if gain <= 0:
                continue
            outcome = self._begin(key, to)
            if outcome is Outcome.REFUSED:
                return  # other demotions use the reserve, and give it back first
            if outcome is not Outcome.BUSY:
                self._evictions.pop(key, None)
                needed -= gain

    def _begin(self, key: Key, version: int) -> Outcome:
        try:
            return self.start(key, version)
        except (MoepackError, OSError) as error:
            self.note_failure(key, version, error)
            return Outcome.BUSY

    def start(self, key: Key, version: int) -> Outcome:
        """Start a transition. If its pool has no free block, free one from unused memory.

        Raises:
            MoepackError, OSError: when the copy cannot begin.
        """
        outcome = self.residency.start(key, version)
        if outcome is Outcome.REFUSED:
            pool = self.residency.pool(key[0], version)
            if pool is not None and self.headroom.make_block(pool):
                outcome = self.residency.start(key, version)
        return outcome

    def may_try(self, key: Key, version: int) -> bool:
        """Return whether a version may be copied: its copy never failed, or RETRY seconds have passed since then."""
        failed = self._failed.get((key, version))
        return failed is None or self._clock() - failed >= RETRY

    def note_failure(self, key: Key, version: int, error: BaseException) -> None:
        """Count a failed copy, log each message once, and queue the move again if the version is still wanted."""
        self.failures += 1
        self._failed[key, version] = self._clock()
        self._pushed.pop(key, None)
        if str(error) not in self._logged:
            self._logged.add(str(error))
            log.warning("position %d, expert %d stays on its version: %s", *key, error)
        if self._target(key) == version:
            (self._evictions if self._lessens(key, version) else self._updates)[key] = version

    # --- the KV reserve

    def grow_kv(self, size: int) -> bool:
        """Reserve `size` more bytes for KV caches; return whether they are reserved already. Never waits.

        If they are not free, experts are evicted, the least wanted first. The reserve (`kv_bytes`) grows when these
        experts have left device memory, and promotions wait until then.

        Raises:
            MemoryError: when base versions, or pools that cannot shrink, leave too few bytes.
        """
        with self.lock:
            most = self.headroom.most_kv()
            if self.kv_bytes + self.kv_asked + size > most:
                raise MemoryError(f"a KV reserve of {self.kv_bytes + size} bytes: the experts leave {most}")
            self.kv_asked += size
            return self._settle_kv()

    def shrink_kv(self, size: int) -> None:
        """Give back `size` bytes of the KV reserve, first those that were asked for and are not reserved yet."""
        with self.lock:
            asked = min(size, self.kv_asked)
            self.kv_asked -= asked
            self.headroom.tracker.release("kv", size - asked)
            if not self.kv_asked:
                self._recall()

    @property
    def kv_bytes(self) -> int:
        """Bytes reserved for the KV cache."""
        return self.headroom.tracker.held("kv")

    def _settle_kv(self) -> bool:
        short = self._kv_short()
        if short <= 0 and self.headroom.reserve_kv(self.kv_asked):
            self.kv_asked = 0
            self._recall()
            return True
        if short > self.headroom.going_bytes():
            self._push_out()
        return False

    def _kv_short(self) -> int:
        """Return how many bytes the KV reserve lacks. With all experts at the base, demotions need no reserve."""
        reserve = self.headroom.reserve if self.headroom.can_lessen() else 0
        return self.kv_asked + reserve - (self.headroom.settled() + self.headroom.reserve)

    def _push_out(self) -> None:
        """Cancel promotions, then demote experts, the least wanted first, until enough bytes will come free."""
        residency = self.residency
        rank = {key: i for i, key in enumerate(self._wanted)}
        order = sorted(residency.above(), key=lambda key: (-rank.get(key, len(rank)), self._worth(key), key))
        for key in order:
            entry = residency.entries[key]
            if entry.coming is not None and residency.growth(key, entry.coming) > 0:
                if key in self._wanted:
                    self._updates[key] = self._wanted[key]
                residency.cancel(key)
        for to, key in itertools.product(self._lowered, order):
            if self._kv_short() <= self.headroom.going_bytes():
                return
            frees = residency.entries[key].flying is None and residency.growth(key, to) < 0
            if frees and self.may_try(key, to):
                self._pushed[key] = to
                if self._begin(key, to) is Outcome.REFUSED:
                    return

    def _recall(self) -> None:
        """Give experts that were evicted for the KV reserve their targets back, once the reserve has its bytes."""
        if self._pushed:
            self._pushed.clear()
            self._queue()

    # --- seeing

    def waiting(self) -> dict[Key, int]:
        """Return the promotions that have not begun, and their versions."""
        with self.lock:
            return dict(self._updates)

    def queues(self) -> Queues:
        """Return the lengths of the queues."""
        with self.lock:
            return Queues(len(self._updates), len(self._evictions), len(self.residency.flying))
