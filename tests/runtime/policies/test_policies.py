"""Policies that change versions, and what fits a budget: pure code, numbers in and decisions out."""

import errno
import io
import itertools
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.allocation.ladder import Ladder, SharedByLoss
from moepack.runtime.planning.capacity import even_bytes, even_room
from moepack.runtime.policies.contract import Changes, Interval, LayerReached, Setting
from moepack.runtime.policies.hotness import Hotness, HotnessOptions
from moepack.runtime.policies.lru import Recent
from moepack.runtime.policies.placements import ABSENT, STORED, Placement, Where, read_placement
from moepack.runtime.policies.registry import parse_policy
from moepack.runtime.trace import Record, TraceWriter, read_trace

VERSIONS = tuple(Version.of(name, 0 if name == "bf16" else 64) for name in ("bf16", "w4", "w2"))


def setting(
    experts,
    sizes=(2, 1),
    traffic=None,
    losses=None,
    most=None,
):
    """Experts of equal sizes in every layer; without losses each placement down loses one more."""
    ladder = tuple(Placement(VERSIONS[i]) for i in range(len(sizes)))
    falling = [[[float(v) for v in range(len(sizes))]] * n for n in experts]
    return Setting(
        experts, ladder, [sizes] * len(experts), traffic or [[1.0] * n for n in experts],
        [np.array(rows) for rows in losses or falling], most,
    )  # fmt: skip


def passed(time, counts, capacity):
    return Interval(time, capacity, [np.array(row, np.int64) for row in counts])


def counting(**options):
    """No prior: scores are of what is counted alone."""
    return HotnessOptions(**{"prior": "none", "interval": 1.0, **options})


def lists(rows):
    return [row.tolist() for row in rows]


def test_less_room_is_seen_at_once_and_an_interval_without_tokens_changes_nothing():
    policy = Hotness(setting([3]), counting())
    policy.decide(passed(0.0, [[5, 3, 1]], [2]))
    assert policy.decide(passed(1.0, [[5, 3, 1]], [2])) == {(0, 0): 0, (0, 1): 0}
    assert policy.decide(passed(1.1, [[0, 0, 0]], [1])) == {(0, 0): 0}
    assert policy.decide(passed(9.0, [[0, 0, 0]], [1])) is None and lists(policy.heat.scores) == [[5, 3, 1]]


def top(scores, held, room, margin, slack):
    """The experts at the higher of two versions, which take a byte more."""
    ladder = Ladder([2, 1], np.array([[0.0, 1.0]] * len(scores)), 1)
    before = np.array([0 if e in held else 1 for e in range(len(scores))])
    return np.flatnonzero(ladder.fill(np.array(scores, float), room, before, margin, slack) == 0).tolist()


def test_margin_and_slack_hold_experts():
    assert top([10, 9, 8, 0], [], 2, 0.1, 0) == [0, 1]
    assert top([10, 9, 8, 0], [2], 2, 0.2, 0) == [0, 2], "an incumbent with a free place beside it"
    assert top([10, 9, 8.5, 0], [2, 0], 2, 0.1, 0) == [0, 2], "9 is not 10 % above 8.5"
    assert top([10, 9, 8, 0], [2, 0], 2, 0.1, 0) == [0, 1]
    assert top([10, 9, 8, 0], [2, 0], 2, 0.1, 1) == [0, 2], "third of two, with a slack of one"
    assert top([10, 9, 8, 1], [3, 0], 2, 0.1, 1) == [0, 1], "fourth: the slack is passed"
    assert top([1, 2, 3, 4], [0, 1, 2], 1, 0.1, 1) == [2], "room fell: the best incumbent stays"
    assert top([0, 0, 0], [], 2, 0.1, 0) == [], "nobody asked for them"


