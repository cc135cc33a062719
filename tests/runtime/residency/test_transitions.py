"""Transitions: the states of one expert, and what is promoted, demoted and evicted for whom."""

import random

import pytest
from residency_machine import KEYS
from residency_simulation import (
    CRAMPED,
    DIVIDED,
    DROPS,
    HOST,
    KEEPS,
    POOLS,
    RUNGS,
    THIRDS,
    Kind,
    Simulation,
    all_keys,
    settled,
)

from moepack.pack.spec import PAGE
from moepack.runtime.residency import transitions

BASE = DROPS.base


def active(sim):
    """The active version of every expert, by layer."""
    return [[sim.residency.entries[p, e].active for e in range(n)] for p, n in enumerate(sim.residency.experts)]


def promoted(kind, wanted):
    sim = Simulation(kind)
    sim.transitions.want(wanted)
    settled(sim)
    return sim


def high(wanted):
    """These at the best version, and no spare one of any."""
    sim = promoted(DROPS, dict.fromkeys(wanted, 0))
    while sim.residency.drop_spare():
        pass
    return sim


def test_low_versions_leave_when_their_bytes_are_needed():
    """Four high experts in eight pages more than all-low: with their low versions they would be three."""
    sim = promoted(DROPS, dict.fromkeys(KEYS[:5], 0))
    assert active(sim) == [[0] * 4, [BASE] * 3]
    assert sim.tracker.free + sim.pools[BASE].spare_bytes + sim.transitions.headroom.available() == DROPS.reserve * PAGE
    kept = promoted(KEEPS, dict.fromkeys(KEYS[:5], 0))
    assert active(kept) == [[0, 0, 0, BASE], [BASE] * 3]


def test_the_least_worth_is_evicted_first():
    for least in range(4):
        sim = promoted(DROPS, dict.fromkeys(KEYS[:4], 0))
        sim.transitions.want({(1, 0): 0}, lambda key, least=least: float(key != (0, least)))
        settled(sim)
        assert active(sim) == [[BASE if e == least else 0 for e in range(4)], [0, BASE, BASE]]


def test_a_demotion_is_cancelled_without_loss_when_its_expert_is_hot_again():
    sim = high(KEYS[:4])
    sim.transitions.want({(1, 0): 0})
    sim.transitions.tick()
    leaving = [key for _, key, _, _ in sim.jobs]
    assert leaving
    sim.transitions.want(dict.fromkeys(KEYS[:4], 0))
    settled(sim)
    assert active(sim) == [[0] * 4, [BASE] * 3]
    assert sim.residency.counts.demotions == 0 and sim.residency.counts.cancelled == len(leaving)


def test_a_low_version_that_cannot_be_fetched_leaves_its_expert_high(caplog):
    sim = high(KEYS[:4])
    sim.transitions.want({(1, 0): 0, (0, 0): 0, (0, 1): 0, (0, 2): 0})
    for _ in range(3):
        sim.transitions.tick()
        while sim.jobs:
            sim.finish(0, failed=True)
        sim.end(sim.begin(), False)
    assert active(sim) == [[0] * 4, [BASE] * 3] and sim.transitions.failures == 1
    assert len(caplog.records) == 1 and "simulated" in caplog.text
    sim.now += 31
    settled(sim)
    assert active(sim) == [[0, 0, 0, BASE], [0, BASE, BASE]]


def test_what_fits_goes_past_a_promotion_that_does_not():
    """Room for eight pages: three experts take two more each; one that takes four waits; those that take one do not."""
    kind = Kind(pages=(5, 3, 2, 1), reserve=3, room=8)
    sim = promoted(kind, {(0, 0): 1, (0, 1): 1, (0, 2): 1, (1, 0): 0, (1, 1): 2, (1, 2): 2, (0, 3): 2})
    assert active(sim) == [[1, 1, 1, 3], [3, 2, 2]]
    assert sim.transitions.waiting() == {(1, 0): 0, (0, 3): 2}
    sim.transitions.want({(1, 0): 0, (1, 1): 2, (0, 0): 1, (0, 3): 2})
    settled(sim)
    assert active(sim)[1][0] == 0 and active(sim)[0][3] == 2, "the head is not starved"


def test_a_failed_copy_is_counted_logged_once_and_tried_again_later(caplog):
    sim = Simulation()
    sim.transitions.want({(0, 0): 0})
    for _ in range(3):
        sim.transitions.tick()
        assert len(sim.jobs) == 1
        sim.finish(0, failed=True)
        sim.transitions.tick()
        sim.transitions.tick()
        assert not sim.jobs and sim.seen[0, 0][0] == BASE
        sim.now += 31
    assert sim.transitions.failures == 3
    assert len(caplog.records) == 1 and "simulated" in caplog.text
    settled(sim)
    assert sim.seen[0, 0][0] == 0


