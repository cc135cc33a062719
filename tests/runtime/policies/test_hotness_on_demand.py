"""`hotness:lo=stored`: what is in memory before any token, what leaves, at which version experts come; all by hand.

Then how it moves experts to what they earn beside passes, by a model of memory and arrivals.
"""

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from moepack.pack.spec import Version
from moepack.runtime.policies.beside import EACH, MOVES, Moves
from moepack.runtime.policies.contract import Changes, Interval, LayerReached, Setting
from moepack.runtime.policies.heat import ExpertHeat
from moepack.runtime.policies.hotness import ENTRY
from moepack.runtime.policies.lru import Recent, RecentOptions
from moepack.runtime.policies.mixed_cache import MixedCache
from moepack.runtime.policies.placements import ABSENT, STORED, Placement

W4, W2 = (Placement(Version.of(name, 64)) for name in ("w4", "w2"))
TRAFFIC = [[1.0, 60.0, 9.0, 30.0], [38.0, 2.0, 52.0, 8.0]]


def setting(ladder=(W4, STORED), **more):
    sizes, losses = ((4, 2, 0), [0.0, 1.0, 9.0]) if len(ladder) == 3 else ((4, 0), [0.0, 9.0])
    return Setting([4, 4], ladder, [sizes] * 2, TRAFFIC, [np.array([losses] * 4)] * 2, **more)


def made(options, given, room):
    """The policy, and what is in memory before any token."""
    policy = ENTRY.make(given, ENTRY.parse(f"lo=stored,{options}"))
    return policy, dict(policy.decide(Interval(0.0, [room, 0], [np.zeros(4, np.int64)] * 2)) or {})


def reach(policy, layer, counts, room, time=0.0, **told):
    return policy.decide(LayerReached(time, [room, 0], layer, np.array(counts), **told))


def test_before_any_token_the_busiest_are_there():
    """Room for three of eight: shares are 60, 30 and 9 of the first layer, 38 and 52 of the second."""
    policy, first = made("hi=w4", setting(), 12)
    assert first == {(0, 1): 0, (1, 2): 0, (1, 0): 0} and policy.needs.layers and not policy.needs.prediction
    assert policy.worth((0, 1)) == pytest.approx(0.6) and policy.worth((1, 3)) == pytest.approx(0.08)
    assert made("hi=w4", setting(most=((2, 0), (0, 0))), 12)[1] == {(0, 1): 0, (1, 2): 0}, "two blocks of memory"
    assert made("hi=w4,prior=none", setting(), 12)[1] == {}


def test_the_coldest_leave_whenever_they_were_used():
    """The first layer's expert 0 was used last, and is the coldest: it leaves first. `lru` drops another."""
    policy, _ = made("hi=w4", setting(), 12)
    assert dict(reach(policy, 0, [1, 0, 0, 0], 12)) == {(0, 0): 0, (1, 0): 1}, "0.38 is the least of the three"
    # with alpha 0.5 expert 0 has (0.5 * 0.01 + 0.5 + 0.5 * 0.01) / 1.5 of its layer's traffic, 0.34
    assert policy.worth((0, 0)) == pytest.approx(0.51 / 1.5)
    assert dict(reach(policy, 1, [1, 0, 0, 0], 12)) == {(1, 0): 0, (0, 0): 1}
    recent = Recent(setting((W4, ABSENT)), RecentOptions(lo="absent"))
    first = recent.decide(Interval(0.0, [12, 0], [np.zeros(4, np.int64)] * 2))
    assert first == {(0, 1): 0, (1, 2): 0, (1, 0): 0}, "before any token `lru` has the same"
    reach(recent, 0, [1, 0, 0, 0], 12)
    assert dict(reach(recent, 1, [1, 0, 0, 0], 12)) == {(1, 0): 0, (1, 2): 1}