def test_what_a_byte_saves_decides():
    """Three versions of 8, 4 and 2 bytes: the first upgrade of many comes before the second of a few."""
    losses = [[[0.0, 1.0, 9.0]] * 3 + [[0.0, 2.0, 2.5]]]
    policy = Hotness(setting([4], (8, 4, 2), losses=losses), counting(margin=0, slack=0))
    assert policy.decide(passed(0.0, [[4, 2, 1, 8]], [6])) is None

    def at(room):
        policy.decide(passed(1.0, [[4, 2, 1, 8]], [room]))
        return policy.placements[0].tolist()

    assert at(6) == [1, 1, 1, 2], "16, 8 and 4 a byte; the fourth expert's is 3.3, at its best version"
    assert at(12) == [1, 1, 1, 0] and at(16) == [0, 1, 1, 0] and at(100) == [0, 0, 0, 0]
    assert at(5) == [1, 1, 2, 2], "a byte is left: nothing fits it"
    want = policy.wanted()
    assert want == {(0, 0): 1, (0, 1): 1} and list(want) == [(0, 0), (0, 1)], "those worth most a byte first"


def best(sizes, values, room, base):
    """The least loss there is, by trying everything."""
    least = math.inf
    for chosen in itertools.product(range(len(sizes)), repeat=len(values)):
        if sum(sizes[v] - sizes[base] for v in chosen) <= room:
            least = min(least, sum(row[v] for row, v in zip(values, chosen, strict=True)))
    return least


def test_a_ladder_is_near_the_best_there_is():
    """Greedy on the hull is within one upgrade of the optimum, fits, and never lowers what costs nothing."""
    rng, sizes = np.random.default_rng(0), [9, 5, 3, 2]
    for _ in range(60):
        losses = np.sort(rng.random((4, 4)), axis=1)
        scores, room = rng.random(4) * 10, int(rng.integers(0, 30))
        ladder = Ladder(sizes, losses, 3)
        placed = ladder.fill(scores, room)
        assert sum(sizes[v] - sizes[3] for v in placed) <= room
        values = (scores[:, None] * losses).tolist()
        assert ladder.loss(scores, placed) <= best(sizes, values, room, 3) + (scores[:, None] * ladder.saved).max()
        everything = ladder.fill(scores, 28)
        assert ladder.loss(scores, everything) == pytest.approx(best(sizes, values, 28, 3))


def test_memory_that_is_not_shared_limits_each_placement():
    ladder = Ladder([8, 4, 2], np.array([[0.0, 1.0, 9.0]] * 4), 2)
    scores = np.array([4.0, 3.0, 2.0, 1.0])
    assert ladder.fill(scores, 100).tolist() == [0, 0, 0, 0]
    assert ladder.fill(scores, 100, most=[1, 2, 9]).tolist() == [0, 1, 1, 2], "what the first leaves is the third's"
    assert ladder.fill(scores, 5, most=[1, 2, 9]).tolist() == [1, 1, 2, 2]


def test_recent_keeps_what_was_used_last():
    cache = Recent(setting([3, 2]))

    def reached(layer, counts):
        wanted = cache.decide(LayerReached(0.0, [1, 2], layer, np.array(counts)))
        assert isinstance(wanted, Changes)
        return dict(wanted)

    assert reached(0, [3, 1, 0]) == {(0, 0): 0, (0, 1): 0}
    assert reached(1, [1, 2]) == {(1, 1): 0, (1, 0): 0, (0, 1): 1}, "the one with fewer tokens leaves"
    assert reached(0, [5, 6, 7]) == {(0, 2): 0, (0, 1): 0, (0, 0): 0, (1, 0): 1, (1, 1): 1}


