"""Loading on demand: the forward pass waits for the experts of a layer, and the next layer's are prefetched.

The one running forward pass calls the loader before a layer's experts run. No other step runs, so no step reads the
experts that are evicted. The policy names the experts (policies/contract.py, `LayerReached`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from moepack.pack.errors import BundleError, InputError, MoepackError
from moepack.runtime.devices.contract import Completion
from moepack.runtime.policies.contract import Changes, Key, Wanted

from .entries import Outcome
from .transitions import Transitions


@dataclass(slots=True)
class MovedBytes:
    """Stored bytes that were copied while serving, by use. The bytes of a cancelled prefetch do not count."""

    demand_bytes: int = 0  # fetched when their layer was reached: the layer waited
    prefetch_bytes: int = 0  # fetched before their layer was reached
    prefetch_in_time: int = 0  # of those, complete when their layer needed them
    prefetch_late: int = 0  # of those, still on their way when needed: their layer waited for the rest
    prefetch_wasted: int = 0  # of those, not needed, or needed at another placement


@dataclass(slots=True)
class _Prefetch:
    """A prefetch that was cancelled, or whose layer has not been reached since the prefetch began."""

    version: int
    size: int
    event: Completion
    landed: bool = False  # whether the copy has arrived


class OnDemandLoader:
    """Carries out a policy's answers to `LayerReached`."""

    def __init__(
        self, transitions: Transitions, size: Callable[[Key, int], int], name: Callable[[Key, int], str] | None
    ) -> None:
        """Load through `transitions`.

        Args:
            size: returns the stored bytes of a version of an expert.
            name: names a version of an expert in errors. It is given where the base is `absent`: a copy that fails then
                ends the pass. Without it, the expert runs at its base version.
        """
        self.moved = MovedBytes()
        # how many copies passes waited for, and the seconds of that
        self.waits = 0
        self.waited = 0.0
        self._residency = transitions.residency
        self._transitions = transitions
        self._size = size
        self._name = name
        self._ahead: dict[Key, _Prefetch] = {}
        self._beside: dict[Key, _Prefetch] = {}  # whose present version serves meanwhile
        self._given_up: list[_Prefetch] = []
        self._waiting: set[Key] = set()

    def where(self, position: int) -> tuple[list[int], list[int]]:
        """Publish arrived copies; return a layer's placements, and those being copied (-1: none), [experts] each."""
        with self._transitions.lock:
            self._note()
            residency = self._residency
            coming = [-1] * residency.experts[position]
            for layer, e in residency.flying:
                if layer == position and (version := residency.entries[layer, e].coming) is not None:
                    coming[e] = version
            return residency.active[position].copy(), coming

    def reach(self, position: int, wanted: Wanted) -> list[int]:
        """Carry out `wanted`: evictions, then copies for this layer, then prefetches and moves that nobody waits for.

        Waits for this layer's copies. An expert that is to go back to the bytes from which it was decoded goes to the
        base if these are not in memory.

        Returns:
            The placement from which each copy came that the layer waited for.

        Raises:
            BundleError: when a copy for this layer fails and its expert has no other version.
            InputError: when the model was closed meanwhile.
        """
        residency = self._residency
        at_rest = (residency.base, residency.source)  # placements at which no expert runs: nobody waits for them
        with self._transitions.lock:  # else another pass that waits for room might publish arrived copies first
            stay = dict(wanted)
            if not isinstance(wanted, Changes):
                stay |= dict.fromkeys(residency.above() - wanted.keys(), residency.base)
            for key in [k for k in self._ahead if k[0] == position and k not in stay]:
                self._give_up(key)
            for key, version in stay.items():  # moves that free bytes go first, as do versions to be replaced
                if version in at_rest:
                    self._leave(key, residency.base if residency.source_of(key) is None else version)
                    continue
                if (ahead := self._ahead.get(key)) is not None and ahead.version != version:
                    self._give_up(key)
                if residency.entries[key].active not in (version, *at_rest):
                    residency.switch_now(key, residency.base)
            needed = [(k, v) for k, v in stay.items() if k[0] == position and v not in at_rest]
            origins = {key: residency.entries[key].active for key, _ in needed}
            waits = [(key, version) for key, version in needed if self._need(key, version)]
            if waits:
                self._wait(waits)  # before prefetches begin: they would share the disk or the bus with these copies
            for key, version in stay.items():
                if key[0] != position and version not in at_rest:
                    self._foresee(key, version)
            for key, version in wanted.beside.items() if isinstance(wanted, Changes) else ():
                if self._begin(key, version, must=False):
                    flying = residency.entries[key].flying
                    assert flying is not None
                    self._beside[key] = _Prefetch(version, self._size(key, version), flying.event)
            return [origins[key] for key, _ in waits]

    def drop_all(self) -> None:
        """Reset every expert to the base and free all other blocks, also after an interrupted pass."""
        residency = self._residency
        with self._transitions.lock:
            residency.recover(self._transitions.headroom.pools)
            for key in [*residency.above(), *self._ahead]:
                self._leave(key, residency.base)
            for flying in [x.flying for x in residency.entries.values() if x.flying is not None]:
                flying.event.wait()
            self._note()

    def _leave(self, key: Key, to: int) -> None:
        """Put an expert at the base, or back to the bytes it was decoded from, and cancel its transition."""
        self._give_up(key)
        if (beside := self._beside.pop(key, None)) is not None and not beside.event.done():
            self._given_up.append(beside)
        entry = self._residency.entries[key]
        if entry.coming is not None:
            self._residency.cancel(key)
        if to == self._residency.base and entry.flying is not None and self._residency.source_of(key) is not None:
            entry.flying.event.wait()  # it may read the bytes that go
        self._residency.switch_now(key, to)

    def _give_up(self, key: Key) -> None:
        if (ahead := self._ahead.pop(key, None)) is not None:
            if ahead.landed:
                self.moved.prefetch_wasted += ahead.size
            else:
                self._residency.cancel(key)
                self._given_up.append(ahead)

    def _need(self, key: Key, version: int) -> bool:
        """Use a prefetched version that this layer needs, or start its copy; return whether to wait for a copy."""
        entry = self._residency.entries[key]
        moved = self.moved
        ahead = self._ahead.get(key)
        if ahead is not None and ahead.version == version and not ahead.event.cancelled:
            del self._ahead[key]
            if ahead.landed and entry.active == version:
                moved.prefetch_in_time += ahead.size
                return False
            if entry.coming == version:
                moved.prefetch_late += ahead.size
                moved.prefetch_bytes += ahead.size
                return True
        self._give_up(key)
        if entry.active == version:
            return False
        if self._begin(key, version, must=True):
            moved.demand_bytes += self._size(key, version)
            return True
        return False

    def _foresee(self, key: Key, version: int) -> None:
        entry = self._residency.entries[key]
        ahead = self._ahead.get(key)
        if entry.active == version or (ahead is not None and ahead.version == version and entry.coming == version):
            return
        self._give_up(key)
        if self._begin(key, version, must=False):
            flying = entry.flying
            assert flying is not None
            self._ahead[key] = _Prefetch(version, self._size(key, version), flying.event)

    def _begin(self, key: Key, version: int, must: bool) -> bool:
        """Publish a version if it is resident, else start its copy; return whether there is a copy to wait for."""
        residency = self._residency
        entry = self._residency.entries[key]
        if not (must and self._name) and not self._transitions.may_try(key, version):
            return False
        first = True
        while True:
            try:
                outcome = self._transitions.start(key, version)
            except (MoepackError, OSError) as error:
                self._failed(key, version, error, must)
                return False
            if outcome in (Outcome.READY, Outcome.NOTHING):
                residency.publish_ready()
                return outcome is Outcome.NOTHING and entry.flying is not None
            if outcome is Outcome.STARTED:
                return True
            if must and outcome is Outcome.BUSY and entry.flying is not None:
                entry.flying.event.wait()
                self._note()
                continue
            if not must or not (self._make_way() or first):
                break
            first = False
        if must and self._name:
            raise InputError(f"{self._name(key, version)}: no block of memory is left for it")
        return False

    def _make_way(self) -> bool:
        """Wait for a cancelled copy that still holds its block; return whether there was one. Publish ended copies."""
        residency = self._residency
        with residency.lock:  # another pass that waits for room may end copies meanwhile
            flying = [residency.entries[key].flying for key in residency.flying]
        going = next((x.event for x in flying if x is not None and x.event.cancelled and not x.event.done()), None)
        if going is not None:
            going.wait()
        self._note()
        return going is not None

    def _wait(self, waits: list[tuple[Key, int]]) -> None:
        began = time.perf_counter()
        self._waiting = {key for key, _ in waits}
        try:
            for event in [x.event for k in self._waiting if (x := self._residency.entries[k].flying) is not None]:
                event.wait()
            self._note()
        finally:
            self._waiting = set()
        self.waits += len(waits)
        self.waited += time.perf_counter() - began
        for key, version in waits:
            if self._name and self._residency.entries[key].active != version:
                raise InputError(f"{self._name(key, version)}: its copy was given up: was the model closed?")

    def _note(self) -> None:
        for key in [key for key, x in self._beside.items() if x.event.done()]:
            beside = self._beside.pop(key)
            if beside.event.error is None:
                self.moved.prefetch_bytes += beside.size
        ended = [x for x in self._ahead.values() if not x.landed and x.event.done()]  # before `poll`, which finds more
        failed = self._residency.poll(lambda key, version: True)
        self._residency.publish_ready()
        self._residency.reclaim()
        for ahead in ended:
            if ahead.event.error is None:
                ahead.landed = True
                self.moved.prefetch_bytes += ahead.size
        for ahead in [x for x in self._given_up if x.event.done()]:
            self._given_up.remove(ahead)
            if ahead.event.error is None:  # the copy had arrived before it was cancelled
                self.moved.prefetch_bytes += ahead.size
                self.moved.prefetch_wasted += ahead.size
        for key, version, error in failed:
            self._ahead.pop(key, None)
            self._failed(key, version, error, must=key in self._waiting)

    def _failed(self, key: Key, version: int, error: BaseException, must: bool) -> None:
        """Note a failed copy. Raise its error if the layer needs it (`must`) and the expert has no base version."""
        self._transitions.note_failure(key, version, error)
        if must and self._name:
            if isinstance(error, BundleError):
                raise error
            raise BundleError.single(self._name(key, version), "read", str(error)) from error
