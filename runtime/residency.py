"""Versioned residency: which versions of each expert are in device memory, and which one its handle points to.

Blocks are taken from pools and filled by `fetch`; a version is published at a window's boundary and only once its fetch
has ended well; the version before it gives its block back after the last window that could read it. Decides nothing
about which version is wanted (transitions.py carries that out), and knows neither torch modules nor files.

Versions are numbers, 0 the most precise. An expert's base version is resident from loading on and never leaves: a
demotion to it is one publication, and there is always something to serve.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .device import Event
from .pools import Block, Pool

Key = tuple[int, int]  # layer position, expert


class State(enum.Enum):
    """What is happening to an expert (dynaexq, section 3.2)."""

    RESIDENT_HI = "resident-hi"  # a version above the base one is active
    RESIDENT_LO = "resident-lo"  # the base version is active
    PROMOTING = "promoting"  # a more precise version is being copied, or waits for the next boundary
    DEMOTING = "demoting"  # a less precise one is, or does
    EVICTING = "evicting"  # a version that was active waits for the last window that could read it


class Outcome(enum.Enum):
    """What became of a request for a version."""

    NOTHING = "nothing"  # it is active, or on its way
    READY = "ready"  # it is resident: the next boundary publishes it
    STARTED = "started"  # its copy has begun
    REFUSED = "refused"  # no block for it, or no budget: ask again
    BUSY = "busy"  # another copy for the expert is in flight: ask again
    FAILED = "failed"  # its copy could not begin


@dataclass(frozen=True, slots=True)
class Resident:
    """A complete version: its block and what the forward pass reads it through."""

    block: Block
    handle: Any


@dataclass(frozen=True, slots=True)
class Flying:
    """A version being copied."""

    version: int
    block: Block
    event: Event


@dataclass(slots=True)
class Entry:
    """One expert. `complete` holds the base version, the active one, and the one that is ready to be published."""

    base: int
    active: int
    complete: dict[int, Resident]
    flying: Flying | None = None
    ready: int | None = None
    leaving: int = 0

    @property
    def state(self) -> State:
        """Its state; of several transitions at once the one towards a new version."""
        coming = self.flying.version if self.flying else self.ready
        if coming is not None and coming != self.active:
            return State.PROMOTING if coming < self.active else State.DEMOTING
        if self.leaving:
            return State.EVICTING
        return State.RESIDENT_LO if self.active == self.base else State.RESIDENT_HI


@dataclass(slots=True)
class Counts:
    """What has happened since loading."""

    promotions: int = 0
    demotions: int = 0
    cancelled: int = 0
    failures: int = 0
    windows: int = 0


@dataclass
class _Windows:
    """Windows that are running, and those whose compute has not ended on the device."""

    begun: int = 0
    open: set[int] = field(default_factory=set)
    ended: dict[int, Event] = field(default_factory=dict)

    def oldest(self) -> int:
        """The number of the oldest window that may still read."""
        self.ended = {n: e for n, e in self.ended.items() if not e.done()}
        return min([*self.open, *self.ended], default=self.begun + 1)


class Residency:
    """The experts of all layers. Every method may be called from any thread; none but `place` waits for a copy.

    Args:
        experts: how many each layer has.
        base: the number of the base version.
        pool: the pool for (layer position, version).
        fetch: starts copying (key, version) into a tensor, returning its event.
        make: the handle of (key, version) over a complete block.
        publish: lets the forward pass see a handle from now on: it must be quick, and cannot fail.
        mark: an event that ends with the compute issued until now.
    """

    def __init__(
        self,
        experts: Sequence[int],
        base: int,
        pool: Callable[[int, int], Pool],
        fetch: Callable[[Key, int, Tensor], Event],
        make: Callable[[Key, int, Tensor], Any],
        publish: Callable[[Key, Any], None],
        mark: Callable[[], Event],
    ) -> None:
        self.experts, self.base = tuple(experts), base
        self.pool, self._fetch, self._make, self._publish, self._mark = pool, fetch, make, publish, mark
        self._lock = threading.RLock()
        self.entries: dict[Key, Entry] = {}
        self._flying: dict[Key, None] = {}
        self._ready: dict[Key, None] = {}
        self._above: set[Key] = set()
        self._leaving: list[tuple[int, Key, Block]] = []
        self._windows = _Windows()
        self.counts = Counts()

    # --- loading

    def place(self, key: Key) -> Any:
        """Load an expert's base version and wait for it; returns its handle. Before serving only.

        Raises:
            MemoryError: when the pool or the budget does not hold it: the caller's arithmetic was wrong.
            MoepackError: when its bytes are damaged.
        """
        block = self.pool(key[0], self.base).allocate()
        if block is None:
            raise MemoryError(f"no block for the base version of expert {key}")
        event = self._fetch(key, self.base, block.tensor)
        event.wait()
        if event.error is not None:
            block.pool.free(block)
            raise event.error
        made = Resident(block, self._make(key, self.base, block.tensor))
        self.entries[key] = Entry(self.base, self.base, {self.base: made})
        return made.handle

    # --- windows

    def begin(self) -> int:
        """Begin a window: publish what is ready, and keep every handle as it is until `end`. Returns its number.

        Where another window is running, nothing is published: its versions do not change under it.
        """
        with self._lock:
            self.boundary()
            self._windows.begun += 1
            self.counts.windows += 1
            self._windows.open.add(self._windows.begun)
            return self._windows.begun

    def end(self, window: int) -> None:
        """End a window: what only it could read may go once its compute has ended."""
        mark = self._mark()
        with self._lock:
            self._windows.open.discard(window)
            if not mark.done():
                self._windows.ended[window] = mark

    def boundary(self) -> int:
        """Publish what is ready, unless a window is running; returns how many versions were published."""
        with self._lock:
            if self._windows.open:
                return 0
            keys = list(self._ready)
            for key in keys:
                self._switch(key)
            return len(keys)

    def switch_now(self, key: Key, version: int) -> None:
        """Publish a complete version inside a window, its predecessor's block being free at once.

        For policies that block, whose one forward pass calls this itself: it reads nothing of the expert then.
        """
        with self._lock:
            entry = self.entries[key]
            if entry.active == version:
                return
            if entry.ready != version:
                self._drop_ready(key)
                entry.ready = version
                self._ready[key] = None
            self._switch(key)
            mine = [leaving for leaving in self._leaving if leaving[1] == key]
            self._leaving = [leaving for leaving in self._leaving if leaving[1] != key]
            for _, _, block in mine:
                entry.leaving -= 1
                block.pool.free(block)

    def _switch(self, key: Key) -> None:
        entry = self.entries[key]
        assert entry.ready is not None
        old, entry.active, entry.ready = entry.active, entry.ready, None
        del self._ready[key]
        (self._above.discard if entry.active == entry.base else self._above.add)(key)
        self._publish(key, entry.complete[entry.active].handle)
        if old < entry.active:
            self.counts.demotions += 1
        else:
            self.counts.promotions += 1
        if old != entry.base:
            self._retire(key, entry.complete.pop(old).block)

    def _retire(self, key: Key, block: Block) -> None:
        self.entries[key].leaving += 1
        self._leaving.append((self._windows.begun, key, block))

    # --- transitions

    def start(self, key: Key, version: int) -> Outcome:
        """Ask for a version of an expert. Never waits; `poll` and a boundary do the rest."""
        with self._lock:
            entry = self.entries[key]
            if entry.flying is not None:
                return Outcome.NOTHING if entry.flying.version == version else Outcome.BUSY
            if entry.ready == version:
                return Outcome.NOTHING
            self._drop_ready(key)
            if entry.active == version:
                return Outcome.NOTHING
            if version in entry.complete:
                entry.ready = version
                self._ready[key] = None
                return Outcome.READY
            block = self.pool(key[0], version).allocate()
            if block is None:
                return Outcome.REFUSED
            try:
                event = self._fetch(key, version, block.tensor)
            except Exception:
                block.pool.free(block)
                raise
            entry.flying = Flying(version, block, event)
            self._flying[key] = None
            return Outcome.STARTED

    def cancel(self, key: Key) -> None:
        """Give up what is on its way for an expert: it stays on its active version."""
        with self._lock:
            entry = self.entries[key]
            if entry.flying is not None:
                entry.flying.event.cancel()
            else:
                self._drop_ready(key)

    def _drop_ready(self, key: Key) -> None:
        """Forget a version that no window has seen; its block is free at once."""
        entry = self.entries[key]
        if entry.ready is None:
            return
        del self._ready[key]
        version, entry.ready = entry.ready, None
        if version not in (entry.base, entry.active):
            block = entry.complete.pop(version).block
            block.pool.free(block)
            self.counts.cancelled += 1

    def poll(self, wanted: Callable[[Key, int], bool]) -> list[tuple[Key, int, BaseException]]:
        """Take note of copies that have ended; returns those that failed, not those that were cancelled.

        Args:
            wanted: whether a version that has arrived is still wanted; where not, its block is free again.
        """
        failed = []
        with self._lock:
            for key in list(self._flying):
                entry = self.entries[key]
                flying = entry.flying
                assert flying is not None
                if not flying.event.done():
                    continue
                del self._flying[key]
                entry.flying = None
                error = flying.event.error
                if error is None and wanted(key, flying.version):
                    handle = self._make(key, flying.version, flying.block.tensor)
                    entry.complete[flying.version] = Resident(flying.block, handle)
                    entry.ready = flying.version
                    self._ready[key] = None
                    continue
                flying.block.pool.free(flying.block)
                if error is None or flying.event.cancelled:
                    self.counts.cancelled += 1
                else:
                    self.counts.failures += 1
                    failed.append((key, flying.version, error))
        return failed

    def reclaim(self) -> int:
        """Free the blocks that no window can read any more; returns their bytes."""
        freed = 0
        with self._lock:
            oldest = self._windows.oldest()
            kept = []
            for last, key, block in self._leaving:
                if last < oldest:
                    self.entries[key].leaving -= 1
                    block.pool.free(block)
                    freed += block.pool.block_bytes
                else:
                    kept.append((last, key, block))
            self._leaving = kept
        return freed

    # --- seeing

    def active(self) -> list[list[int]]:
        """The active version of every expert, by layer."""
        with self._lock:
            return [[self.entries[p, e].active for e in range(n)] for p, n in enumerate(self.experts)]

    def above(self) -> set[Key]:
        """Experts that are above their base version, or on their way to another."""
        with self._lock:
            return self._above | self._flying.keys() | self._ready.keys()

    def in_flight(self) -> int:
        """Copies that have not ended."""
        with self._lock:
            return len(self._flying)

    def going_bytes(self) -> int:
        """Bytes of blocks that are on their way out: retired, or to be retired by the next boundary."""
        with self._lock:
            size = sum(block.pool.block_bytes for _, _, block in self._leaving)
            for key in self._ready:
                entry = self.entries[key]
                if entry.active != entry.base:
                    size += entry.complete[entry.active].block.pool.block_bytes
            return size