def test_rooms_fit_and_are_even():
    assert even_room([10, 10], [4, 4], 55) == [3, 2]
    assert even_room([10, 20], [4, 4], 1000) == [4, 4]
    assert even_room([10, 10], [4, 4], -5) == [0, 0]
    assert even_bytes([[12, 2], [12, 2]], [4, 4], 55) == [30, 20], "whole experts"
    assert even_bytes([[12, 4, 2], [12, 4, 2]], [4, 4], 55) == [28, 26], "by the smallest step"
    assert even_bytes([[12, 0, 0]], [4], -1) == [0]
    rng = random.Random(1)
    for _ in range(200):
        sizes, experts = [rng.randint(1, 9) for _ in range(5)], [rng.randint(1, 9) for _ in range(5)]
        room = rng.randint(0, 300)
        rooms = even_room(sizes, experts, room)
        assert sum(s * n for s, n in zip(sizes, rooms, strict=True)) <= room
        assert all(n <= e for n, e in zip(rooms, experts, strict=True))
        ladders = [
            Ladder([s + 1, 1], np.array([[0.0, rng.random()] for _ in range(n)]), 1)
            for s, n in zip(sizes, experts, strict=True)
        ]
        assert sum(SharedByLoss(ladders, [[1.0] * n for n in experts]).within(room)) <= room


def test_a_prior_counts_as_an_interval_before_the_first():
    options = HotnessOptions(interval=1.0, margin=0, slack=0, anchor=0)
    policy = Hotness(setting([3], traffic=[[3000, 1000, 0]]), options)
    assert policy.decide(passed(0.0, [[0, 0, 0]], [1])) == {(0, 0): 0}, "before any token"
    policy.decide(passed(1.0, [[0, 1, 3]], [1]))
    assert lists(policy.heat.scores) == [[1.5, 1.0, 1.5]], "its shares, as many tokens as the interval had"
    assert policy.decide(passed(2.0, [[0, 0, 4]], [1])) == {(0, 2): 0}
    assert lists(policy.heat.scores) == [[0.75, 0.5, 2.75]]


def test_experts_are_ranked_by_what_they_save():
    losses = [[[0.0, 0.1], [0.0, 1.0], [0.0, 1.0]]]
    for score, expert in (("loss", 1), ("counts", 0)):
        policy = Hotness(setting([3], losses=losses), counting(score=score))
        policy.decide(passed(0.0, [[9, 2, 1]], [1]))
        assert policy.decide(passed(1.0, [[0, 0, 0]], [1])) == {(0, expert): 0}
        assert lists(policy.heat.scores) == [[4.5, 1.0, 0.5]]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hotness:speed=3", "'speed' is unknown"),
        ("hotness:alpha=x", "is a number"),
        ("hotness:margin=nan", "at least 0"),
        ("hotness:lo=absent,prior=none", "needs prior=calibration"),
        ("hotness:prior=x", "prior is calibration or none"),
        ("hotness:score=x", "score is loss or counts"),
        ("hotness:rate=-1", "at least 0"),
        ("lru:alpha=0.5", "'alpha' is unknown: there are rate, hi, lo"),
        ("hotnes", "did you mean hotness"),
        ("uniform:w4", "nothing after"),
        ("importance:r=0.4", "r must be from 0.5 to 1"),
        ("importance:heavy=0", "heavy is above 0"),
        ("importance:by=luck", "by is importance or counts or random"),
        ("paged:alpha=2", "from 0 to 1"),
        ("paged:resident=-1", "from 0"),
        ("paged:theta=0", "theta above 0"),
        ("paged:interval=-1", "at least 0"),
        ("paged:stagger=maybe", "yes or no"),
        ("paged:lo=host", "lo is stored or pinned, not 'host'"),
        ("paged:lo=pinned,theta=0.5", "theta needs passes that wait, and no pass waits under lo=pinned"),
        ("prefill:alpha=2", "alpha must be from 0 to 1"),
        ("prefill:k=-2", "k must be at least 0"),
        ("random:seed=x", "seed=NUMBER"),
    ],
)
def test_options_are_checked(text, word):
    with pytest.raises(InputError, match=word):
        parse_policy(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hotness:hi=w4,lo=bf16", "lo=bf16 is not below hi=w4"),
        ("hotness:hi=w2", "no version below w2"),
        ("hotness:hi=w9,lo=absent", "no version 'w9'"),
        ("hotness:hi=w9,lo=stored", "no version 'w9'"),
        ("hotness:hi=w2,lo=w4@pinned", "lo=w4@pinned is above hi=w2"),
        ("hotness:lo=w5@pinned", "no version 'w5'"),
        ("hotness:lo=@pinned", "no version ''"),
        ("lru:lo=w9", "no version 'w9'"),
        ("lru:hi=w9,lo=absent", "no version 'w9'"),
        ("lru:lo=w4@pinned", "no version 'w4@pinned'"),
        ("importance:hi=w1", "no version 'w1'"),
        ("importance:hi=w2,lo=w4", "not below"),
        ("importance:lo=w2@host", "no version 'w2@host'"),
        ("importance:lo=w2@pinned", "no version 'w2@pinned'"),
        ("prefill:bits=1.5", "bits=1.5: an average is from 2 to 4"),
        ("prefill:bits=4.1", "bits=4.1: an average is from 2 to 4"),
        ("prefill:bits=3,selector=no", "bits=3 with selector=no: one of the widths here, 4, 2"),
        ("prefill:hi=w3", "no version 'w3': here are bf16, w4, w2"),
        ("prefill", "no version of 4 to 1 bits under bf16"),
        ("paged", "no lossless version to page: here are w4, w2"),
    ],
)
def test_ladders_need_versions_that_are_here(text, word):
    with pytest.raises(InputError, match=word):
        parse_policy(text).options.ladders({"paged": VERSIONS[1:], "prefill": VERSIONS[:1]}.get(text, VERSIONS))