def test_before_any_token_experts_are_at_what_their_heat_earns():
    """A wait counts 8 for w2's 2 bytes, and w4 saves a loss of 1 for 2 more: 4 times heat against 0.5 times heat. So
    the hottest is worth 0.3 at w4, and the two coldest 0.08 and 0.04 in memory at all. Four bytes are for moves."""
    policy, first = made("", setting((W4, W2, STORED)), 20)
    assert first == {(0, 1): 0, (1, 2): 0, (1, 0): 1, (0, 3): 1, (0, 2): 1, (1, 3): 1}
    assert dict(reach(policy, 0, [1, 0, 0, 0], 17)) == {(0, 0): 1, (0, 2): 2}, "the lowest version; 0.09 is now 0.06"


def test_prefetches_take_the_room_of_the_coldest():
    policy, _ = made("hi=w4,prefetch=yes", setting(), 12)
    assert policy.needs.prediction
    got = reach(policy, 0, [0, 1, 0, 0], 12, predicted=np.array([0, 0, 1, 1]))
    assert dict(got) == {(0, 1): 0, (1, 0): 1, (1, 3): 0}


def test_heat_by_hand():
    heat = ExpertHeat([[3.0, 1.0]], alpha=0.75, anchor=0.5, has_prior=True)
    assert heat.shares(0).tolist() == [0.75, 0.25] and not heat.has_counts
    heat.add_layer(0, np.array([0, 8]))
    heat.turn()  # the prior counts as 8 tokens, 6 and 2: three quarters of it and one of the counts are 4.5 and 3.5
    assert heat.values()[0].tolist() == [4.5 + 0.5 * 8 * 0.75, 3.5 + 0.5 * 8 * 0.25]
    heat.add([np.array([2, 0])])
    now = np.array([0.75 * 4.5 + 0.25 * 2, 0.75 * 3.5])
    assert heat.shares(0) == pytest.approx((now + 0.5 * 6.5 * np.array([0.75, 0.25])) / 9.75)


def test_a_large_cache_lets_the_coldest_go_first():
    """400 experts, of which more leave than are sorted at first."""
    experts = [200, 200]
    traffic = [np.random.default_rng(p).permutation(200) + 1.0 for p in range(2)]
    given = Setting(
        experts, (W4, STORED), [(4, 0)] * 2, [t.tolist() for t in traffic], [np.array([[0.0, 9.0]] * 200)] * 2
    )
    policy, first = made("hi=w4,prior=calibration", given, 1600)
    assert len(first) == 400
    gone = [key for key, to in reach(policy, 0, [1] * 200, 4 * 290).items() if to == 1]
    heats = [policy.worth(key) for key in gone]
    assert len(gone) == 110 and all(layer == 1 for layer, _ in gone) and heats == sorted(heats)
    assert max(heats) < min(policy.worth((1, e)) for e in range(200) if (1, e) not in gone)


# --- moves beside passes

LADDER = (W4, W2, STORED)
SIZES, LOSSES = (40, 22, 0), [0.0, 1.0, 9.0]
LOW, BASE = 1, 2


class Memory:
    """What the runtime does with answers: a pass goes through the layers, copies beside it arrive when told to."""

    def __init__(self, layers, experts, room, traffic=None):
        self.room, self.layers, self.experts, self.time = room, layers, experts, 0.0
        rows = traffic or [[1.0] * experts] * layers
        options = ENTRY.parse("lo=stored,slack=0")
        ask = Setting([experts] * layers, LADDER, [SIZES] * layers, rows, [np.array([LOSSES] * experts)] * layers)
        self.policy = ENTRY.make(ask, options)
        self.at = dict(self.policy.decide(Interval(0.0, [room], [np.zeros(experts)] * layers)) or {})
        self.going = {}
        self.old = []  # bytes of versions that the running pass may still read
        self.waited = []

    @property
    def bytes(self):
        held = [*self.at.values(), *self.going.values()]
        return sum(SIZES[v] for v in held) + sum(self.old)

    def arrive(self, key, fails=False):
        to = self.going.pop(key)
        if not fails:
            self.old.append(SIZES[self.at[key]])
            self.at[key] = to

    def reach(self, layer, counts):
        placed = [self.at.get((layer, e), BASE) for e in range(self.experts)]
        coming = [self.going.get((layer, e), -1) for e in range(self.experts)]
        told = {"placed": placed, "coming": coming}
        answer = self.policy.decide(LayerReached(self.time, [self.room], layer, np.array(counts), **told))
        assert isinstance(answer, Changes)
        for key, to in answer.items():
            if to == BASE:
                self.at.pop(key, None)
                self.going.pop(key, None)
        for key, to in answer.items():
            if to != BASE and self.at.get(key) != to:
                assert key[0] == layer and key not in self.at, "what is in memory is never waited for"
                self.at[key] = to
                self.waited.append(key)
        for key, to in answer.beside.items():
            assert key in self.at and key not in self.going and self.at[key] != to
            self.going[key] = to
        assert self.bytes <= self.room
        assert all((layer, e) in self.at for e, n in enumerate(counts) if n), "all that the pass needs is there"
        assert len(self.going) <= MOVES and len(answer.beside) <= EACH + 1
        return answer

    def end(self):
        self.old.clear()
        self.time += 2.0


