"""A device whose copies and compute end when a test says so, and the checks of what must hold at every moment."""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moepack.pack.errors import BundleError
from moepack.pack.spec import PAGE
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.policies.contract import Key
from moepack.runtime.residency.headroom import Headroom
from moepack.runtime.residency.pools import Pool
from moepack.runtime.residency.residency import Residency
from moepack.runtime.residency.transitions import Transitions

EXPERTS = (4, 3)
QUIET = 5  # rounds of ten seconds
FIXED = PAGE


@dataclass(frozen=True)
class Kind:
    """What is simulated."""

    pages: tuple[int, ...] = (3, 2, 1)  # of a block, by version; the last version is the base; 0 is nowhere
    reserve: int = 2  # pages that are kept for demotions
    room: int = 8  # pages beside base versions and the reserve; with `fixed`, how many experts may be high
    keeps_base: bool = False  # base versions stay
    fixed: bool = False  # pools cannot give blocks back; `room` experts are high from the start
    host: tuple[int, ...] = ()  # versions that are in host memory
    host_pages: int | None = None  # pages on the host; None for any number
    source: int | None = None  # the version that stays beneath better ones

    @property
    def base(self) -> int:
        return len(self.pages) - 1

    def blocks(self, version: int) -> int:
        """Of a version's pool."""
        everyone = sum(EXPERTS)
        if not self.fixed or version in self.host:
            return everyone
        if version == self.base:
            return everyone - self.room + self.reserve // self.pages[-1]
        return self.room if version == 0 else 2

    @property
    def budget(self) -> int:
        if self.fixed:
            here = [(v, pages) for v, pages in enumerate(self.pages) if v not in self.host]
            taken = sum(self.blocks(v) * pages for v, pages in here) + 2
        else:
            taken = sum(EXPERTS) * (0 if self.base in self.host else self.pages[-1]) + self.reserve + self.room
        return FIXED + taken * PAGE


DROPS = Kind()
FOUR = Kind(pages=(5, 3, 2, 1), reserve=3, room=9)
TIGHT = Kind(pages=(4, 2, 1), reserve=2, room=3)
KEEPS = Kind(reserve=2, room=9, keeps_base=True)
POOLS = Kind(pages=(4, 1), reserve=1, room=3, fixed=True)
THIRDS = Kind(pages=(4, 2, 1), reserve=2, room=2, fixed=True)
HOST = Kind(pages=(4, 2, 2, 1), reserve=2, room=9, host=(2, 3))
PAGED = Kind(pages=(4, 3, 0), reserve=3, room=9)  # uncompressed, compressed, and in files: the ladder of `paged`
ABSENT = Kind(pages=(4, 2, 2, 0), reserve=2, room=9, host=(2,))
RUNGS = Kind(pages=(4, 3, 2, 2, 1), reserve=0, room=9, host=(1, 2, 3, 4))
DIVIDED = Kind(pages=(4, 3, 2, 1), reserve=0, room=3, fixed=True, host=(1, 2, 3))
CRAMPED = Kind(pages=(4, 3, 2, 2, 1), reserve=0, room=9, host=(1, 2, 3, 4), host_pages=3 * sum(EXPERTS) + 3)
KINDS = (DROPS, FOUR, TIGHT, KEEPS, POOLS, THIRDS, HOST, ABSENT, RUNGS, CRAMPED, DIVIDED, PAGED)


class Violation(AssertionError):
    """Something that must never happen."""


class SimEvent:
    """Ends when told to. Nobody may wait for it."""

    def __init__(self, ended: bool = False):
        self.error: BaseException | None = None
        self.cancelled = False
        self.ended = ended

    def done(self) -> bool:
        return self.ended

    def wait(self):
        if not self.ended:
            raise Violation("3: something waits for an event")

    def cancel(self):
        self.cancelled = True


def pattern(key: Key, version: int) -> int:
    """The byte that a complete version consists of."""
    return 1 + (key[0] * max(EXPERTS) + key[1]) * 5 + version