@pytest.mark.parametrize("policy", ["hotness", "lru", "uniform", "random", "paged", "prefill", "importance"])
def test_these_need_a_budget(policy):
    with pytest.raises(InputError, match="needs a memory budget"):
        parse_policy(policy, in_budget=False)


EVERY = "bf16 w4 w3 w2 w1"
FEW = "bf16 w4 w2"


@pytest.mark.parametrize(
    ("text", "here", "ladders"),
    [
        ("hotness:lo=absent", FEW, ["bf16 w4 w2 absent", "w4 w2 absent", "w2 absent"]),
        ("hotness:hi=w4,lo=absent", FEW, ["w4 w2 absent"]),
        ("hotness:lo=absent,between=no", FEW, ["bf16 absent", "w4 absent", "w2 absent"]),
        ("hotness:lo=stored", FEW, ["w4 w2 stored"]),
        ("hotness:lo=stored", "bf16 w4d5 w4 w2", ["w4d5 w4 w2 stored"]),
        ("hotness:lo=stored,between=no", FEW, ["w4 stored"]),
        ("hotness:hi=bf16,lo=stored", FEW, ["bf16 w4 w2 stored"]),
        ("hotness:hi=w2,lo=stored", FEW, ["w2 stored"]),
        ("importance", EVERY, ["w4 w2 absent"]),
        ("importance", "bf16 w4d5 w3d4 w2d3", ["w4d5 w2d3 absent"]),
        ("importance", "bf16 w3", ["w3 absent"]),
        ("importance", "bf16", ["bf16 absent"]),
        ("importance:lo=absent", EVERY, ["w4 absent"]),
        ("importance:hi=bf16,lo=w3", EVERY, ["bf16 w3 absent"]),
        ("importance:hi=w3", "bf16 w4 w3 w2", ["w3 w2 absent"]),
        ("importance:hi=w2", FEW, ["w2 absent"]),
        ("lru:lo=absent", FEW, ["bf16 absent"]),
        ("lru:hi=w4,lo=absent", FEW, ["w4 absent"]),
        ("prefill", FEW, ["bf16 w4@host w2@host"]),
        ("prefill:hi=w3,bits=2", EVERY, ["w3 w3@host w2@host w1@host"]),
        ("paged", FEW, ["bf16 bf16@packed stored"]),
        ("paged:lo=pinned", FEW, ["bf16 bf16@packed bf16@packed-pinned"]),
    ],
)
def test_ladders(text, here, ladders):
    versions = [Version.of(name, 64 if re.fullmatch(r"w\d", name) else 0) for name in here.split()]
    parsed = parse_policy(text)
    assert [" ".join(map(str, found)) for found in parsed.options.ladders(versions)] == ladders and str(parsed) == text


