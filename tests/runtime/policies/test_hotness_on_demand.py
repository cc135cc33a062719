"""`hotness:lo=stored`: what is in memory before any token, what leaves, at which version experts come; all by hand."""

import numpy as np
import pytest

from moepack.pack.spec import Version
from moepack.runtime.policies.contract import Interval, LayerReached, Setting
from moepack.runtime.policies.heat import ExpertHeat
from moepack.runtime.policies.hotness import ENTRY
from moepack.runtime.policies.lru import Recent, RecentOptions
from moepack.runtime.policies.placements import ABSENT, STORED, Placement, read_placement
from moepack.runtime.policies.registry import parse_policy

VERSIONS = tuple(Version.of(name, 0 if name == "bf16" else 64) for name in ("bf16", "w4", "w2"))
BF16, W4, W2 = map(Placement, VERSIONS)
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


def test_the_word_and_the_ladders():
    def ladder(text):
        (got,) = parse_policy(f"hotness:{text}").options.ladders(VERSIONS)
        return tuple(map(str, got))

    assert ladder("lo=stored") == ladder("hi=w4,lo=stored") == ("w4", "w2", "stored")
    assert ladder("lo=stored,between=no") == ("w4", "stored") and ladder("hi=w2,lo=stored") == ("w2", "stored")
    (got,) = parse_policy("hotness:lo=stored").options.ladders((VERSIONS[0], Version.of("w4d5"), *VERSIONS[1:]))
    assert str(got[0]) == "w4d5"
    assert ladder("hi=bf16,lo=stored") == ("bf16", "w4", "w2", "stored")
    assert read_placement("stored", VERSIONS) == STORED != ABSENT
    options = parse_policy("hotness:lo=stored").options
    assert options.on_demand and options.keeps_low and options.spare_blocks == 0
    assert options.bytes_per_second is None and parse_policy("hotness:lo=stored,rate=200").options.rate == 200
    assert not parse_policy("hotness:lo=w2").options.on_demand
    with pytest.raises(ValueError, match="stored expert has no version"):
        Placement(None)


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