Seen = dict[Key, tuple[int, Tensor]]
NOWHERE = torch.empty(0, dtype=torch.uint8)


class Simulation:
    """A residency and its transitions over a simulated device, with what readers see."""

    def __init__(self, kind: Kind = DROPS):
        self.kind = kind
        self.now = 0.0
        self.loading = True
        self.jobs: list[tuple[SimEvent, Key, int, Tensor]] = []
        self.seen: Seen = {}  # the handle table: version and bytes; another one after each publication
        self.readers: dict[int, Seen] = {}  # steps that run, and what they see
        self.began: dict[int, Seen] = {}  # what they saw when they began
        self.draining: list[tuple[SimEvent, Seen]] = []  # compute that goes on
        self.marks: list[SimEvent] = []
        self.finished: set[tuple[Key, int, int]] = set()  # (key, version, address) whose copy's event has ended well
        self.memories: list[Tensor] = []
        self.tracker = BudgetTracker(kind.budget, FIXED)
        self.host = BudgetTracker(1 << 40 if kind.host_pages is None else kind.host_pages * PAGE)
        self.pools: list[Pool | None] = []
        for version, pages in enumerate(kind.pages):
            if not pages:
                self.pools.append(None)
                continue
            blocks, on_host = kind.blocks(version), version in kind.host
            memory = CpuMemory(pages * PAGE * blocks)
            memory.returnable = not kind.fixed or on_host
            self.memories.append(memory.tensor)
            tracker = self.host if on_host else self.tracker
            self.pools.append(Pool(f"v{version}", pages * PAGE, blocks, tracker, memory, on_host))
        self.residency = Residency(
            EXPERTS, kind.base, lambda p, v: self.pools[v], self.fetch, self.make, self.publish,
            self.mark, kind.keeps_base, lambda: self.seen, kind.source,
        )  # fmt: skip
        pools = [*self.on_device, *self.on_host]
        headroom = Headroom(self.residency, self.tracker, pools, kind.reserve * PAGE)
        self.transitions = Transitions(headroom, clock=lambda: self.now)
        for i, key in enumerate(all_keys()):
            first = [(key, 0 if kind.fixed and i < kind.room else kind.base)]
            self.seen |= dict(self.residency.place(first, 0, lambda *_: None, lambda *_: None))
        self.loading = False

    @property
    def on_device(self) -> list[Pool]:
        return [pool for pool in self.pools if pool is not None and pool.budget_bytes]

    @property
    def on_host(self) -> list[Pool]:
        return [pool for pool in self.pools if pool is not None and not pool.budget_bytes]

    # --- the device

    def make(self, key: Key, version: int, tensor: Tensor | None) -> tuple[int, Tensor]:
        return version, NOWHERE if tensor is None else tensor

    def fetch(self, key: Key, version: int, target: Tensor) -> SimEvent:
        for reader in [*self.readers.values(), *(r for _, r in self.draining)]:
            for owner, (_, tensor) in reader.items():
                if _overlap(tensor, target):
                    raise Violation(f"5: {key} is copied over what a step still reads of {owner}")
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

    def finish(self, index: int, damaged: bool = False, failed: bool = False):
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

    def publish(self, key: Key, handle: tuple[int, Tensor]):
        version, tensor = handle
        if tensor is not NOWHERE and (key, version, tensor.data_ptr()) not in self.finished:
            raise Violation(f"5: version {version} of {key} is published before its copy has ended")
        self.seen = {**self.seen, key: handle}

    # --- steps

    def begin(self) -> int:
        step, seen = self.residency.begin()
        self.readers[step], self.began[step] = seen, dict(seen)
        return int(step)

    def end(self, step: int, compute_goes_on: bool):
        reader = self.readers.pop(step)
        del self.began[step]
        if compute_goes_on:
            mark = SimEvent()
            self.marks.append(mark)
            self.draining.append((mark, reader))
        self.residency.end(step)

    def pages(self, version: int) -> int:
        """That a version takes of the device."""
        return 0 if version in self.kind.host else self.kind.pages[version]

    # --- what must hold

    def check(self):
        if not 0 <= self.tracker.reserved <= self.tracker.budget or self.tracker.peak > self.tracker.budget:
            raise Violation("2: more is reserved than the budget")
        taken = FIXED + self.tracker.held("kv")
        taken += sum(p.taken * p.block_bytes + p.spare_bytes for p in self.on_device)
        if taken != self.tracker.reserved or sum(self.tracker.named().values()) != taken:
            raise Violation("2: what is taken is not what is reserved")
        if sum(p.taken * p.block_bytes + p.spare_bytes for p in self.on_host) != self.host.reserved:
            raise Violation("2: what is taken of the host is not what is reserved")
        if any(seen[k] is not v for step, seen in self.readers.items() for k, v in self.began[step].items()):
            raise Violation("1: a step sees two epochs")
        readers = [self.seen, *self.readers.values(), *(r for _, r in self.draining)]
        known: set[tuple[int, int, int]] = set()
        for key, (version, tensor) in itertools.chain.from_iterable(r.items() for r in readers):
            if tensor is NOWHERE:
                continue
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
        above = any(
            self.pages(v) > self.pages(self.kind.base) for e in self.residency.entries.values() for v in e.complete
        )
        if above and self.transitions.headroom.can_lessen() and self.transitions.headroom.settled() < 0:
            raise Violation("8: what is kept for demotions was given away")
        spare = self.residency._spare
        for key, entry in self.residency.entries.items():
            if self.residency.active[key[0]][key[1]] != entry.active:
                raise Violation(f"9: {key} is noted at another version than it is served with")
            needed = {entry.active, entry.ready} - {None} | ({self.kind.base} if self.kind.keeps_base else set())
            if not needed <= entry.complete.keys():
                raise Violation(f"1: {key} lacks a version that it is served with")
            needed |= set() if self.residency.source_of(key) is None else {self.kind.source}
            leaving = {v for k, v in self.residency.leaving if k == key}
            if set(entry.complete) != needed | leaving | {v for k, v in spare if k == key}:
                raise Violation(f"{key} holds versions that nobody knows of")
            if any((key, v) in spare for v in needed | leaving):
                raise Violation(f"5: {key} has a spare version that is in use")
            for resident in entry.complete.values():
                if resident.block is not None:
                    resident.block.check()


