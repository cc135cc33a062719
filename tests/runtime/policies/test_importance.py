"""The policy `importance` and its cache: each formula and each rule by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.policies.contract import Interval, LayerReached, Setting
from moepack.runtime.policies.importance import Importance, ImportanceOptions, critical_count, retention
from moepack.runtime.policies.mixed_cache import MixedCache
from moepack.runtime.policies.placements import ABSENT, Placement
from moepack.runtime.policies.reducers import GATES, HEAVY, ranked

W4, W2 = (Placement(Version.of(name, 64)) for name in ("w4", "w2"))


def setting(experts, sizes=(4, 2, 0)):
    ladder = (W4, W2, ABSENT) if len(sizes) == 3 else (W4, ABSENT)
    losses = [np.array([[0.0, 1.0, 9.0][: len(sizes)]] * n) for n in experts]
    return Setting(experts, ladder, [sizes] * len(experts), [[1.0] * n for n in experts], losses)


def reached(layer, counts, room=100, **told):
    """A layer that is reached, with room in all; lists become arrays."""
    arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in told.items()}
    arrays["sums"] = {GATES: arrays.pop("gates", None), HEAVY: arrays.pop("important", np.zeros(len(counts)))}
    arrays["predicted_sums"] = {GATES: arrays.pop("predicted_gates", None)}
    return LayerReached(0.0, [room, 0], layer, np.array(counts), **arrays)


def test_the_retention_ratio_and_the_number_of_critical_experts():
    """Equation 4 with lambda = 2 r - 1, five layers: cosines of 0, 45, 90, 135 and 180 degrees.

    Equation 5 rounds up; what is whole stays so, whatever the product's last bit says.
    """
    got = [retention(layer, 5, 0.75) for layer in range(5)]
    assert got == pytest.approx([1.0, 0.5 + 0.25 * (1 + math.sqrt(0.5)), 0.75, 0.5 + 0.25 * (1 - math.sqrt(0.5)), 0.5])
    assert [retention(layer, 5, 1.0) for layer in range(5)] == [1.0] * 5
    assert retention(4, 5, 0.5) == 0.0 and retention(0, 1, 0.75) == 0.75, "one layer has the average itself"
    for layers in range(2, 50):
        for r in (0.5, 0.75, 0.9, 1.0):
            ratios = [retention(layer, layers, r) for layer in range(layers)]
            assert sum(ratios) / layers == pytest.approx(r) and ratios == sorted(ratios, reverse=True)
    assert [critical_count(0.5, n) for n in (1, 2, 3, 8)] == [1, 1, 2, 4] and critical_count(0.01, 8) == 1
    assert all(critical_count(n / m, m) == n for m in range(1, 130) for n in range(m + 1))


def test_experts_are_ranked_by_heavy_hitters_then_by_tokens():
    counts = np.array([5, 9, 0, 7, 9])
    assert ranked(counts, np.array([2, 1, 9, 2, 1]), counts) == [3, 0, 1, 4], "what has no tokens is not there"
    assert ranked(counts, np.array([0.1, 0.2, 0.9, 0.3, 0.2])) == [3, 1, 4, 0]


def answers(policy, *events):
    return [dict(policy.decide(event) or {}) for event in events]


def test_a_prompts_critical_experts_process_heavy_hitters():
    """Two layers at r = 0.75: all of the first are critical, half of the second."""
    policy = Importance(setting([4, 4]), ImportanceOptions(prefetch="no"))
    assert policy.needs.layers and policy.needs.importance == 0.2 and not policy.needs.prediction
    prompt = {"is_prompt": True, "gates": [9.0, 0.1, 0.1, 0.1]}
    first, second = answers(
        policy,
        reached(0, [8, 4, 4, 1], important=[0, 1, 2, 0], **prompt),
        reached(1, [8, 4, 4, 1], important=[0, 1, 2, 0], **prompt),
    )
    assert first == {(0, 2): 0, (0, 1): 0, (0, 0): 0, (0, 3): 0}
    assert second == {(1, 2): 0, (1, 1): 0, (1, 0): 1, (1, 3): 1} and next(iter(second)) == (1, 2)
    (unknown,) = answers(policy, reached(1, [8, 4, 4, 1], **prompt))
    assert {e for (_, e), v in unknown.items() if v == 0} == {0, 1, 2}, "by tokens; what was high is reused"


def test_in_decoding_gate_weights_decide_among_the_active():
    """M is the experts that the step needs: with all of the layer's nothing would ever be low."""
    policy = Importance(setting([8, 8]), ImportanceOptions(prefetch="no"))
    (got,) = answers(policy, reached(1, [1, 0, 1, 0, 1, 0, 1, 0], gates=[0.1, 0, 0.4, 0, 0.2, 0, 0.3, 0]))
    assert got == {(1, 2): 0, (1, 6): 0, (1, 4): 1, (1, 0): 1} and list(got) == [(1, 2), (1, 6), (1, 4), (1, 0)]