def test_what_options_ask_of_the_runtime():
    given = {text: parse_policy(text).options for text in ("lru", "hotness:lo=w2", "hotness:lo=absent")}
    blocking = {text: parse_policy(text).options for text in ("lru:lo=absent", "hotness:lo=stored", "importance")}
    assert not any(of.on_demand for of in given.values()) and all(of.on_demand for of in blocking.values())
    assert all(of.keeps_low and not of.spare_blocks for of in (given["hotness:lo=absent"], *blocking.values()))
    assert blocking["hotness:lo=stored"].bytes_per_second is None
    assert parse_policy("importance:rate=16000").options.bytes_per_second == 16e9
    assert parse_policy("importance:by=counts").options.workspace == (0, 0) < blocking["importance"].workspace


def test_placements_by_name():
    released = [Version.of("mxfp4"), Version.of("w2", 64)]
    assert str(read_placement("bf16@packed", VERSIONS)) == "bf16@packed"
    assert read_placement("stored", VERSIONS) == STORED != ABSENT
    for name in ("mxfp4@packed", "w2@stored"):
        with pytest.raises(InputError, match=f"has no '{name}': here are mxfp4, w2, .*whose codes are entropy-coded"):
            read_placement(name, released)
    with pytest.raises(ValueError, match="mxfp4 is served as it is stored: it has no packed form"):
        Placement(released[0], Where.PACKED)
    with pytest.raises(ValueError, match="stored expert has no version"):
        Placement(None)


def test_below_the_lowest_version_experts_may_be_absent():
    """Nobody waits for one that is absent: its tokens are counted, and it comes at the next decision."""
    losses = [[[0.0, 1.0, 9.0]] * 3]
    given = replace(setting([3], (2, 1, 0), losses=losses), ladder=tuple(map(Placement, VERSIONS[:2])) + (ABSENT,))
    policy = Hotness(given, HotnessOptions(lo="absent", interval=1.0, alpha=0.0, anchor=0.0))
    assert policy.decide(passed(0.0, [[9, 3, 0]], [3])) == {(0, 0): 1, (0, 1): 1, (0, 2): 1}, "calibration's"
    assert policy.decide(passed(1.0, [[0, 0, 0]], [3])) == {(0, 0): 0, (0, 1): 1}
    assert policy.decide(passed(2.0, [[9, 0, 5]], [3])) == {(0, 0): 0, (0, 2): 1}


def test_a_trace_on_a_full_disk_has_whole_lines_or_is_not_there(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    record = Record(1, 0.0, [[0, 0, 0]], [[1, 2, 3]], 0, 0, 0, 0, 0, 0, 0)
    room = 100

    class Small(io.FileIO):
        def write(self, data):
            if self.tell() == room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[: room - self.tell()])

    monkeypatch.setattr(Path, "open", lambda self, mode, buffering: Small(self, mode))
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        TraceWriter(path, "static", [(2, 3)], ["bf16"])
    assert not path.exists()
    room = 400
    writer = TraceWriter(path, "static", [(2, 3)], ["bf16"])
    with pytest.raises(OSError, match="No space"):
        for _ in range(9):
            writer.write(record)
    monkeypatch.undo()
    assert read_trace(path).records == [record]


@pytest.mark.parametrize("damage", ["", "{}", "cut", "counts"])
def test_a_trace_that_is_none(tmp_path, damage):
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path, "static", [(2, 3)], ["bf16"])
    writer.write(Record(1, 0.0, [[0, 0, 0]], [[1, 2] if damage == "counts" else [1, 2, 3]], 0, 0, 0, 0, 0, 0, 0))
    writer.close()
    text = path.read_text()
    path.write_text({"cut": text[:-20], "counts": text}.get(damage, damage))
    with pytest.raises(InputError, match=r"t\.jsonl: line [12]"):
        read_trace(path)
