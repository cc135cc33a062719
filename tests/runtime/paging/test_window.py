"""The window's protocol under a state machine, and each state of a page alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from residency_machine import LIMITS
from residency_simulation import SimEvent as Ended
from residency_simulation import Violation

from moepack.runtime.paging.address_space import Page
from moepack.runtime.paging.window import STALE, LayerRun, Mapped, State, Window

LAYERS, EXPERTS, BLOCKS = 4, 3, 6


def ready(run: LayerRun) -> bool:
    return all(m.state is State.RESIDENT for m in run.pages[0])


def state(window: Window, page: Page) -> State:
    if page in window._of[page[0]].evicting:
        return State.EVICTING
    mapped = window._of[page[0]].pages.get(page)
    return State.UNMAPPED if mapped is None else mapped.state


def taken(window: Window, d: int) -> int:
    return sum(m.page[0] == d for m in window.mapped())


class Simulation:
    """Blocks of memory, what is in them, and who reads."""

    def __init__(self, keeps: bool) -> None:
        self.window = Window([BLOCKS, BLOCKS], LAYERS, keeps)
        self.memory: dict[Page, dict[str, Any]] = {}  # what stands at a page's address: a block's memory
        self.running: list[LayerRun] = []
        self.read: list[tuple[LayerRun, Ended]] = []  # computations that were issued and have not ended
        self.loads: list[Mapped] = []

    def acquire(self, layer: int, experts: set[int]) -> bool:
        run = self.window.acquire([[(d, layer, e) for e in sorted(experts)] for d in (0, 1)])
        if run is not None:
            self.running.append(run)
            self.loads += [m for pages in run.loads for m in pages]
        return run is not None

    def place(self, mapped: Mapped, interrupted: bool = False) -> None:
        """As a load stream does: after the events, move what stands at one address to another."""
        if not all(event.done() for event in mapped.after):
            return
        if mapped.at == mapped.page:
            self.window.moved(mapped)
            return
        mapped.is_moving = True
        readers = [run for run, event in self.read if not event.ended] + self.running
        for page in {mapped.at, mapped.page} - {None}:
            for run in readers:
                for m in (m for pages in run.pages for m in pages):
                    if m.page == page and m is not mapped and m.state is not State.LOADING:
                        raise Violation(f"WAR: {page} is moved or bound over while a computation reads it")
        number = (mapped.page[0], mapped.block)
        block = {"number": number, "bytes": None}
        if mapped.at is not None:
            block = self.memory.pop(mapped.at, None) or block
            if block["number"] != number:
                raise Violation("binding: the memory of another block is taken")
        if mapped.page in self.memory:
            raise Violation("binding: a page that has memory is given more")
        if any(b["number"] == number for b in self.memory.values()):
            raise Violation("binding: a block stands at two addresses")
        self.memory[mapped.page] = block
        block["bytes"] = "half"
        if interrupted:
            return
        self.window.moved(mapped)

    def fill(self, mapped: Mapped) -> None:
        if mapped.at == mapped.page and not mapped.after:
            self.memory[mapped.page]["bytes"] = mapped.page
            self.loads.remove(mapped)
            self.window.loaded(mapped)

    def compute(self, run: LayerRun) -> bool:
        """Issue a run's products, if it may."""
        if not all(m.state is State.RESIDENT for d in (0, 1) for m in run.pages[d]):
            return False
        self.look(run)
        event = Ended()
        self.running.remove(run)
        self.read.append((run, event))
        self.window.release(run, [event])
        return True

    def look(self, run: LayerRun) -> None:
        for mapped in (m for pages in run.pages for m in pages):
            if self.memory.get(mapped.page, {}).get("bytes") != mapped.page:
                raise Violation(f"RAW: {mapped.page} is read before its bytes are complete")

    def give_up(self, mapped: Mapped) -> None:
        self.loads.remove(mapped)
        if mapped.is_moving:
            for page in (mapped.at, mapped.page):
                self.memory.pop(page, None)  # type: ignore[arg-type]
            self.window.lost(mapped)
        self.window.gave_up(mapped)

    def interrupt(self, run: LayerRun) -> None:
        for mapped in [m for pages in run.pages for m in pages if m in self.loads]:
            self.give_up(mapped)
        self.running.remove(run)
        self.window.release(run)

    def check(self) -> None:
        for d in (0, 1):
            taken = [m for m in self.window.mapped() if m.page[0] == d]
            if len(taken) > BLOCKS or sum(page[0] == d for page in self.memory) > BLOCKS:
                raise Violation("bound: more pages than blocks")
            of = self.window._of[d]
            numbers = [m.block for m in (*of.pages.values(), *of.free.values())]
            if sorted(numbers) != list(range(BLOCKS)):
                raise Violation("binding: a block is two pages', or lost")
        for run, event in self.read:
            if not event.ended:
                self.look(run)