def test_what_is_sub_critical_without_a_low_version_is_left_out():
    policy = Importance(setting([4, 4], (4, 0)), ImportanceOptions(lo="absent", prefetch="no"))
    (got,) = answers(policy, reached(1, [1, 1, 1, 1], gates=[0.1, 0.4, 0.2, 0.3]))
    assert got == {(1, 1): 0, (1, 3): 0, (1, 2): 1, (1, 0): 1}, "1 is the base here"
    (again,) = answers(policy, reached(1, [1, 1, 1, 1], gates=[0.4, 0.1, 0.3, 0.2]))
    assert again == {(1, 0): 0, (1, 2): 0, (1, 3): 0, (1, 1): 0}, "what is there is reused"
    strict = Importance(setting([4, 4], (4, 0)), ImportanceOptions(lo="absent", prefetch="no", reuse="no"))
    event = reached(1, [1, 1, 1, 1], gates=[0.1, 0.4, 0.2, 0.3])
    assert answers(strict, event, reached(1, [1, 1, 1, 1], gates=[0.4, 0.1, 0.3, 0.2]))[1] == {
        (1, 0): 0, (1, 2): 0, (1, 3): 1, (1, 1): 1
    }  # fmt: skip


def test_prefetch_in_decoding_is_of_the_predicted_at_their_precision():
    """Equation 8, for the next layer's own t: two of four high."""
    policy = Importance(setting([4, 4]), ImportanceOptions())
    told = {"predicted": [1, 1, 1, 1], "predicted_gates": [0.1, 0.4, 0.2, 0.3]}
    (got,) = answers(policy, reached(0, [1, 0, 0, 0], gates=[1.0, 0, 0, 0], **told))
    assert list(got.items()) == [((0, 0), 0), ((1, 1), 0), ((1, 3), 0), ((1, 2), 1), ((1, 0), 1)]
    (last,) = answers(policy, reached(1, [0, 1, 0, 0], gates=[0, 1.0, 0, 0]))
    assert list(last) == [(1, 1)], "behind the last layer there is none"


def test_prefetch_of_a_prompt_is_of_the_most_frequent():
    """Equation 7: the top t by predicted tokens, whatever their gates; of equals those with the larger gates."""
    policy = Importance(setting([4, 4]), ImportanceOptions())
    told = {"predicted": [3, 9, 3, 0], "predicted_gates": [0.5, 0.1, 0.9, 0.0]}
    (got,) = answers(
        policy, reached(0, [1, 0, 0, 0], gates=[1.0, 0, 0, 0], is_prompt=True, important=[1, 0, 0, 0], **told)
    )
    assert list(got.items()) == [((0, 0), 0), ((1, 1), 0), ((1, 2), 0)]


def test_random_experts_are_as_many():
    """The papers' comparison: the same share, whoever they are; the same ones every time."""

    def high():
        policy = Importance(setting([8, 8]), ImportanceOptions(by="random", prefetch="no", reuse="no"))
        assert not policy.needs.importance
        events = [reached(1, [1] * 8) for _ in range(20)]
        return [sum(1 << e for (_, e), v in got.items() if v == 0) for got in answers(policy, *events)]

    chosen = high()
    assert all(bits.bit_count() == 4 for bits in chosen) and len(set(chosen)) > 10 and chosen == high()


def test_before_any_token_it_holds_what_was_busy_in_calibration():
    """Room for 18: two of the first layer and all critical ones of it are high, half of the second's."""
    given = replace(setting([4, 4]), traffic=[[5.0, 90.0, 1.0, 8.0], [70.0, 2.0, 60.0, 50.0]])
    policy = Importance(given, ImportanceOptions(prefetch="no"))
    first = policy.decide(Interval(0.0, [9, 9], [np.zeros(4, np.int64)] * 2))
    assert first == {(0, 1): 0, (1, 0): 0, (1, 2): 0, (1, 3): 1, (0, 3): 0}
    assert policy.worth((0, 1)) > policy.worth((1, 0)) > policy.worth((0, 3)) > policy.worth((1, 1)) == 0


# --- the cache

SIZES = [[4, 2, 0], [5, 3, 0]]
ALIKE = [[4, 2, 0], [4, 2, 0]]
HIGH, LOW, NONE = range(3)


