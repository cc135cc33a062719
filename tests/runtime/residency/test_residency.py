"""Versioned residency: the invariants under a state machine, and planted violations of each."""

import functools

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from residency_machine import LIMITS, Machine
from residency_simulation import Violation

from moepack.runtime.residency.entries import Outcome


def test_invariants_hold_in_every_order(silent):
    Machine.steps = 0
    run_state_machine_as_test(Machine, settings=LIMITS)
    assert Machine.steps >= 6_000


# --- planted violations: each breaks one rule, and the check above must find it


def _torn(sim):
    """The device says that a copy has ended when half of it has."""
    fetch = sim.residency._fetch

    def half(key, version, target):
        event = fetch(key, version, target)
        event.ended = True
        sim.finished.add((key, version, target.data_ptr()))
        sim.jobs.pop()
        return event

    sim.residency._fetch = half


def _over_budget(sim):
    """The tracker grants everything."""
    tracker = sim.tracker

    def grant(name, size):
        tracker.reserved += size
        tracker._named[name] = tracker._named.get(name, 0) + size
        return True

    tracker.try_reserve = grant


def _forward_waits(sim):
    """A step begins only after the copies in flight."""
    begin = sim.residency.begin

    def waiting():
        for event, *_ in sim.jobs:
            event.wait()
        return begin()

    sim.residency.begin = waiting


def _general_allocator(sim):
    """Blocks come from the allocator."""
    for pool in sim.on_device:
        outside = functools.cache(lambda start, size: torch.zeros(size, dtype=torch.uint8))
        pool._memory.at = outside


def _reused_early(sim):
    """Blocks are freed whatever still reads them."""
    sim.residency.steps.oldest = lambda: 1 << 60


def _seen_in_a_step(sim):
    """Publishing changes the snapshot that steps read."""
    publish = sim.residency._publish

    def in_place(key, handle):
        seen = sim.seen
        publish(key, handle)
        seen[key] = handle
        sim.seen = seen

    sim.residency._publish = in_place


def _inexact(sim):
    """Decoding the most precise version changes a bit."""
    finish = sim.finish

    def flips(index, damaged=False, failed=False):
        _, _, version, target = sim.jobs[index]
        finish(index, damaged, failed)
        if version == 0:
            target[5] ^= 1

    sim.finish = flips


def _unchecked(sim):
    """Digests are not looked at, and the file is damaged everywhere."""
    finish = sim.finish
    sim.check_digest = lambda target: False
    sim.finish = lambda index, damaged=False, failed=False: finish(index, True, failed)


def _leaves_too_soon(sim):
    """A demotion gives the high version's block back before the low one has arrived."""
    residency = sim.residency
    start = residency.start

    def hasty(key, version):
        outcome = start(key, version)
        entry = residency.entries[key]
        if outcome is Outcome.STARTED and version > entry.active:
            resident = entry.complete.pop(entry.active)
            resident.block.pool.free(resident.block)
        return outcome

    residency.start = hasty


def _no_reserve(sim):
    """Promotions take what is kept for demotions."""
    headroom = sim.transitions.headroom
    settled, admit = headroom.settled, sim.transitions._admit

    def careless():
        headroom.settled = lambda: settled() + headroom.reserve
        admit()
        del headroom.settled

    sim.transitions._admit = careless


def _noted_wrongly(sim):
    """The list of active versions, which policies see, is left behind."""
    residency, switch = sim.residency, sim.residency._switch

    def alone(key):
        before = residency.active[key[0]][key[1]]
        switch(key)
        residency.active[key[0]][key[1]] = before

    residency._switch = alone


# The rule that finds each; what is published or reused too early may show as half copied, or as other bytes, first.
PLANTS = {
    _torn: "1",
    _leaves_too_soon: "[15]",
    _over_budget: "2",
    _forward_waits: "3",
    _general_allocator: "4",
    _reused_early: "[156]",
    _seen_in_a_step: "1",
    _inexact: "6",
    _unchecked: "7",
    _no_reserve: "8",
    _noted_wrongly: "9",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_violations_are_found(plant, silent):
    broken = type("Broken", (Machine,), {"plant": staticmethod(plant)})
    limits = settings(LIMITS, max_examples=400, report_multiple_bugs=False, derandomize=True, database=None)
    with pytest.raises(Violation, match=f"^{PLANTS[plant]}:"):
        run_state_machine_as_test(broken, settings=limits)
