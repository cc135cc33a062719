"""Residency's invariants under every policy that changes placements: its answers to events in any order.

Those that do not block run in the state machine of residency, with overlapping steps, in place of what it wants by
chance. Those that block load on demand, one step at a time, while the KV cache grows and shrinks.
"""

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from residency_machine import LIMITS, Machine
from residency_simulation import EXPERTS, Kind, Simulation, WaitingSimulation

from moepack.pack.errors import InputError, MoepackError
from moepack.pack.spec import PAGE, Version
from moepack.runtime.planning.paging import source_of
from moepack.runtime.policies.contract import (
    DecodingBegan,
    Interval,
    LayerReached,
    PrefillEnded,
    SequenceBegan,
    SequenceEnded,
    Setting,
)
from moepack.runtime.policies.placements import ON_HOST, Where
from moepack.runtime.policies.reducers import GATES, HEAVY
from moepack.runtime.policies.registry import parse_policy
from moepack.runtime.residency.on_demand import OnDemandLoader

VERSIONS = tuple(Version.of(name, 0 if name == "bf16" else 64) for name in ("bf16", "w4", "w3", "w2", "w1"))
PAGES = {"bf16": 5, "bf16@packed": 3, "w4": 4, "w3": 3, "w2": 2, "w1": 1}
_PLACE = re.compile("@(host|pinned)$")
SHARED = ["hotness:interval=0,prior=none", "hotness:interval=0,between=no", "prefill:bits=2"]
SHARED += ["hotness:interval=0,lo=absent", "hotness:interval=0,lo=w2@pinned"]
BLOCKING = ["lru:hi=bf16,lo=w2", "lru:hi=w4,lo=absent", "importance:hi=w4,lo=w2", "importance:hi=w4,lo=absent,r=0.5"]
BLOCKING += ["importance:hi=bf16,lo=w2,reuse=no,r=0.75", "hotness:lo=stored,interval=0,prior=none,prefetch=yes"]
BLOCKING += ["hotness:hi=w4,lo=stored,interval=0,prior=none", "paged", "paged:ahead=no"]


def served(text, room):
    """What a policy is simulated on, and the policy."""
    parsed = parse_policy(text, True)
    ladder = parsed.options.ladders(VERSIONS)[0]
    pages = [0 if p.where in (Where.ABSENT, Where.ON_DISK) else PAGES[_PLACE.sub("", str(p))] for p in ladder]
    host = tuple(i for i, p in enumerate(ladder) if p.where in ON_HOST)
    reserve = 0 if host or parsed.options.keeps_low else max(pages[1:])
    kind = Kind(tuple(pages), reserve, room, parsed.options.keeps_low, host=host, source=source_of(ladder))
    sizes = [0 if i in host else n * PAGE for i, n in enumerate(pages)]
    sizes[-1] = 0 if parsed.options.keeps_low else sizes[-1]
    losses = [np.tile(np.arange(len(ladder), dtype=float), (n, 1)) for n in EXPERTS]
    traffic = [[float(e + 1) for e in range(n)] for n in EXPERTS]
    setting = Setting(EXPERTS, ladder, [sizes] * len(EXPERTS), traffic, losses, None)
    return kind, parsed.entry.make(setting, parsed.options)


def counts(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 4, n) for n in EXPERTS]


class UnderPolicy(Machine):
    """The policy answers; what the machine would want by chance is nothing here."""

    text = ""

    @initialize(kind=st.integers(4, 20))
    def load(self, kind):
        made, self.made = served(self.text, kind)
        self.sim = Simulation(made)
        self.clock, self.sequences, self.numbers = 0.0, [], itertools.count(1)

    def tell(self, event):
        wanted = self.made.decide(event)
        if wanted is not None:
            base = self.sim.kind.base
            assert all(0 <= v <= base for v in wanted.values()) and wanted.keys() <= self.sim.residency.entries.keys()
            self.sim.transitions.want(wanted, self.made.worth, self.made.needs.exact)
            for key in wanted:
                self.made.worth(key)

    def capacity(self):
        transitions = self.sim.transitions
        left = self.sim.kind.room * PAGE - transitions.kv_bytes - transitions.kv_asked
        return [left // 2] * 2

    @rule(wanted=st.integers(0, 999))
    def policy(self, wanted):
        self.clock += 1
        loaded = [[0, 10_000 * (wanted % 7), 5000 * (wanted % 5)]] * 2 if self.made.needs.timings else ()
        sums = {reducer: [row.astype(float) for row in counts(wanted)] for reducer in self.made.needs.sums}
        self.tell(Interval(self.clock, self.capacity(), counts(wanted), sums, 3, 0.01 * (wanted % 9), loaded))

    @rule(seed=st.integers(0, 999))
    def a_prompt(self, seed):
        number = next(self.numbers) if seed % 3 or not self.sequences else self.sequences[seed % len(self.sequences)]
        if number not in self.sequences:
            self.sequences.append(number)
            self.tell(SequenceBegan(self.clock, self.capacity(), 8, number))
        sums = {reducer: [0.3 * row for row in counts(seed + 1)] for reducer in self.made.needs.sums}
        self.tell(PrefillEnded(self.clock, self.capacity(), counts(seed), sums, number))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.sequences)
    def decoding(self, which):
        self.tell(DecodingBegan(self.clock, self.capacity(), self.sequences[which % len(self.sequences)]))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.sequences)
    def a_sequence_ends(self, which):
        number = self.sequences.pop(which % len(self.sequences))
        self.tell(SequenceEnded(self.clock, self.capacity(), number))


