"""Policies that change versions, and what fits a budget: pure code, numbers in and decisions out."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from moepack.pack.errors import InputError
from moepack.runtime.planning.capacity import base_bytes, even_room, expected_loss, room_by_loss
from moepack.runtime.policies.contract import LiveOptions, Observation
from moepack.runtime.policies.hotness import Hotness, HotnessOptions, top_with_hysteresis
from moepack.runtime.policies.lru import Recent
from moepack.runtime.policies.registry import parse_policy
from moepack.runtime.trace import Record, TraceWriter, read_trace, replay


def test_scores_are_the_papers_average() -> None:
    policy = Hotness([3], 0, HotnessOptions(interval=1.0, alpha=0.75))
    assert policy.observe(Observation(0.0, [[8, 0, 4]], [1])) is None
    assert policy.observe(Observation(0.5, [[0, 4, 0]], [1])) is None, "counted, not yet decided"
    assert policy.observe(Observation(1.0, [[0, 0, 0]], [1])) == {(0, 0): 0}
    assert policy.scores == [[2.0, 1.0, 1.0]]
    policy.observe(Observation(2.0, [[0, 0, 8]], [1]))
    assert policy.scores == [[1.5, 0.75, 2.75]]


def test_an_interval_without_tokens_changes_nothing() -> None:
    policy = Hotness([2], 0, HotnessOptions(interval=1.0))
    policy.observe(Observation(0.0, [[1, 0]], [1]))
    assert policy.observe(Observation(1.0, [[1, 0]], [1])) == {(0, 0): 0}
    assert policy.observe(Observation(9.0, [[0, 0]], [1])) is None
    assert policy.scores[0][0] == 1.0


def test_less_room_is_seen_at_once() -> None:
    policy = Hotness([3], 1, HotnessOptions(interval=1.0))
    policy.observe(Observation(0.0, [[5, 3, 1]], [2]))
    assert policy.observe(Observation(1.0, [[5, 3, 1]], [2])) == {(0, 0): 1, (0, 1): 1}
    assert policy.observe(Observation(1.1, [[0, 0, 0]], [1])) == {(0, 0): 1}


def test_margin_and_slack_hold_experts() -> None:
    assert top_with_hysteresis([10, 9, 8, 0], [], 2, 0.1, 0) == [0, 1]
    assert top_with_hysteresis([10, 9, 8, 0], [2], 2, 0.2, 0) == [0, 2], "an incumbent with a free place beside it"
    assert top_with_hysteresis([10, 9, 8.5, 0], [2, 0], 2, 0.1, 0) == [0, 2], "9 is not 10 % above 8.5"
    assert top_with_hysteresis([10, 9, 8, 0], [2, 0], 2, 0.1, 0) == [0, 1]
    assert top_with_hysteresis([10, 9, 8, 0], [2, 0], 2, 0.1, 1) == [0, 2], "third of two, with a slack of one"
    assert top_with_hysteresis([10, 9, 8, 1], [3, 0], 2, 0.1, 1) == [0, 1], "fourth: the slack is passed"
    assert top_with_hysteresis([1, 2, 3, 4], [0, 1, 2], 1, 0.1, 1) == [2], "room fell: the best incumbent stays"
    assert top_with_hysteresis([0, 0, 0], [], 2, 0.1, 0) == [], "nobody asked for them"


def test_top_n_without_hysteresis_is_top_n() -> None:
    rng = random.Random(0)
    for _ in range(200):
        scores = [rng.random() for _ in range(8)]
        current = rng.sample(range(8), 3)
        want = sorted(range(8), key=lambda e: -scores[e])[:3]
        assert top_with_hysteresis(scores, current, 3, 0.0, 0) == want


def test_hysteresis_lessens_churn() -> None:
    """Two experts that take turns in being a little hotter: with a margin nothing moves."""
    moves = {}
    for margin in (0.0, 0.3):
        policy = Hotness([2], 0, HotnessOptions(interval=1.0, alpha=0.0, margin=margin, slack=0))
        policy.observe(Observation(0.0, [[0, 0]], [1]))
        sets = [policy.observe(Observation(t, [[10 + t % 2, 10 + (t + 1) % 2]], [1])) for t in range(1, 20)]
        moves[margin] = sum(a != b for a, b in itertools.pairwise(sets))
    assert moves == {0.0: 18, 0.3: 0}


def test_recent_keeps_what_was_used_last() -> None:
    cache = Recent(0)
    assert cache.observe(Observation(0, [[3, 1, 0], [0, 0]], [1, 2])) == {(0, 0): 0, (0, 1): 0}
    assert set(cache.observe(Observation(0, [[0, 0, 0], [1, 2]], [1, 2])) or {}) == {(1, 0), (1, 1), (0, 0)}
    many = cache.observe(Observation(0, [[5, 6, 7], [1, 0]], [1, 2])) or {}
    assert set(many) == {(0, 0), (0, 1), (0, 2)}, "of four that are needed at once, those with the most tokens"


def test_rooms_fit_and_are_even() -> None:
    assert even_room([10, 10], [4, 4], 55) == [3, 2]
    assert even_room([10, 20], [4, 4], 1000) == [4, 4]
    assert even_room([10, 10], [4, 4], -5) == [0, 0]
    rng = random.Random(1)
    for _ in range(200):
        sizes, experts = [rng.randint(1, 9) for _ in range(5)], [rng.randint(1, 9) for _ in range(5)]
        room = rng.randint(0, 300)
        rooms = even_room(sizes, experts, room)
        assert sum(s * n for s, n in zip(sizes, rooms, strict=True)) <= room
        assert all(n <= e for n, e in zip(rooms, experts, strict=True))
        gains = [[rng.random() for _ in range(n)] for n in experts]
        rooms = room_by_loss(sizes, gains, room)
        assert sum(s * n for s, n in zip(sizes, rooms, strict=True)) <= room


def test_room_goes_where_losses_fall_slowly() -> None:
    assert room_by_loss([1, 1], [[9, 8, 7, 1], [5, 1, 1, 1]], 4) == [3, 1]


def test_losses_by_versions() -> None:
    traffic, losses = [[10, 5], [1, 8]], [[[0, 1, 4], [0, 2, 6]], [[0, 1, 9], [0, 1, 2]]]
    assert base_bytes([[16, 4, 2]] * 2, [2, 2], 1) == 16
    assert expected_loss(traffic, losses, 0, 2, [0, 0]) == 40 + 30 + 9 + 16
    assert expected_loss(traffic, losses, 0, 2, [1, 1]) == 30 + 9
    assert expected_loss(traffic, losses, 1, 2, [1, 0]) == 10 + 30 + 9 + 16
    assert expected_loss(traffic, losses, 0, 1, [2, 2]) == 0


def test_a_prior_counts_as_an_interval_before_the_first() -> None:
    policy = Hotness([3], 0, HotnessOptions(interval=1.0, margin=0, slack=0, anchor=0), prior=[[3000, 1000, 0]])
    assert policy.observe(Observation(0.0, [[0, 0, 0]], [1])) == {(0, 0): 0}, "before any token"
    policy.observe(Observation(1.0, [[0, 1, 3]], [1]))
    assert policy.scores == [[1.5, 1.0, 1.5]], "its shares, as many tokens as the interval had"
    policy.observe(Observation(2.0, [[0, 0, 4]], [1]))
    assert policy.scores == [[0.75, 0.5, 2.75]] and policy.sets == [[2]]


def test_a_prior_goes_on_to_weigh_in() -> None:
    options = HotnessOptions(interval=1.0, alpha=0.0, margin=0, slack=0, anchor=0.5)
    policy = Hotness([3], 0, options, prior=[[4, 3, 3]])
    policy.observe(Observation(0.0, [[0, 0, 0]], [1]))
    policy.observe(Observation(1.0, [[0, 0, 10]], [1]))
    assert policy.scores == [[0, 0, 10]] and policy.sets == [[2]]
    policy.observe(Observation(2.0, [[0, 0, 0]], [2]))
    assert policy.sets == [[2, 0]], "the second place is the prior's"
    policy.observe(Observation(3.0, [[4, 5, 1]], [1]))
    assert policy.sets == [[1]], "5 and 1.5 against 4 and 2"


def test_experts_are_ranked_by_what_they_save() -> None:
    policy = Hotness([3], 0, HotnessOptions(interval=1.0), gains=[[0.1, 1.0, 1.0]])
    policy.observe(Observation(0.0, [[9, 2, 1]], [1]))
    assert policy.observe(Observation(1.0, [[0, 0, 0]], [1])) == {(0, 1): 0}
    assert policy.scores == [[4.5, 1.0, 0.5]]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hotness:speed=3", "'speed' is unknown"),
        ("hotness:alpha=x", "is a number"),
        ("hotness:alpha=1", "alpha is from 0"),
        ("hotness:margin=nan", "from 0"),
        ("hotness:share=odd", "even or loss"),
        ("hotness:prior=x", "prior is calibration or none"),
        ("hotness:score=x", "score is loss or counts"),
        ("hotness:reserve=0", "a demotion needs a block"),
        ("hotness:rate=-1", "from 0"),
        ("hotness:slack=1.5", "whole number"),
        ("lru:alpha=0.5", "'alpha' is unknown: there are hi, lo, share"),
        ("lru:keep=no", "'keep' is unknown"),
        ("hotnes", "did you mean hotness"),
        ("uniform:w4", "nothing after"),
    ],
)
def test_options_are_checked(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_policy(text)


def test_options() -> None:
    options = parse_policy("hotness:hi=w4,lo=w2,interval=0.5,slack=3,share=loss,rate=50").options
    assert (options.hi, options.lo, options.share, options.rate) == ("w4", "w2", "loss", 50.0)
    assert options == HotnessOptions(hi="w4", lo="w2", share="loss", rate=50.0, interval=0.5, slack=3)
    assert options.bytes_per_second == 50e6 and options.spare_blocks == 6 and not options.keeps_low
    assert (options.prior, options.score, options.keep) == ("calibration", "loss", "no")
    assert parse_policy("hotness:keep=yes,rate=0").options.keeps_low
    assert parse_policy("hotness:rate=0").options.bytes_per_second is None
    lru = parse_policy("lru:hi=bf16").options
    assert type(lru) is LiveOptions and lru.keeps_low and lru.hi == "bf16"


def test_traces_are_read_back_and_replayed(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.jsonl", "static", [(2, 3)], ["bf16", "w2"])
    records = [Record(i, i / 2, [[0, 1, 1]], [[i, 0, 2]], 0, 0, 0, 5, 6, 7, 8) for i in range(1, 5)]
    for record in records:
        writer.write(record)
    writer.close()
    trace = read_trace(tmp_path / "t.jsonl")
    assert trace.records == records and trace.versions == ["bf16", "w2"] and trace.policy == "static"
    decisions = [w for _, w in replay(trace, Hotness([3], 0, HotnessOptions(interval=1.0, alpha=0.0)), [1])]
    assert decisions == [None, None, {(0, 0): 0}, None], "1 + 2 + 3 against 2 + 2 + 2 tokens: the first of equals"


@pytest.mark.parametrize("damage", ["", "{}", "cut", "counts"])
def test_a_trace_that_is_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path, "static", [(2, 3)], ["bf16"])
    writer.write(Record(1, 0.0, [[0, 0, 0]], [[1, 2] if damage == "counts" else [1, 2, 3]], 0, 0, 0, 0, 0, 0, 0))
    writer.close()
    text = path.read_text()
    path.write_text({"cut": text[:-20], "counts": text}.get(damage, damage))
    with pytest.raises(InputError, match=r"t\.jsonl: line [12]"):
        read_trace(path)
