"""Versioned residency: the invariants under a state machine, and planted violations of some."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from residency_machine import LIMITS, Machine
from residency_simulation import Violation


def test_invariants_hold_in_every_order(silent):
    Machine.steps = 0
    run_state_machine_as_test(Machine, settings=LIMITS)
    assert Machine.steps >= 4_000


# --- planted violations: the check above must find them


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


# The rule that finds each; what is reused too early may show as half copied, or as other bytes, first.
PLANTS = {
    _reused_early: "[156]",
    _seen_in_a_step: "1",
    _inexact: "6",
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_violations_are_found(plant, silent):
    broken = type("Broken", (Machine,), {"plant": staticmethod(plant)})
    limits = settings(LIMITS, max_examples=400, report_multiple_bugs=False, derandomize=True, database=None)
    with pytest.raises(Violation, match=f"^{PLANTS[plant]}:"):
        run_state_machine_as_test(broken, settings=limits)
