"""`prefill` and `random`: pure code, numbers in and decisions out."""

from collections import Counter

import numpy as np
import pytest

from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Version
from moepack.runtime.planning.choice import ladders_of
from moepack.runtime.policies.contract import (
    DecodingBegan,
    Interval,
    PrefillEnded,
    SequenceBegan,
    SequenceEnded,
    Setting,
)
from moepack.runtime.policies.maps import uniform_map
from moepack.runtime.policies.prefill import Prefill, PrefillOptions
from moepack.runtime.policies.random_map import random_map
from moepack.runtime.policies.reducers import GATES

VERSIONS = tuple(Version.of(name, 0 if name == "bf16" else 64) for name in ("bf16", "w4", "w3", "w2", "w1"))
FALLING = [0.0, 1.0, 2.0, 4.0, 8.0]  # what a token loses at each placement
SIZE = 10  # bytes of an expert on the device


def policy(experts, traffic=None, most=None, **options):
    chosen = PrefillOptions(**options)
    (ladder,) = chosen.ladders(VERSIONS)
    sizes = [[SIZE] + [0] * (len(ladder) - 1)] * len(experts)
    losses = [np.array([FALLING[: len(ladder)]] * n) for n in experts]
    return Prefill(Setting(experts, ladder, sizes, traffic or [[1.0] * n for n in experts], losses, most), chosen)


def by_gates(rows):
    return {GATES: [np.array(row, float) for row in rows]}


def read(sequence, counts, gates=None):
    sums = counts if gates is None else gates
    return PrefillEnded(0.0, [], [np.array(row) for row in counts], by_gates(sums), sequence)


def begins(sequence, capacity):
    return DecodingBegan(0.0, capacity, sequence)


def passed(capacity, experts):
    return Interval(0.0, capacity, [np.zeros(n, np.int64) for n in experts])


def started(made, capacity):
    return made.decide(passed(capacity, list(made._setting.experts)))


def test_no_more_experts_than_a_layer_has(bundle):
    opened = open_bundle(bundle)
    assert ladders_of(opened, PrefillOptions(k=16))
    with pytest.raises(InputError, match="k=17: a layer has 16 experts"):
        ladders_of(opened, PrefillOptions(k=17))


def test_the_importance_is_the_papers():
    """S = alpha P / sum P + (1 - alpha) W / sum W, chunks added up before: by hand."""
    made = policy([3], alpha=0.25, k=1)
    started(made, [SIZE])
    assert made.decide(read(1, [[4, 1, 0]], [[1.0, 1.0, 0.0]])) is None
    assert made.decide(read(1, [[0, 1, 2]], [[0.0, 1.0, 1.0]])) is None
    wanted = made.decide(begins(1, [SIZE]))
    # P = 4, 2, 2 of 8; W = 1, 2, 1 of 4: the second expert leads by its weights
    assert [made.worth((0, e)) for e in range(3)] == [0.25 * 0.5 + 0.75 * 0.25, 0.25 * 0.25 + 0.75 * 0.5, 0.25]
    assert wanted[0, 1] == 0 and next(iter(wanted)) == (0, 1)


def test_the_rest_gets_widths_that_fall_with_importance():
    """Four experts at 2.5 bits have six increments: 3, 3, 2, 2 bits gain 20 of 32; 4, 3, 2, 1 gain 17."""
    made = policy([6], bits=2.5, alpha=1.0)
    started(made, [2 * SIZE])
    made.decide(read(1, [[0, 9, 5, 7, 1, 3]]))
    wanted = made.decide(begins(1, [2 * SIZE]))
    assert wanted == {(0, 1): 0, (0, 3): 0, (0, 2): 2, (0, 5): 2, (0, 4): 3, (0, 0): 3}
    assert list(wanted) == [(0, 1), (0, 3), (0, 2), (0, 5), (0, 4), (0, 0)], "the most important first"
    for bits, number in ((4, 1), (3, 2), (2, 3), (1, 4)):
        alike = policy([6], bits=float(bits), selector="no", k=0)
        assert started(alike, [99]) == {(0, e): number for e in range(6)}, "the base is named too"


def test_k_is_what_fits():
    for k, capacity, most, high in (
        (-1, 35, None, 3), (2, 35, None, 2), (9, 35, None, 3), (-1, 0, None, 0), (-1, 99, None, 4), (-1, -5, None, 0),
        (-1, 35, [[1, 9, 9, 9, 9]], 1),
    ):  # fmt: skip
        made = policy([4], most=most, k=k)
        assert Counter(started(made, [capacity]).values())[0] == high


