"""`hotness:lo=stored` moves experts to what they earn beside passes; a model of memory and arrivals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.pack.spec import Version
from moepack.runtime.policies.beside import EACH, MOVES, Moves
from moepack.runtime.policies.contract import Changes, Interval, LayerReached, Setting
from moepack.runtime.policies.hotness import ENTRY
from moepack.runtime.policies.mixed_cache import MixedCache
from moepack.runtime.policies.placements import STORED, Placement

LADDER = (*(Placement(Version.of(name, 64)) for name in ("w4", "w2")), STORED)
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
    @given(st.data())
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