class WaitingSimulation(Simulation):
    """Waiting for a copy ends those before it and then it, as a stream does: the oldest first."""

    def fetch(self, key: Key, version: int, target: Tensor) -> SimEvent:
        event = super().fetch(key, version, target)

        def wait():
            while not event.ended:
                self.finish(0, failed=self.fails(self.jobs[0][1]))

        event.wait = wait
        return event

    def fails(self, key: Key) -> bool:
        return False


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + len(b) and b.data_ptr() < a.data_ptr() + len(a)


def _inside(a: Tensor, memory: Tensor) -> bool:
    return memory.data_ptr() <= a.data_ptr() and a.data_ptr() + len(a) <= memory.data_ptr() + len(memory)


def settled(simulation: Simulation, rounds: int = 60):
    """Let everything that is on its way end: until nothing has changed for longer than a failed copy waits."""
    seen: list[object] = []
    for _ in range(rounds):
        residency, transitions = simulation.residency, simulation.transitions
        moving = [*residency.flying, *residency.ready, *residency.leaving]
        seen.append((replace(residency.counts), moving, transitions.failures, transitions.kv_asked))
        if len(seen) > QUIET and seen[-QUIET:].count(seen[-1]) == QUIET:
            return
        while simulation.jobs:
            simulation.finish(0)
        simulation.transitions.tick()
        simulation.now += 10
        simulation.check()
        simulation.end(simulation.begin(), compute_goes_on=False)


def all_keys() -> list[Key]:
    return [(p, e) for p, n in enumerate(EXPERTS) for e in range(n)]