@pytest.mark.parametrize("text", SHARED)
def test_invariants_hold_under_policies_that_do_not_block(text, silent):
    machine = type("Under", (UnderPolicy,), {"text": text})
    run_state_machine_as_test(machine, settings=settings(LIMITS, max_examples=12, stateful_step_count=60))


class Waited(WaitingSimulation):
    failing, rng = 0.0, random.Random(0)

    def fails(self, key):
        return self.rng.random() < self.failing

    def fetched(self):
        while self.jobs:
            self.finish(0)
        self.residency.poll(lambda key, version: True)
        self.residency.publish_ready()


@pytest.mark.parametrize("text", BLOCKING)
def test_invariants_hold_under_policies_that_block(text, silent):
    """Everything that a layer needs is there when it runs, within the bytes, or the pass ends with an error."""
    refused = 0
    for seed in range(24):
        rng = random.Random(seed)
        best = served(text, 0)[0].pages[0]
        least = best * sum(EXPERTS[: parse_policy(text, True).options.layers_held])
        room = least + rng.randint(0, 8)
        kind, policy = served(text, room)
        sim = Waited(kind)
        none = [np.zeros(n, np.int64) for n in EXPERTS]
        first = policy.decide(Interval(0.0, [room * PAGE // 2] * 2, none, dict.fromkeys(policy.needs.sums, none)))
        for key, version in first.items() if seed % 2 else ():
            sim.transitions.start(key, version)
            sim.fetched()
        sim.rng, sim.failing = rng, 0.1 if seed % 4 == 0 else 0.0
        sim.transitions.headroom.kept = least * PAGE
        demand = OnDemandLoader(sim.transitions, lambda key, version: 100, lambda key, version: f"{key} {version}")
        resident = kind.pages[-1] > 0
        moves = text.startswith("hotness")
        if resident:
            demand._name = None
        for step in range(30):
            if rng.random() < 0.2:
                try:
                    sim.transitions.grow_kv(PAGE)
                    sim.transitions.tick()
                except MemoryError:
                    pass
            elif sim.transitions.kv_bytes and rng.random() < 0.2:
                sim.transitions.shrink_kv(PAGE)
            for layer, n in enumerate(EXPERTS):
                chosen = np.array([rng.randint(0, 2) for _ in range(n)])
                ahead = np.array([rng.randint(0, 2) for _ in range(EXPERTS[-1])]) if layer == 0 else None
                placed, coming = demand.where(layer)
                kv = sim.transitions.kv_bytes + sim.transitions.kv_asked
                capacity = [(room * PAGE - kv + 1) // 2] * 2
                event = LayerReached(
                    float(step), capacity, layer, chosen, {GATES: 0.3 * chosen, HEAVY: chosen}, bool(rng.randint(0, 1)),
                    ahead, {} if ahead is None else {GATES: 0.3 * ahead}, placed, coming,
                )  # fmt: skip
                wanted = policy.decide(event)
                try:
                    if wanted is not None:
                        demand.reach(layer, wanted)
                except MoepackError as error:
                    assert sim.failing or not isinstance(error, InputError), (seed, step, layer, error)
                    refused += 1
                    continue
                sim.check()
                if not sim.failing:
                    here = {key: v for key, v in (wanted or {}).items() if key[0] == layer and chosen[key[1]]}
                    at = {key: sim.residency.entries[key].active for key in here}
                    assert all(at[k] == v or (moves and at[k] < kind.base) for k, v in here.items()), (seed, step)
                for _ in range(rng.randint(0, len(sim.jobs))):
                    sim.finish(0)
        demand.where(0)
        sim.check()
    assert bool(refused) == (kind.pages[-1] == 0), "copies that fail end passes where nothing else is there"