def test_what_is_not_there_is_not_held():
    """Copies fail, are given up, and leave for the KV reserve: the cache hears of it when the layer is reached."""
    cache = MixedCache(SIZES)
    cache.serve(0, {0: HIGH, 1: HIGH, 2: LOW}, 100)
    placed, none = np.array([NONE, HIGH, LOW, NONE]), np.array([-1] * 4)
    assert cache.serve(0, {1: LOW}, 100, placed, none) == {(0, 1): HIGH, (0, 0): NONE}
    cache.serve(0, {0: HIGH}, 100, placed, none)
    assert cache.serve(0, {0: LOW}, 100, placed, none) == {(0, 0): LOW}, "high has gone: low is fetched"
    cache.serve(0, {0: HIGH}, 100)
    coming = np.array([HIGH, -1, -1, -1])
    assert cache.serve(0, {0: LOW}, 100, placed, coming) == {(0, 0): HIGH}, "high is on its way: it is waited for"


def test_what_leaves_first():
    """What was foreseen and is not needed, before what was used; a token whose experts are all here uses them too."""
    cache = MixedCache(ALIKE)
    cache.serve(0, {0: HIGH}, 100)
    cache.foresee(1, {0: HIGH, 1: HIGH}, 100, {})
    cache.serve(1, {0: HIGH}, 100)
    assert list(cache.held) == [(1, 1), (0, 0), (1, 0)]
    cache.serve(1, {1: HIGH}, 100)
    assert list(cache.held) == [(0, 0), (1, 0), (1, 1)], "what was foreseen has been used"
    cache.serve(0, {0: HIGH}, 100, np.array([HIGH, NONE, NONE, NONE]), np.array([-1] * 4))
    assert list(cache.held) == [(1, 0), (1, 1), (0, 0)] and cache.bytes == 12


def test_prefetches_take_neither_what_is_needed_nor_what_the_next_layer_needs():
    cache = MixedCache(ALIKE)
    cache.serve(1, {0: HIGH}, 100)
    cache.serve(0, {0: HIGH}, 100)
    assert cache.foresee(1, {1: HIGH, 0: HIGH}, 8, {(0, 0): HIGH}) == {}
    assert cache.foresee(1, {0: LOW}, 8, {}) == {}, "it is there at a better one"
    assert cache.foresee(1, {1: HIGH, 0: HIGH}, 8, {}) == {(0, 0): NONE, (1, 1): HIGH}


def test_blocks_bound_each_placement():
    """Two blocks of either placement, whatever the bytes: the least recently used of the same placement leaves."""
    cache = MixedCache(ALIKE, most=[(1, 1, 0), (1, 1, 0)])
    cache.serve(0, {0: HIGH, 1: LOW}, 100)
    cache.serve(1, {0: LOW}, 100)
    assert cache.serve(1, {1: HIGH, 2: HIGH}, 100) == {(1, 1): HIGH, (1, 2): HIGH, (0, 0): NONE}
    assert cache.held == {(0, 1): LOW, (1, 0): LOW, (1, 2): HIGH, (1, 1): HIGH}
    got = cache.serve(0, {0: HIGH, 1: HIGH, 2: HIGH, 3: HIGH}, 100)
    assert [got[0, e] for e in range(4)] == [HIGH, HIGH, LOW, LOW], "the least important are served at what there is"
    got = MixedCache(ALIKE, most=[(2, 0, 0), (1, 1, 0)]).serve(0, {0: HIGH, 1: LOW, 2: LOW, 3: LOW}, 100)
    assert [got[0, e] for e in range(4)] == [HIGH, LOW, HIGH, HIGH], "a better placement first"
    with pytest.raises(InputError, match="4 experts are more than there are blocks"):
        MixedCache(ALIKE, most=[(1, 1, 0), (1, 0, 0)]).serve(0, dict.fromkeys(range(4), HIGH), 100)
    some = MixedCache([[4, 0], [4, 0]], most=[(1, 0), (1, 0)])
    got = some.serve(0, dict.fromkeys((3, 2, 1), HIGH), 100, all_of_them=False)
    assert got == {(0, 3): HIGH, (0, 2): HIGH, (0, 1): 1}
    ahead = MixedCache(ALIKE, most=[(1, 0, 0), (0, 0, 0)])
    ahead.serve(0, {0: HIGH}, 100)
    assert ahead.foresee(1, {1: HIGH}, 100, {(0, 0): HIGH}) == {}, "the only block is in use"
    assert ahead.foresee(1, {1: HIGH}, 100, {}) == {(0, 0): NONE, (1, 1): HIGH}


def test_layers_of_other_sizes_have_blocks_of_their_own():
    cache = MixedCache([[4, 0], [6, 0]], most=[(1, 0), (1, 0)])
    cache.serve(0, {0: HIGH}, 100)
    assert cache.serve(1, {0: HIGH}, 100) == {(1, 0): HIGH}, "nobody leaves"
    assert cache.serve(1, {1: HIGH}, 100) == {(1, 1): HIGH, (1, 0): 1}