def test_a_hot_expert_rises_and_no_pass_waits_for_it():
    memory = Memory(2, 4, 260, [[50.0, 30.0, 15.0, 5.0], [25.0] * 4])
    assert {key for key, at in memory.at.items() if at == 0} == {(0, 0), (0, 1)} and len(memory.at) == 8
    moves = {}
    for _ in range(8):
        for layer, counts in enumerate(([0, 0, 9, 1], [1, 1, 1, 1])):
            moves |= memory.reach(layer, counts).beside
        for key in list(memory.going):
            memory.arrive(key)
        memory.end()
    assert moves[0, 2] == 0 and moves[0, 1] == LOW, "the one that cooled down gave its room"
    assert memory.at[0, 2] == 0 and memory.at[0, 1] == LOW and not memory.waited


def test_a_stored_expert_comes_at_the_lowest_version_first():
    memory = Memory(1, 4, 104, [[90.0, 8.0, 1.5, 0.5]])
    assert memory.at == {(0, 0): 0, (0, 1): LOW}
    memory.reach(0, [0, 0, 0, 9])
    assert memory.at[0, 3] == LOW and memory.waited == [(0, 3)]


def test_a_failed_copy_gives_its_room_back():
    cache = MixedCache([SIZES])
    cache.fill({(0, 0): LOW}, 100)
    moves = Moves(cache, [1], [SIZES])
    for fails in (True, False):
        answer = Changes()
        moves.begin(0, np.array([1]), np.array([1.0]), np.array([0]), 1000, answer)
        assert answer.beside == {(0, 0): 0} and cache.bytes == 62
        moves.settle(0, [LOW if fails else 0], [-1])
        assert cache.bytes == (22 if fails else 62) and cache.held == {(0, 0): LOW if fails else 0}
    moves.settle(0, [0], [-1])
    assert cache.bytes == 40, "a pass has gone by: the earlier version is free"


def test_an_expert_that_leaves_while_it_moves_takes_no_room():
    cache = MixedCache([SIZES] * 2)
    cache.fill({(0, 0): LOW, (0, 1): 0}, 100)
    moves, answer = Moves(cache, [2, 2], [SIZES] * 2), Changes()
    moves.begin(0, np.array([1, 1]), np.array([0.5, 0.5]), np.array([0, 0]), 1000, answer)
    cache.drop((0, 0))
    assert cache.bytes == 80
    moves.settle(1, [BASE] * 2, [-1] * 2)
    assert cache.bytes == 40 and list(cache.held) == [(0, 1)]


@pytest.mark.parametrize("room", [400, 700, 1000])
def test_rooms_hold_whatever_arrives(room):
    """Ten experts of three layers need 400 bytes at once at most; all of them at the best take 1,200."""

    @settings(max_examples=25)
    @drawn(st.data())
    def check(data):
        memory, rng = Memory(3, 10, room), np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
        for _ in range(12):
            busy = rng.permutation(10)
            for layer in range(3):
                for key in list(memory.going):
                    if (drawn := rng.random()) < 0.4:
                        memory.arrive(key, fails=drawn < 0.1)
                chosen = rng.integers(1, 11) if rng.random() < 0.1 else 2
                memory.reach(layer, np.isin(np.arange(10), busy[:chosen]).astype(int).tolist())
            memory.end()

    check()