def test_before_any_sequence_calibration_decides():
    made = policy([4], traffic=[[1.0, 8.0, 2.0, 4.0]], k=2)
    assert {key for key, to in started(made, [99]).items() if not to} == {(0, 1), (0, 3)}
    made.decide(read(1, [[0, 0, 3, 0]]))
    wanted = made.decide(begins(1, [99]))
    assert [key for key, to in wanted.items() if not to] == [(0, 2), (0, 1)], "of experts without a token too"


def test_sequences_are_merged_each_alike():
    """The mean of the S of those that decode: a prompt of a thousand tokens weighs as much as one of ten."""
    made = policy([3], k=1, alpha=1.0)
    started(made, [SIZE])
    made.decide(read(1, [[600, 400, 0]]))
    assert next(iter(made.decide(begins(1, [SIZE])))) == (0, 0)
    assert made.decide(Interval(9.0, [SIZE], [np.array([0, 50, 0])])) is None, "none while decoding"
    assert made.decide(SequenceBegan(0.0, [SIZE], 9, 2)) is None
    made.decide(read(2, [[0, 5, 5]]))
    made.decide(read(3, [[0, 0, 999]]))  # reads its prompt still: it does not count yet
    wanted = made.decide(begins(2, [SIZE]))
    assert [made.worth((0, e)) for e in range(3)] == pytest.approx([0.3, 0.45, 0.25]) and next(iter(wanted)) == (0, 1)
    assert made.decide(SequenceEnded(0.0, [SIZE], 1)) is None
    made.decide(begins(3, [SIZE]))
    assert [made.worth((0, e)) for e in range(3)] == pytest.approx([0, 0.25, 0.75]), "of those that live"


def test_a_pass_without_decoding_places_for_those_after_it():
    made = policy([3], k=1)
    started(made, [SIZE])
    made.decide(read(1, [[0, 0, 7]]))
    assert next(iter(made.decide(SequenceEnded(0.0, [SIZE], 1)))) == (0, 2)
    made.decide(read(2, [[0, 7, 0]]))
    assert next(iter(made.decide(begins(2, [SIZE])))) == (0, 1)
    made.decide(read(3, [[7, 0, 0]]))
    assert made.decide(SequenceEnded(0.0, [SIZE], 3)) is None, "one that decodes keeps its own"
    assert made.decide(SequenceEnded(0.0, [SIZE], 9)) is None and made.decide(begins(8, [SIZE])) is None, "unknown"
    assert not made._sequences.keys() - {2}


def test_a_budget_that_shrinks_lessens_k_at_once():
    made = policy([4], traffic=[[4.0, 3.0, 2.0, 1.0]], bits=2.0)
    assert Counter(started(made, [3 * SIZE]).values())[0] == 3
    assert made.decide(passed([3 * SIZE - 1], [4])) == {(0, 0): 0, (0, 1): 0, (0, 2): 3, (0, 3): 3}
    assert made.decide(passed([2 * SIZE], [4])) is None, "as many fit as before"
    assert made.decide(passed([4 * SIZE], [4])) is None, "more is seen when the next sequence decodes"
    made.decide(read(1, [[1, 1, 1, 1]]))
    assert Counter(made.decide(begins(1, [4 * SIZE])).values()) == {0: 4}


def test_random_has_the_bytes_of_uniform(bundle):
    """In every layer as many experts of each version, others of them; a seed draws the same again."""
    opened = open_bundle(bundle)
    sizes = {v.name: v.resident_size(opened.layers[0].matrices) for v in opened.versions}
    room = 64 * sizes["w3"] + 20 * (sizes["w4"] - sizes["w3"]) + 1
    even = uniform_map(opened, room)
    drawn = [random_map(opened, seed, room) for seed in range(40)]
    assert sum(name == "w4" for row in even for name in row) == 20
    for made in drawn:
        assert [Counter(row) for row in made] == [Counter(row) for row in even]
        assert sum(sizes[name] for row in made for name in row) <= room
    assert drawn[3] == random_map(opened, 3, room) and len(set(drawn)) == 40
    often = Counter(
        (p, e) for made in drawn for p, row in enumerate(made) for e, name in enumerate(row) if name == "w4"
    )
    assert len(often) == 64, "in 40 draws of 5 of 16 each expert comes up"
