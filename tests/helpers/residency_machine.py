"""The state machine that holds residency's invariants: passes, policies, copies and the KV cache, in every order."""

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from residency_simulation import KINDS, Kind, Simulation, all_keys, settled

from moepack.pack.spec import PAGE

KEYS = all_keys()
Plant = Callable[[Simulation], None]


class Machine(RuleBasedStateMachine):
    """Forward passes, policies, copies and the KV cache, in every order."""

    steps = 0
    plant: Plant | None = None
    sim: Simulation

    @initialize(kind=st.sampled_from(KINDS))
    def load(self, kind: Kind):
        self.sim = Simulation(kind)
        if type(self).plant is not None:
            type(self).plant(self.sim)

    @rule()
    @precondition(lambda self: len(self.sim.readers) < 4)
    def begin(self):
        self.sim.begin()

    @rule(compute_goes_on=st.booleans(), which=st.integers(0, 3))
    @precondition(lambda self: self.sim.readers)
    def end(self, compute_goes_on: bool, which: int):
        windows = list(self.sim.readers)
        self.sim.end(windows[which % len(windows)], compute_goes_on)

    @rule()
    @precondition(lambda self: self.sim.draining)
    def compute_ends(self):
        self.sim.draining.pop(0)[0].ended = True

    @rule(wanted=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 4), max_size=7), exact=st.booleans())
    def policy(self, wanted: dict[tuple[int, int], int], exact: bool):
        base = self.sim.kind.base
        self.sim.transitions.want({key: min(version, base) for key, version in wanted.items()}, exact=exact)

    @rule()
    def tick(self):
        self.sim.transitions.tick()

    @rule(which=st.integers(0, 7), how=st.sampled_from(["good", "good", "good", "damaged", "failed"]))
    @precondition(lambda self: self.sim.jobs)
    def copy_ends(self, which: int, how: str):
        self.sim.finish(which % len(self.sim.jobs), how == "damaged", how == "failed")

    @rule(rounds=st.integers(1, 3), compute_goes_on=st.booleans())
    def serve(self, rounds: int, compute_goes_on: bool):
        """Copies that go well, and forward passes one after another: else few promotions would get through."""
        for _ in range(rounds):
            self.sim.transitions.tick()
            while self.sim.jobs:
                self.sim.finish(0)
            self.sim.transitions.tick()
            window = self.sim.begin()
            self.sim.check()
            self.sim.end(window, compute_goes_on)
            self.sim.check()

    @rule(pages=st.integers(1, 4))
    def kv_grows(self, pages: int):
        transitions = self.sim.transitions
        try:
            transitions.grow_kv(pages * PAGE)
        except MemoryError:
            asked = transitions.kv_bytes + transitions.kv_asked + pages * PAGE
            assert asked > transitions.headroom.most_kv()

    @rule()
    @precondition(lambda self: self.sim.transitions.kv_bytes >= PAGE)
    def kv_shrinks(self):
        self.sim.transitions.shrink_kv(PAGE)

    @rule(seconds=st.sampled_from([0.1, 40.0]))
    def time_passes(self, seconds: float):
        self.sim.now += seconds

    @invariant()
    def everything_holds(self):
        Machine.steps += 1
        self.sim.check()

    def teardown(self):
        """Left alone, it comes to rest with what is wanted: nothing ever blocks for good."""
        if type(self).plant is not None or not hasattr(self, "sim"):
            return
        sim = self.sim
        for window in list(sim.readers):
            sim.end(window, compute_goes_on=False)
        for mark, _ in sim.draining:
            mark.ended = True
        sim.draining.clear()
        settled(sim, 40)
        assert not sim.jobs and not sim.transitions.kv_asked
        queues = sim.transitions.queues()
        assert not queues.in_flight
        for key, version in sim.transitions.waiting().items():  # none of them fits
            pool = sim.pools[version]
            assert pool is not None, "nothing is in the way of what takes no memory"
            full = sim.kind.fixed and pool.taken == pool.blocks
            assert pool.budget_bytes, "nor of what has room on the host"
            assert full or sim.residency.growth(key, version) > sim.transitions.headroom.settled()


LIMITS = settings(
    max_examples=100,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.generate],
)
