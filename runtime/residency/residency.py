"""Versioned residency: which versions of each expert are in device memory, and which one its handle points to.

Blocks are taken from pools and filled by `fetch`; a version is published once its fetch has ended well, for steps that
begin from then on: those that run keep the snapshot they began with. The version before is spare after the last step
that could read it, and its block goes when somebody needs the bytes. Decides nothing about which version is wanted
(transitions.py carries that out), and knows neither torch modules nor files.

Versions are numbers of a ladder of placements, 0 the best, the last the base; there may be any number of them. Some
take host memory, or none at all: those are nothing to the device's budget. Every expert has one active version,
complete, at every moment: a transition in either direction brings the new version first and lets the old one go later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.devices.contract import Completion
from moepack.runtime.policies.contract import Key
from moepack.runtime.store.files import Cancelled

from .entries import Complete, Copying, ExpertState, Outcome, RunningSteps, TransitionCounts
from .pools import Pool


class Residency:
    """The experts of all layers. Every method may be called from any thread; none but `place` waits for a copy.

    Args:
        experts: how many each layer has.
        base: the number of the base version: what an expert is at while nobody wants another.
        pool: the pool for (layer position, version); None for what takes no memory.
        fetch: starts copying (key, version) into a tensor, returning its event.
        make: the handle of (key, version) over a complete block.
        publish: lets the forward pass see a handle from now on: it must be quick, and cannot fail.
        mark: an event that ends with the compute issued until now.
        keeps_base: whether the base version stays in memory beside a better one: a demotion to it is then one
            publication, and never needs a block.
        snapshot: what a step that begins now will see of all handles.
    """

    def __init__(
        self,
        experts: Sequence[int],
        base: int,
        pool: Callable[[int, int], Pool | None],
        fetch: Callable[[Key, int, Tensor], Completion],
        make: Callable[[Key, int, Tensor | None], Any],
        publish: Callable[[Key, Any], None],
        mark: Callable[[], Completion],
        keeps_base: bool = False,
        snapshot: Callable[[], Any] = lambda: None,
    ) -> None:
        self.experts, self.base, self.keeps_base = tuple(experts), base, keeps_base
        self.pool, self._fetch, self._make, self._publish, self._mark = pool, fetch, make, publish, mark
        self._snapshot = snapshot
        self.lock = threading.RLock()
        self.entries: dict[Key, ExpertState] = {}
        self.flying: dict[Key, None] = {}
        self.ready: dict[Key, None] = {}
        self._above: set[Key] = set()
        self.leaving: dict[tuple[Key, int], int] = {}  # the last step that may read it
        self._spare: dict[tuple[Key, int], None] = {}  # complete, and nobody reads it; the longest so first
        self.spare_bytes = 0
        self.steps = RunningSteps()
        self._waiting_to_go: tuple[Callable[[], None], ...] = ()
        self.counts = TransitionCounts()

    # --- loading

    def place(self, key: Key, version: int) -> Any:
        """Load an expert's first version and wait for it; returns its handle. Before serving only.

        With `keeps_base`, that is the base version.

        Raises:
            MemoryError: when the pool or the budget does not hold it: the caller's arithmetic was wrong.
            MoepackError: when its bytes are damaged.
        """
        pool = self.pool(key[0], version)
        if pool is None:
            made = Complete(None, self._make(key, version, None))
        else:
            block = pool.allocate()
            if block is None:
                raise MemoryError(f"no block for version {version} of expert {key}")
            event = self._fetch(key, version, block.tensor)
            event.wait()
            if event.error is not None:
                pool.free(block)
                raise event.error
            made = Complete(block, self._make(key, version, block.tensor))
        self.entries[key] = ExpertState(self.base, version, {version: made})
        if version != self.base:
            self._above.add(key)
        return made.handle

    # --- steps

    def begin(self) -> tuple[int, Any]:
        """Begin a step. Returns its number, and the snapshot of all handles that it reads until `end`.

        Raises:
            InputError: after `let_go`.
        """
        with self.lock:
            seen = self._snapshot()
            self.steps.begun += 1
            self.counts.steps += 1
            self.steps.open.add(self.steps.begun)
            return self.steps.begun, seen

    def end(self, step: int) -> None:
        """End a step: what only it could read may go once its compute has ended."""
        mark: Completion | None = None
        try:
            mark = self._mark()
        finally:
            with self.lock:
                self.steps.open.discard(step)
                if mark is not None and not mark.done():
                    self.steps.ended[step] = mark
                    self.steps.oldest()  # drops marks that are done: nobody else may be asking
                if not self.steps.open:
                    self._forget()

    def publish_ready(self) -> int:
        """Publish what is ready, for steps that begin from now on; returns how many versions were published."""
        with self.lock:
            keys = list(self.ready)
            for key in keys:
                self._switch(key)
            return len(keys)

    def switch_now(self, key: Key, version: int) -> None:
        """Publish a complete version inside a step, its predecessor's block being free at once.

        For policies that block, whose one forward pass calls this itself: it reads nothing of the expert then.
        """
        with self.lock:
            entry = self.entries[key]
            if entry.active == version:
                return
            if entry.ready != version:
                self._drop_ready(key)
                self._make_ready(key, version)
            self._switch(key)
            for old in list(entry.leaving):
                self._left(key, old)
                self._free(key, old)

    def _switch(self, key: Key) -> None:
        entry = self.entries[key]
        assert entry.ready is not None
        old, entry.active, entry.ready = entry.active, entry.ready, None
        del self.ready[key]
        (self._above.discard if entry.active == entry.base else self._above.add)(key)
        self._publish(key, entry.complete[entry.active].handle)
        if old < entry.active:
            self.counts.demotions += 1
        else:
            self.counts.promotions += 1
        self._leave(key, old)

    def _leave(self, key: Key, version: int) -> None:
        """A version is neither active nor ready any more; steps that have begun may still read it."""
        if not self._pinned(version):
            self.entries[key].leaving.add(version)
            self.leaving[key, version] = self.steps.begun

    def _left(self, key: Key, version: int) -> None:
        """No step reads a version any more."""
        del self.leaving[key, version]
        self.entries[key].leaving.discard(version)
        self._set_aside(key, version)

    def _set_aside(self, key: Key, version: int) -> None:
        if not self.size(key[0], version):  # on the host, or nowhere: it is not kept for the sake of device memory
            self._free(key, version)
            return
        self._spare[key, version] = None
        self.spare_bytes += self._size(key, version)

    def _take_back(self, key: Key, version: int) -> None:
        if (key, version) in self._spare:
            del self._spare[key, version]
            self.spare_bytes -= self._size(key, version)

    def _pinned(self, version: int) -> bool:
        return self.keeps_base and version == self.base

    # --- transitions

    def start(self, key: Key, version: int) -> Outcome:
        """Ask for a version of an expert. Never waits; `poll` and `publish_ready` do the rest."""
        with self.lock:
            entry = self.entries[key]
            if entry.flying is not None:
                return Outcome.NOTHING if entry.coming == version else Outcome.BUSY
            if entry.ready == version:
                return Outcome.NOTHING
            self._drop_ready(key)
            if entry.active == version:
                return Outcome.NOTHING
            if version in entry.complete:
                self._make_ready(key, version)
                return Outcome.READY
            pool = self.pool(key[0], version)
            if pool is None:
                entry.complete[version] = Complete(None, self._make(key, version, None))
                self._make_ready(key, version)
                return Outcome.READY
            block = pool.allocate()
            if block is None:
                return Outcome.REFUSED
            try:
                event = self._fetch(key, version, block.tensor)
            except Exception:
                block.pool.free(block)
                raise
            entry.flying = Copying(version, block, event)
            self.flying[key] = None
            return Outcome.STARTED

    def _make_ready(self, key: Key, version: int) -> None:
        """A complete version is to be published; a spare or leaving one stays."""
        entry = self.entries[key]
        entry.ready = version
        self.ready[key] = None
        entry.leaving.discard(version)
        self.leaving.pop((key, version), None)
        self._take_back(key, version)

    def cancel(self, key: Key) -> None:
        """Give up what is on its way for an expert: it stays on its active version."""
        with self.lock:
            entry = self.entries[key]
            if entry.flying is not None:
                entry.flying.event.cancel()
            else:
                self._drop_ready(key)

    def _drop_ready(self, key: Key) -> None:
        """Forget that a version was to be published. A step may be reading it: it was leaving, perhaps."""
        entry = self.entries[key]
        if entry.ready is None:
            return
        del self.ready[key]
        version, entry.ready = entry.ready, None
        self.counts.cancelled += 1
        self._leave(key, version)

    def poll(self, wanted: Callable[[Key, int], bool]) -> list[tuple[Key, int, BaseException]]:
        """Take note of copies that have ended; returns those that failed, not those that were cancelled.

        Args:
            wanted: whether a version that has arrived is still wanted; where not, it is spare.
        """
        failed = []
        with self.lock:
            for key in list(self.flying):
                entry = self.entries[key]
                flying = entry.flying
                assert flying is not None
                if not flying.event.done():
                    continue
                del self.flying[key]
                coming, entry.flying = entry.coming, None
                error = flying.event.error
                if error is not None:
                    flying.block.pool.free(flying.block)
                    if flying.event.cancelled or isinstance(error, Cancelled):
                        self.counts.cancelled += 1
                    else:
                        self.counts.failures += 1
                        failed.append((key, flying.version, error))
                    continue
                handle = self._make(key, flying.version, flying.block.tensor)
                entry.complete[flying.version] = Complete(flying.block, handle)
                if coming is not None and wanted(key, coming):
                    self._make_ready(key, coming)
                else:
                    self.counts.cancelled += 1
                    self._set_aside(key, flying.version)
        return failed

    def reclaim(self) -> int:
        """Make spare what no step can read any more; returns the bytes."""
        freed = 0
        with self.lock:
            oldest = self.steps.oldest()
            for (key, version), last in list(self.leaving.items()):
                if last < oldest:
                    self._left(key, version)
                    freed += self._size(key, version)
        return freed

    def drop_spare(self, pool: Pool | None = None) -> int:
        """Free the block of the version that has been spare the longest, of one pool or of any; returns its bytes."""
        with self.lock:
            for key, version in self._spare:
                if pool is None or self.pool(key[0], version) is pool:
                    self._free(key, version)
                    return self._size(key, version)
        return 0

    def _free(self, key: Key, version: int) -> None:
        self._take_back(key, version)
        block = self.entries[key].complete.pop(version).block
        if block is not None:
            block.pool.free(block)

    # --- bytes

    def _size(self, key: Key, version: int) -> int:
        """What an expert's being at a version takes beside what it has in any case."""
        return 0 if self._pinned(version) else self.size(key[0], version)

    def size(self, position: int, version: int) -> int:
        """Bytes of the device's budget that a version of a layer's expert takes."""
        pool = self.pool(position, version)
        return 0 if pool is None else pool.budget_bytes

    def growth(self, key: Key, version: int) -> int:
        """Bytes that an expert will take more once it is at `version` and its active one has gone."""
        with self.lock:
            return self._size(key, version) - self._size(key, self.entries[key].active)

    def let_go(self, others: Sequence[Callable[[], None]] = ()) -> None:
        """No step begins and nothing is carried on from now on: forget the callbacks, whose owner knows this.

        `others` are called once the steps that run have ended: they read what they began with until then.
        """

        def gone(*_: Any) -> NoReturn:
            raise InputError("this model was closed: load the bundle again")

        with self.lock:
            self._fetch = self._make = self._publish = self._snapshot = gone
            self._waiting_to_go = tuple(others)
            if not self.steps.open:
                self._forget()

    def _forget(self) -> None:
        others, self._waiting_to_go = self._waiting_to_go, ()
        for forget in others:
            forget()

    def recover(self, pools: Sequence[Pool]) -> None:
        """After a transition that was interrupted anywhere: what is noted of experts follows from their entries, and
        blocks that none of these has are free.

        A copy into one may be under way: one into it from now on is behind that on the stream.
        """
        with self.lock:
            self.flying = {k: None for k, x in self.entries.items() if x.flying is not None}
            self.ready = {k: None for k, x in self.entries.items() if x.ready is not None}
            self._above = {k for k, x in self.entries.items() if x.active != x.base}
            taken = [c.block for x in self.entries.values() for c in x.complete.values()]
            taken += [x.flying.block for x in self.entries.values() if x.flying is not None]
            for pool in pools:
                pool.free_others({b.index for b in taken if b is not None and b.pool is pool})

    # --- seeing

    def above(self) -> set[Key]:
        """Experts that are above their base version, or on their way to another."""
        with self.lock:
            return self._above | self.flying.keys() | self.ready.keys()
