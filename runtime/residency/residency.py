"""Versioned residency: which versions of each expert are in memory, and which one the handle points to.

Blocks come from pools, and `fetch` fills them. A version is published after its fetch has succeeded, for steps that
begin later; running steps keep the snapshot they began with. The previous version becomes spare after the last step
that could read it, and its block is freed when bytes are needed. transitions.py says which version is wanted.

A version is an index into the ladder of placements: 0 is the best, the last is the base. A version in host memory, or
without memory, takes no bytes of the device's budget. Every expert always has one complete active version: a transition
brings the new version first and frees the old one later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from moepack.pack.errors import InputError, MoepackError
from moepack.runtime.devices.contract import Completion
from moepack.runtime.policies.contract import Key
from moepack.runtime.store.files import Cancelled
from moepack.runtime.store.loading import AHEAD, in_order

from .entries import Complete, Copying, ExpertState, Outcome, RunningSteps, TransitionCounts
from .pools import Block, Pool

if TYPE_CHECKING:
    from moepack.runtime.experts.handles import Handle


class Residency:
    """The experts of all layers. Every method may be called from any thread; only `place` waits for a copy.

    Args:
        experts: the number of experts of each layer, [layers].
        base: the index of the base version.
        pool: returns the pool for (layer position, version); None for a version that takes no memory.
        fetch: starts copying (key, version) to a tensor; returns the copy's event. A key is (layer position, expert).
        make: returns the handle of (key, version), through which a forward pass reads the complete block.
        publish: makes later forward passes use a handle. It must be quick, and must not fail.
        mark: returns an event that ends when all computation issued so far has ended.
        keeps_base: whether the base version stays in memory beside a better one. A demotion to it then needs no block.
        snapshot: returns all handles, for a step that begins now.
        source: a version whose bytes stay while a better one is active, because the better one is decoded from them
            and goes back to it. No step runs it.
    """

    def __init__(
        self,
        experts: Sequence[int],
        base: int,
        pool: Callable[[int, int], Pool | None],
        fetch: Callable[[Key, int, Tensor], Completion],
        make: Callable[[Key, int, Tensor | None], Handle],
        publish: Callable[[Key, Handle], None],
        mark: Callable[[], Completion],
        keeps_base: bool = False,
        snapshot: Callable[[], Any] = lambda: None,
        source: int | None = None,
    ) -> None:
        self.experts = tuple(experts)
        self.base = base
        self.keeps_base = keeps_base
        self.source = source
        self.pool = pool
        self._fetch = fetch
        self._make = make
        self._publish = publish
        self._mark = mark
        self._snapshot = snapshot
        self.lock = threading.RLock()
        self.entries: dict[Key, ExpertState] = {}
        self.active = [[base] * n for n in self.experts]  # each expert's active version, as in `entries`
        self.flying: dict[Key, None] = {}
        self.ready: dict[Key, None] = {}
        self._above: set[Key] = set()
        self.leaving: dict[tuple[Key, int], int] = {}  # (expert, version): the last step that may read it
        self._spare: dict[tuple[Key, int], None] = {}  # complete versions that no step reads; the oldest first
        self.spare_bytes = 0
        self.steps = RunningSteps()
        self._waiting_to_go: tuple[Callable[[], None], ...] = ()
        self.counts = TransitionCounts()

    # --- loading

    def place(
        self,
        first: Iterable[tuple[Key, int]],
        ahead: int,
        loaded: Callable[[Key, int], None],
        failed: Callable[[Key, int, BaseException], None],
    ) -> Iterator[tuple[Key, Handle]]:
        """Load experts' first versions, and with `keeps_base` their base; yield the handles. Only before serving.

        All blocks are taken before the first fetch, so that a CPU's huge pages are whole when they are written. Blocks
        in host memory are filled first, several at a time: they are pinned as they are filled, and others are copied
        from there. Of the others, up to `ahead` more fetches are started before one is waited for.

        Args:
            first: the experts and their versions, in the order in which they are fetched.
            loaded: called with each expert and version that is complete.
            failed: called with a version above the base whose fetch failed: its expert gets the base.

        Raises:
            MemoryError: when the pool or the budget has no block for it: the caller's arithmetic was wrong.
            MoepackError: when a base version's bytes are damaged.
        """
        asked = dict(first)
        rows = {k: tuple(dict.fromkeys((self.base, v) if self.keeps_base else (v,))) for k, v in asked.items()}
        taken = [(key, number, self._take(key, number)) for key, row in rows.items() for number in row]
        complete: dict[Key, dict[int, Complete]] = {key: {} for key in rows}
        on_host = [of for of in taken if of[2] is not None and of[2].pool.on_host]
        self._fill(on_host, AHEAD, complete, loaded, failed)
        self._fill([of for of in taken if of[2] is None or not of[2].pool.on_host], ahead, complete, loaded, failed)
        lacking = [(key, self.base, self._take(key, self.base)) for key, of in complete.items() if not of]
        self._fill(lacking, ahead, complete, loaded, failed)
        for key, of in complete.items():
            best = min(of)
            self.entries[key] = ExpertState(best, of)
            self.active[key[0]][key[1]] = best
            if best != self.base:
                self._above.add(key)
            yield key, of[best].handle

    def _fill(
        self,
        taken: Sequence[tuple[Key, int, Block | None]],
        ahead: int,
        complete: dict[Key, dict[int, Complete]],
        loaded: Callable[[Key, int], None],
        failed: Callable[[Key, int, BaseException], None],
    ) -> None:
        """Fetch versions into the blocks taken for them, and add them to `complete`."""
        filled = []
        for (key, number, block), fetch in in_order(taken, lambda x: self._start(*x), ahead):
            if fetch is None or fetch.error is None:
                if block is not None:
                    block.filled()
                filled.append((key, number, block))
                loaded(key, number)
            elif number == self.base or not isinstance(fetch.error, MoepackError | OSError):
                raise fetch.error
            else:
                assert block is not None
                block.pool.free(block)
                block.pool.trim(block.pool.block_bytes)  # the bytes that the base takes instead
                failed(key, number, fetch.error)
        for key, number, block in filled:  # all host memory is pinned by now, where it stays
            complete[key][number] = self._complete(key, number, block)
            if number == self.base:  # a better version with its bytes may be copied from there
                self.entries[key] = ExpertState(self.base, complete[key])

    def _complete(self, key: Key, version: int, block: Block | None) -> Complete:
        return Complete(block, self._make(key, version, None if block is None else block.tensor))

    def _take(self, key: Key, version: int) -> Block | None:
        pool = self.pool(key[0], version)
        if pool is None:
            return None
        block = pool.allocate()
        if block is None:
            raise MemoryError(f"no block for version {version} of expert {key}")
        return block

    def _start(self, key: Key, version: int, block: Block | None) -> Completion | None:
        return None if block is None else self._fetch(key, version, block.tensor)

    # --- steps

    def begin(self) -> tuple[int, Any]:
        """Begin a step. Returns its number, and the snapshot of all handles that it reads until `end`.

        Raises:
            InputError: after `let_go`.
        """
        with self.lock:
            seen = self._snapshot()
            self.steps.begun += 1
            self.steps.open[self.steps.begun] = threading.get_ident()
            return self.steps.begun, seen

    def end(self, step: int) -> None:
        """End a step. Versions that only this step could read may be freed once its computation has ended."""
        mark: Completion | None = None
        try:
            mark = self._mark()
        finally:
            with self.lock:
                self.steps.open.pop(step, None)
                if mark is not None and not mark.done():
                    self.steps.ended[step] = mark
                    self.steps.oldest()  # drops marks that are done: no other call may come to do so
                if not self.steps.open:
                    self._forget()

    def end_interrupted(self) -> None:
        """End the steps of this thread that an interruption left open. None of its passes runs."""
        with self.lock:
            left = [step for step, thread in self.steps.open.items() if thread == threading.get_ident()]
        for step in left:
            self.end(step)

    def publish_ready(self) -> int:
        """Publish the ready versions, for steps that begin from now on; return how many there were."""
        with self.lock:
            keys = list(self.ready)
            for key in keys:
                self._switch(key)
            return len(keys)

    def switch_now(self, key: Key, version: int) -> None:
        """Publish a complete version inside a step, and free its predecessor at once.

        Only the one running pass of a policy that blocks calls this, at a time when it does not read the expert.
        """
        with self.lock:
            entry = self.entries[key]
            if entry.active == version:
                return
            if entry.ready != version:
                self._drop_ready(key)
                self._make_ready(key, version)
            self._switch(key)
            for old in [version for version in entry.complete if (key, version) in self.leaving]:
                self._left(key, old)
                self._free(key, old)

    def _switch(self, key: Key) -> None:
        entry = self.entries[key]
        assert entry.ready is not None
        source = self.source
        beneath = self.source_of(key)
        old = entry.active
        entry.active = entry.ready
        entry.ready = None
        self.active[key[0]][key[1]] = entry.active
        del self.ready[key]
        (self._above.discard if entry.active == self.base else self._above.add)(key)
        self._publish(key, entry.complete[entry.active].handle)
        if source is not None and beneath is not None and old != source < entry.active:
            self._leave(key, source)
        self.counts.demotions += old < entry.active
        self.counts.promotions += old > entry.active
        self._leave(key, old)

    def _leave(self, key: Key, version: int) -> None:
        """Note that a version is no longer active or ready. Steps that have begun may still read it."""
        entry = self.entries[key]
        if self._pinned(version) or (version == self.source and entry.active < version):
            return
        self.leaving[key, version] = self.steps.begun

    def _left(self, key: Key, version: int) -> None:
        del self.leaving[key, version]
        self._set_aside(key, version)

    def _set_aside(self, key: Key, version: int) -> None:
        if self.size(key[0], version):
            self._spare[key, version] = None
            self.spare_bytes += self.cost(key, version)
        else:  # on the host or absent: only device memory keeps spare versions
            self._free(key, version)

    def _take_back(self, key: Key, version: int) -> None:
        if (key, version) in self._spare:
            del self._spare[key, version]
            self.spare_bytes -= self.cost(key, version)

    def _pinned(self, version: int) -> bool:
        return self.keeps_base and version == self.base

    # --- transitions

    def start(self, key: Key, version: int) -> Outcome:
        """Request a version of an expert. Never waits; `poll` and `publish_ready` complete the request."""
        with self.lock:
            entry = self.entries[key]
            if entry.coming == version:
                return Outcome.NOTHING
            if entry.flying is not None:
                return Outcome.BUSY
            self._drop_ready(key)
            if entry.active == version:
                return Outcome.NOTHING
            pool = self.pool(key[0], version)
            if pool is None and version not in entry.complete:
                entry.complete[version] = Complete(None, self._make(key, version, None))
            if pool is None or version in entry.complete:
                self._make_ready(key, version)
                return Outcome.READY
            block = pool.allocate()
            if block is None:
                return Outcome.REFUSED
            try:
                event = self._fetch(key, version, block.tensor)
            except Exception:
                pool.free(block)
                raise
            entry.flying = Copying(version, block, event)
            self.flying[key] = None
            return Outcome.STARTED

    def _make_ready(self, key: Key, version: int) -> None:
        """Mark a complete version to be published next. If it was spare or leaving, it stays in memory."""
        entry = self.entries[key]
        entry.ready = version
        self.ready[key] = None
        self.leaving.pop((key, version), None)
        self._take_back(key, version)

    def cancel(self, key: Key) -> None:
        """Cancel an expert's transition. The expert keeps its active version."""
        with self.lock:
            entry = self.entries[key]
            if entry.flying is not None:
                entry.flying.event.cancel()
            else:
                self._drop_ready(key)

    def _drop_ready(self, key: Key) -> None:
        """Withdraw the ready version, if there is one. If it was active before, a step may still read it."""
        entry = self.entries[key]
        version = entry.ready
        entry.ready = None
        if version is not None:
            del self.ready[key]
            self.counts.cancelled += 1
            self._leave(key, version)

    def poll(self, wanted: Callable[[Key, int], bool]) -> list[tuple[Key, int, BaseException]]:
        """Make versions ready whose copies have ended; return the copies that failed, without cancelled ones.

        `wanted` says whether a version that has arrived is still wanted; otherwise it becomes spare.
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
                coming = entry.coming
                entry.flying = None
                error = flying.event.error
                if error is not None:
                    flying.block.pool.free(flying.block)
                    if flying.event.cancelled or isinstance(error, Cancelled):
                        self.counts.cancelled += 1
                    else:
                        failed.append((key, flying.version, error))
                    continue
                flying.block.filled()
                entry.complete[flying.version] = self._complete(key, flying.version, flying.block)
                if flying.version == self.source and entry.active < flying.version:
                    continue  # a step may run the decoded version, and none runs its source: it stays beneath
                if coming is not None and wanted(key, coming):
                    self._make_ready(key, coming)
                else:
                    self.counts.cancelled += 1
                    self._set_aside(key, flying.version)
        return failed

    def reclaim(self) -> None:
        """Mark leaving versions spare once no step can read them."""
        with self.lock:
            oldest = self.steps.oldest()
            for (key, version), last in list(self.leaving.items()):
                if last < oldest:
                    self._left(key, version)

    def drop_spare(self, pool: Pool | None = None) -> int:
        """Free the block of the oldest spare version, in `pool` or in any pool; return its bytes, or 0 without one."""
        with self.lock:
            for key, version in self._spare:
                if pool is None or self.pool(key[0], version) is pool:
                    self._free(key, version)
                    return self.cost(key, version)
        return 0

    def _free(self, key: Key, version: int) -> None:
        self._take_back(key, version)
        block = self.entries[key].complete.pop(version).block
        if block is not None:
            block.pool.free(block)

    # --- bytes

    def cost(self, key: Key, version: int) -> int:
        """Return the bytes that a version of an expert adds; a base version that always stays adds 0."""
        return 0 if self._pinned(version) else self.size(key[0], version)

    def size(self, position: int, version: int) -> int:
        """Return the bytes of the device's budget that a version of a layer's expert takes."""
        pool = self.pool(position, version)
        return 0 if pool is None else pool.budget_bytes

    def growth(self, key: Key, version: int) -> int:
        """Return how many more bytes an expert takes at `version` than at its active version."""
        with self.lock:
            active = self.entries[key].active
            source = self.source
            growth = self.cost(key, version) - self.cost(key, active)
            if source is None or self.source_of(key) is None:
                return growth
            beneath = self.cost(key, source)  # bytes that stay beside a better version
            return growth + beneath * ((version < source) - (active < source))

    def source_of(self, key: Key) -> Complete | None:
        """Return the bytes of `source` that stay in memory for an expert; None if there are none."""
        with self.lock:
            entry = self.entries.get(key)
            source = self.source
            if entry is None or source is None or source < entry.active or (key, source) in self.leaving:
                return None
            return None if (key, source) in self._spare else entry.complete.get(source)

    def let_go(self, others: Sequence[Callable[[], None]] = ()) -> None:
        """Refuse steps and transitions from now on. Forget the callbacks: they hold a reference to their owner.

        The functions in `others` are called once the running steps have ended.
        """

        def gone(*_: object) -> NoReturn:
            raise InputError("this model was closed: load the bundle again")

        with self.lock:
            self._fetch = self._make = self._publish = self._snapshot = gone
            self._waiting_to_go = tuple(others)
            if not self.steps.open:
                self._forget()

    def _forget(self) -> None:
        others = self._waiting_to_go
        self._waiting_to_go = ()
        for mark in self.steps.ended.values() if others else ():  # the device may still read what is let go
            with contextlib.suppress(RuntimeError):  # the device may be gone
                mark.wait()
        for forget in others:
            forget()

    def recover(self, pools: Sequence[Pool]) -> None:
        """Rebuild the queues from the experts' entries after an interruption, and free blocks that no entry holds.

        A copy into such a block may be under way: wait for it (`Device.rest`) before the next copy begins.
        """
        with self.lock:
            self.flying = {k: None for k, x in self.entries.items() if x.flying is not None}
            self.ready = {k: None for k, x in self.entries.items() if x.ready is not None}
            self._above = {k for k, x in self.entries.items() if x.active != self.base}
            for (p, e), x in self.entries.items():
                self.active[p][e] = x.active
            taken = [c.block for x in self.entries.values() for c in x.complete.values()]
            taken += [x.flying.block for x in self.entries.values() if x.flying is not None]
            for pool in pools:
                pool.free_others({b.index for b in taken if b is not None and b.pool is pool})

    # --- seeing

    def above(self) -> set[Key]:
        """Return the experts that are above their base version, or on their way to another version."""
        with self.lock:
            return self._above | self.flying.keys() | self.ready.keys()