class Machine(RuleBasedStateMachine):
    """Runs, loads, failures and computations that go on, in every order."""

    steps = 0

    @initialize(keeps=st.booleans())
    def load(self, keeps: bool) -> None:
        self.sim = Simulation(keeps)

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1))
    @precondition(lambda self: len(self.sim.running) < 4)
    def acquire(self, layer: int, experts: set[int]) -> None:
        before = taken(self.sim.window, 0)
        if not self.sim.acquire(layer, experts):
            assert taken(self.sim.window, 0) == before, "refused, and yet something was taken"

    @rule(rounds=st.integers(1, 8))
    def serve(self, rounds: int) -> None:
        """Whole layers one after another, with computations that go on: else little is ever complete."""
        for i in range(rounds):
            if self.sim.acquire(i % LAYERS, set(range(EXPERTS))):
                run = self.sim.running[-1]
                for mapped in [m for pages in run.loads for m in pages]:
                    self.sim.place(mapped)
                    self.sim.check()
                    self.sim.fill(mapped)
                self.sim.compute(run)
                self.sim.check()

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.sim.loads)
    def place(self, which: int) -> None:
        self.sim.place(self.sim.loads[which % len(self.sim.loads)])

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.sim.loads)
    def fill(self, which: int) -> None:
        self.sim.fill(self.sim.loads[which % len(self.sim.loads)])

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.sim.loads)
    def is_interrupted(self, which: int) -> None:
        """Between a move and its being noted."""
        mapped = self.sim.loads[which % len(self.sim.loads)]
        self.sim.place(mapped, True)
        self.sim.give_up(mapped)

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.sim.loads)
    def fail(self, which: int) -> None:
        self.sim.give_up(self.sim.loads[which % len(self.sim.loads)])

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: self.sim.running)
    def adopt(self, which: int) -> None:
        """A run goes on with what others gave up."""
        run = self.sim.running[which % len(self.sim.running)]
        for mapped in (m for pages in run.pages for m in pages):
            if self.sim.window.adopt(mapped):
                self.sim.loads.append(mapped)

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: self.sim.running)
    def compute(self, which: int) -> None:
        self.sim.compute(self.sim.running[which % len(self.sim.running)])

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: self.sim.running)
    def interrupt(self, which: int) -> None:
        self.sim.interrupt(self.sim.running[which % len(self.sim.running)])

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.sim.read)
    def compute_ends(self, which: int) -> None:
        self.sim.read.pop(which % len(self.sim.read))[1].ended = True

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "sim"):
            Machine.steps += 1
            self.sim.check()

    def teardown(self) -> None:
        """Left alone every block comes back, and a whole layer can always be had: nothing waits for ever."""
        if not hasattr(self, "sim"):
            return
        for run in list(self.sim.running):
            self.sim.interrupt(run)
        for _, event in self.sim.read:
            event.ended = True
        for mapped in list(self.sim.loads):
            self.sim.give_up(mapped)
        for layer in range(LAYERS):
            assert self.sim.acquire(layer, set(range(EXPERTS)))
            self.sim.interrupt(self.sim.running[-1])
        assert not self.sim.window._of[0].evicting and not self.sim.window._of[1].evicting


def test_both_orders_and_the_bound_hold_whatever_happens() -> None:
    Machine.steps = 0
    run_machine(Machine, settings=settings(LIMITS, stateful_step_count=60))
    assert Machine.steps >= 4000


# --- the states of one page


def _serve(window: Window, layer: int, experts: range = range(EXPERTS), event: Ended | None = None) -> LayerRun:
    run = window.acquire([[(d, layer, e) for e in experts] for d in (0, 1)])
    assert run is not None
    for mapped in [m for pages in run.loads for m in pages]:
        window.moved(mapped)
        window.loaded(mapped)
    window.release(run, [event] if event else [])
    return run


def test_a_page_goes_through_its_four_states() -> None:
    window, page = Window([BLOCKS, BLOCKS], LAYERS), (0, 0, 0)
    assert state(window, page) is State.UNMAPPED
    run = window.acquire([[page], [(1, 0, 0)]])
    assert run is not None and state(window, page) is State.LOADING and not ready(run)
    for mapped in [m for pages in run.loads for m in pages]:
        window.moved(mapped)
        assert state(window, mapped.page) is State.LOADING
        window.loaded(mapped)
    assert state(window, page) is State.RESIDENT and ready(run)
    reading = Ended()
    window.release(run, [reading])
    assert state(window, page) is State.RESIDENT, "kept until its block is needed"
    _serve(window, 1, range(EXPERTS))
    taken = window.acquire([[(d, 2, e) for e in range(EXPERTS)] for d in (0, 1)])
    assert taken is not None  # five blocks are pages', one is free: two of the others go
    gone = [m for m in taken.loads[0] if m.at is not None]
    assert len(gone) == 1 and state(window, gone[0].at) is State.EVICTING  # type: ignore[arg-type]
    assert window.acquire([[gone[0].at], []]) is None, "not before its block has gone"  # type: ignore[list-item]
    victim = gone[0].at
    window.moved(gone[0])
    assert state(window, victim) is State.UNMAPPED  # type: ignore[arg-type]