def test_the_kv_cache_pushes_the_least_wanted_experts_out():
    wanted = {(0, 0): 0, (1, 1): 0, (0, 2): 0, (0, 3): 0}
    sim = high(wanted)
    assert not sim.transitions.grow_kv(3 * PAGE) and {key for _, key, _, _ in sim.jobs} == {(0, 2), (0, 3)}
    settled(sim)
    assert sim.transitions.kv_bytes == 3 * PAGE
    assert active(sim) == [[0, BASE, BASE, BASE], [BASE, 0, BASE]], "the last of the wanted went"
    with pytest.raises(MemoryError, match="leave"):
        sim.transitions.grow_kv(8 * PAGE)
    assert not sim.transitions.grow_kv(7 * PAGE), "all there is: the reserve too, once nothing can be demoted"
    settled(sim)
    assert sim.transitions.kv_bytes == 10 * PAGE and sim.tracker.free == 0
    sim.transitions.shrink_kv(10 * PAGE)
    sim.transitions.want(wanted)
    settled(sim)
    assert active(sim)[0] == [0, BASE, 0, 0]


def test_moves_on_the_host_go_on_while_the_kv_cache_has_every_byte():
    """A promotion that never fits stands before them; they need nothing of the device."""
    sim = Simulation(HOST)
    sim.transitions.grow_kv(sim.transitions.headroom.most_kv())
    settled(sim)
    assert sim.transitions.headroom.settled() < 0
    sim.transitions.want({(0, 0): 0, (0, 1): 2})
    settled(sim)
    assert sim.residency.entries[0, 1].active == 2 and sim.residency.entries[0, 0].active == HOST.base


def test_pools_that_cannot_shrink_are_settled_from_the_start():
    """Three high blocks, and low ones for the others and one demotion: experts change places in them."""
    sim = Simulation(POOLS)
    assert active(sim) == [[0, 0, 0, 1], [1, 1, 1]] and sim.pools[1].blocks == 5
    sim.transitions.want({(1, 0): 0, (1, 1): 0, (1, 2): 0})
    settled(sim)
    assert active(sim) == [[1, 1, 1, 1], [0, 0, 0]]
    with pytest.raises(MemoryError):
        sim.transitions.grow_kv(3 * PAGE)
    assert sim.transitions.grow_kv(2 * PAGE)


@pytest.mark.parametrize("kind", [POOLS, THIRDS], ids=["two versions", "three"])
def test_divided_pools_reach_whatever_fits_them(kind):
    """Any wanted set within each pool's blocks is reached from any other, with bytes left over that no pool can use."""
    rng = random.Random(0)
    for _ in range(40):
        sim = Simulation(kind)
        for _ in range(4):
            keys = rng.sample(all_keys(), len(all_keys()))
            wanted = {}
            for version in range(kind.base):
                for _ in range(rng.randint(0, kind.blocks(version))):
                    if keys:
                        wanted[keys.pop()] = version
            sim.transitions.want(wanted)
            settled(sim, 40)
            there = {key: entry.active for key, entry in sim.residency.entries.items()}
            assert all(there[key] <= version for key, version in wanted.items()), "at it, or better while nobody asks"
            assert not sim.transitions.waiting()


@pytest.mark.parametrize("kind", [RUNGS, CRAMPED, DIVIDED], ids=["room", "cramped", "divided"])
def test_exact_wants_are_carried_out_to_the_letter(kind, monkeypatch):
    """What is named on the host goes there though nobody needs its bytes, and first: others wait for those."""
    monkeypatch.setattr(transitions, "AHEAD", 1)
    rng = random.Random(1)
    sim = Simulation(kind)
    for _ in range(40):
        keys = rng.sample(all_keys(), len(all_keys()))
        wanted = {key: 0 if i < 2 + kind.fixed else rng.randint(1, kind.base) for i, key in enumerate(keys)}
        sim.transitions.want(wanted, exact=True)
        settled(sim, 30)
        assert {key: entry.active for key, entry in sim.residency.entries.items()} == wanted
        assert not sim.transitions.waiting()


def test_experts_on_the_host_that_are_not_named_stay():
    sim = promoted(RUNGS, {(0, 0): 1, (0, 1): 2, (0, 2): 0})
    assert active(sim) == [[1, 2, 0, 4], [4, 4, 4]]
    sim.transitions.want({(0, 3): 3, (0, 1): 4})
    settled(sim)
    assert active(sim) == [[1, 4, 0, 3], [4, 4, 4]], "one was named at the base, one was not; nobody needs (0, 2)'s"
    assert not sim.transitions.grow_kv(6 * PAGE)
    settled(sim)
    assert active(sim)[0][2] == 4 and sim.transitions.kv_bytes == 6 * PAGE


def test_experts_that_leave_for_the_kv_cache_go_where_they_are_named():
    """First to the base, at once; to their place on the host when a policy has named it."""
    sim = promoted(RUNGS, {(0, 0): 0, (0, 1): 0, (1, 0): 2})
    assert not sim.transitions.grow_kv(5 * PAGE)
    sim.transitions.want({(0, 0): 0, (0, 1): 1, (1, 0): 2})
    settled(sim)
    assert active(sim) == [[0, 1, 4, 4], [2, 4, 4]] and sim.transitions.kv_bytes == 5 * PAGE
