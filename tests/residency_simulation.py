"""A device whose copies and compute end when a test says so, and the checks of what must hold at every moment."""

from __future__ import annotations

import itertools

from torch import Tensor

from moepack.pack.errors import BundleError
from moepack.pack.spec import PAGE
from moepack.runtime.budget import BudgetTracker
from moepack.runtime.device import CpuMemory
from moepack.runtime.pools import Pool
from moepack.runtime.residency import Key, Residency
from moepack.runtime.transitions import Transitions

EXPERTS = (4, 3)
PAGES = (3, 2, 1)  # of a block, by version
BASE = 2
FIXED = PAGE
BASE_BYTES = sum(EXPERTS) * PAGE
BUDGET = FIXED + BASE_BYTES + 10 * PAGE


class Violation(AssertionError):
    """Something that must never happen."""


class SimEvent:
    """Ends when told to. Nobody may wait for it."""

    def __init__(self, ended: bool = False) -> None:
        self.error: BaseException | None = None
        self.cancelled = False
        self.ended = ended

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        if not self.ended:
            raise Violation("3: something waits for an event")

    def cancel(self) -> None:
        self.cancelled = True


def pattern(key: Key, version: int) -> int:
    """The byte that a complete version consists of."""
    return 1 + (key[0] * max(EXPERTS) + key[1]) * 3 + version


class Simulation:
    """A residency and its transitions over a simulated device, with what readers see."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loading = True
        self.jobs: list[tuple[SimEvent, Key, int, Tensor]] = []
        self.seen: dict[Key, tuple[int, Tensor]] = {}  # the handle table: version and bytes
        self.readers: dict[int, dict[Key, tuple[int, Tensor]]] = {}  # windows that run
        self.draining: list[tuple[SimEvent, dict[Key, tuple[int, Tensor]]]] = []  # compute that goes on
        self.marks: list[SimEvent] = []
        self.finished: set[tuple[Key, int, int]] = set()  # (key, version, address) whose copy's event has ended well
        self.memories: list[Tensor] = []
        self.tracker = BudgetTracker(BUDGET, FIXED)
        self.pools = []
        for version, pages in enumerate(PAGES):
            memory = CpuMemory(pages * PAGE * sum(EXPERTS))
            self.memories.append(memory.tensor)
            self.pools.append(Pool(f"v{version}", pages * PAGE, sum(EXPERTS), self.tracker, memory))
        self.residency = Residency(
            EXPERTS, BASE, lambda p, v: self.pools[v], self.fetch, lambda k, v, t: (v, t), self.publish, self.mark
        )
        self.transitions = Transitions(self.residency, self.tracker, self.pools, clock=lambda: self.now)
        for p, n in enumerate(EXPERTS):
            for e in range(n):
                self.seen[p, e] = self.residency.place((p, e))
        self.loading = False

    # --- the device

    def fetch(self, key: Key, version: int, target: Tensor) -> SimEvent:
        for reader in [*self.readers.values(), *(r for _, r in self.draining)]:
            for owner, (_, tensor) in reader.items():
                if _overlap(tensor, target):
                    raise Violation(f"5: {key} is copied over what a window still reads of {owner}")
        event = SimEvent()
        target[: len(target) // 2] = pattern(key, version)
        target[len(target) // 2 :] = 0  # half copied
        if self.loading:
            target.fill_(pattern(key, version))
            event.ended = True
            self.finished.add((key, version, target.data_ptr()))
        else:
            self.jobs.append((event, key, version, target))
        return event

    def finish(self, index: int, damaged: bool = False, failed: bool = False) -> None:
        """End a copy: well, or with bytes that do not match their digest, or with an error."""
        event, key, version, target = self.jobs.pop(index)
        if failed or event.cancelled:
            event.error = OSError("simulated") if failed else RuntimeError("cancelled")
        else:
            target.fill_(pattern(key, version) ^ (0x80 if damaged else 0))
            if damaged and self.check_digest(target):
                event.error = BundleError.single(f"{key}", "digest", "its bytes do not match their digest")
            else:
                self.finished.add((key, version, target.data_ptr()))
        event.ended = True

    def check_digest(self, target: Tensor) -> bool:
        """Whether damage is found; a planted violation replaces it."""
        return True

    def mark(self) -> SimEvent:
        return self.marks.pop() if self.marks else SimEvent(ended=True)

    def publish(self, key: Key, handle: tuple[int, Tensor]) -> None:
        if self.readers:
            raise Violation("5: a version is published while a window runs")
        version, tensor = handle
        if (key, version, tensor.data_ptr()) not in self.finished:
            raise Violation(f"5: version {version} of {key} is published before its copy has ended")
        self.seen[key] = handle

    # --- windows

    def begin(self) -> int:
        window = self.residency.begin()
        self.readers[window] = dict(self.seen)
        return window

    def end(self, window: int, compute_goes_on: bool) -> None:
        reader = self.readers.pop(window)
        if compute_goes_on:
            mark = SimEvent()
            self.marks.append(mark)
            self.draining.append((mark, reader))
        self.residency.end(window)

    # --- what must hold

    def check(self) -> None:
        if not 0 <= self.tracker.reserved <= self.tracker.budget or self.tracker.peak > self.tracker.budget:
            raise Violation("2: more is reserved than the budget")
        taken = FIXED + self.tracker.held("kv")
        taken += sum(p.taken * p.block_bytes + p.spare_bytes for p in self.pools)
        if taken != self.tracker.reserved or sum(self.tracker.named().values()) != taken:
            raise Violation("2: what is taken is not what is reserved")
        readers = [self.seen, *self.readers.values(), *(r for _, r in self.draining)]
        known: set[tuple[int, int, int]] = set()
        for key, (version, tensor) in itertools.chain.from_iterable(r.items() for r in readers):
            identity = (pattern(key, version), tensor.data_ptr(), len(tensor))
            if identity in known:
                continue
            known.add(identity)
            if not any(_inside(tensor, memory) for memory in self.memories):
                raise Violation("4: weights stand outside the pools")
            if not bool((tensor == pattern(key, version)).all()):
                wrong = "6: the most precise version is not the checkpoint's" if version == 0 else "1: not complete"
                if bool((tensor == pattern(key, version) ^ 0x80).all()):
                    wrong = "7: damaged bytes are served"
                elif tensor[0] == pattern(key, version) and not tensor[-1]:
                    wrong = "1: a half-copied version is seen"
                raise Violation(f"{wrong}: version {version} of {key}")
        for key, entry in self.residency.entries.items():
            if entry.base not in entry.complete or entry.active not in entry.complete:
                raise Violation(f"1: {key} has no complete version to fall back to")
            allowed = {entry.base, entry.active} | ({entry.ready} if entry.ready is not None else set())
            if set(entry.complete) != allowed:
                raise Violation(f"{key} holds versions that nobody needs")
            for resident in entry.complete.values():
                resident.block.check()


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + len(b) and b.data_ptr() < a.data_ptr() + len(a)


def _inside(a: Tensor, memory: Tensor) -> bool:
    return memory.data_ptr() <= a.data_ptr() and a.data_ptr() + len(a) <= memory.data_ptr() + len(memory)


def settled(simulation: Simulation, rounds: int = 60) -> None:
    """Let everything that is on its way end."""
    for _ in range(rounds):
        while simulation.jobs:
            simulation.finish(0)
        simulation.transitions.tick()
        simulation.now += 10
        simulation.check()
        simulation.end(simulation.begin(), compute_goes_on=False)


def all_keys() -> list[Key]:
    return [(p, e) for p, n in enumerate(EXPERTS) for e in range(n)]