def test_a_block_is_moved_after_the_computation_that_reads_it() -> None:
    window, first, second = Window([EXPERTS, EXPERTS], 1), Ended(), Ended()
    run = _serve(window, 0, event=first)
    again = window.acquire([[m.page for m in pages] for pages in run.pages])
    assert again is not None and not any(again.loads), "they are there"
    window.release(again, [second])
    taken = window.acquire([[(d, 1, e) for e in range(EXPERTS)] for d in (0, 1)])
    assert taken is not None and all(m.after == (first, second) for pages in taken.loads for m in pages)
    first.ended = second.ended = True


def test_blocks_that_were_given_back_half_loaded_are_bound_in_any_order() -> None:
    """Two loaders bind a run's pages: none of their blocks may stand at a page that another one of them gets."""
    pairs = itertools.combinations(range(EXPERTS), 2)
    for failed, wanted in itertools.product(itertools.permutations(range(EXPERTS), 2), pairs):
        for order in itertools.permutations(range(4)):
            sim = Simulation(True)
            assert sim.acquire(0, set(failed))
            for mapped in sorted(sim.loads, key=lambda m: failed.index(m.page[2])):
                sim.place(mapped)
                sim.give_up(mapped)
            sim.window.release(sim.running.pop())
            assert sim.acquire(0, set(wanted))
            for mapped in [sim.loads[i] for i in order]:
                sim.place(mapped)
                sim.fill(mapped)
            assert sim.compute(sim.running[0])


def test_all_or_nothing() -> None:
    window = Window([BLOCKS, BLOCKS - 1], LAYERS)
    held = [window.acquire([[(d, layer, e) for e in range(EXPERTS)] for d in (0, 1)]) for layer in (0, 1)]
    assert held[0] is not None and held[1] is None, "of the second type there are too few"
    assert taken(window, 0) == taken(window, 1) == EXPERTS and window.taken == 1


def test_what_was_used_last_goes_first_and_what_nobody_used_lately_before_it() -> None:
    window = Window([BLOCKS, BLOCKS], LAYERS)
    _serve(window, 0)
    _serve(window, 1)
    _serve(window, 2, range(1))
    assert [state(window, (0, 1, e)) for e in range(EXPERTS)] == [State.RESIDENT, State.RESIDENT, State.UNMAPPED]
    assert state(window, (0, 0, 0)) is State.RESIDENT, "the layer that comes up next"
    for _ in range(STALE * LAYERS + 1):
        _serve(window, 2, range(1))
    _serve(window, 3, range(1))
    assert state(window, (0, 0, 0)) is State.UNMAPPED and state(window, (0, 2, 0)) is State.RESIDENT


def test_without_keeping_every_block_comes_back() -> None:
    window = Window([BLOCKS, BLOCKS], LAYERS, keeps=False)
    for _ in range(3):
        for layer in range(LAYERS):
            _serve(window, layer)
            assert taken(window, 0) == taken(window, 1) == 0
    assert not window.hits and window.misses == 2 * 3 * LAYERS * EXPERTS


def test_who_else_holds_a_page_goes_on_with_it() -> None:
    window, page = Window([BLOCKS, BLOCKS], LAYERS), (0, 0, 0)
    first, second = window.acquire([[page], []]), window.acquire([[page], []])
    assert first is not None and second is not None and not second.loads[0]
    mapped = first.loads[0][0]
    assert not window.adopt(mapped), "somebody is at it"
    window.gave_up(mapped)
    window.release(first)
    assert state(window, page) is State.LOADING and window.adopt(mapped) and not window.adopt(mapped)
    window.moved(mapped)
    window.loaded(mapped)
    assert ready(second)
    window.gave_up(broken := window.acquire([[(0, 1, 1)], []]).loads[0][0], OSError("gone"))  # type: ignore[union-attr]
    with pytest.raises(OSError, match="gone"):
        window.adopt(broken)


def test_brute_force_of_a_long_life() -> None:
    """Ten thousand runs of two steps: what is held never passes the blocks, and hits are what a list would say."""
    rng, window, hits, here = random.Random(0), Window([BLOCKS, BLOCKS], LAYERS), 0, set[Page]()
    for _ in range(10_000):
        layer, experts = rng.randrange(LAYERS), rng.sample(range(EXPERTS), rng.randint(1, EXPERTS))
        hits += 2 * sum(state(window, (0, layer, e)) is State.RESIDENT for e in experts)
        _serve(window, layer, experts)  # type: ignore[arg-type]
        here = {m.page for m in window.mapped()}
        assert len(here) <= 2 * BLOCKS
    assert window.hits == hits and len(here) == 2 * BLOCKS
