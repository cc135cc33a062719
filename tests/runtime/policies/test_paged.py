"""The residency planner: each branch, each bound, staggering, where it comes to rest; and what a pass is answered."""

import numpy as np
import pytest

from moepack.pack.spec import Version
from moepack.runtime.policies.contract import Interval, LayerReached, Needs, Setting, read_options
from moepack.runtime.policies.paged import CODED, DECODED, Paged, PagedOptions, Shares, pass_seconds
from moepack.runtime.policies.registry import parse_policy

LAYERS, EXPERTS = 3, 8
WHOLE, SMALL = 100, 70
VERSIONS = [Version.of("bf16"), Version.of("w4", 64)]
INF = float("inf")
TRAFFIC = [[float(1 + (e * 5 + p) % EXPERTS) for e in range(EXPERTS)] for p in range(LAYERS)]


def setting(rates=(INF, 3000.0, 1000.0)):
    return Setting(
        [EXPERTS] * LAYERS, PagedOptions().ladders(VERSIONS)[0], [[WHOLE, SMALL, 0]] * LAYERS, TRAFFIC,
        [np.zeros((EXPERTS, 3))] * LAYERS, rates=rates,
    )  # fmt: skip


ROOM = [EXPERTS * WHOLE] * LAYERS


def interval(time, computed=0.0, steps=0, loaded=(), room=ROOM):
    return Interval(time, room, [np.zeros(EXPERTS, np.int64)] * LAYERS, (), steps, computed, loaded)


def made(options="", rates=(INF, 3000.0, 1000.0), room=ROOM):
    shares = Shares(setting(rates), read_options(PagedOptions, options))
    shares.measured(interval(0.0), room)
    return shares


def after(shares, rho, stored=120.0, time=10.0, room=ROOM):
    """Experts in memory after an interval in which a step computed rho times as long as it loaded."""
    packed = 240.0
    loading = LAYERS * (packed / 3000 + stored / 1000)
    shares.measured(interval(time, rho * loading * 4, 4, [[0, 4 * packed, 4 * stored]] * LAYERS), room)
    assert shares.rho == pytest.approx(rho)
    return list(shares.held)


# --- the first choice


def test_alpha_at_first():
    """By bandwidth, or as told, or all where nothing was measured."""
    assert made().held == [6, 6, 6], "3000 of 4000, of 8 experts"
    assert made("alpha=0.5").held == [4, 4, 4] and made("alpha=0.01").held == [1, 1, 1], "above 0"
    assert made(rates=()).held == [8, 8, 8]


def test_three_parts_beside_the_window():
    """x uncompressed, y compressed, z stored: x + y + z = 1, the busiest of calibration first; x yields first (12)."""
    policy = Paged(setting(), read_options(PagedOptions, "alpha=0.75,resident=0.25"))
    window = 2 * EXPERTS * WHOLE
    beside = 6 * SMALL + 2 * (WHOLE - SMALL)
    share = -(-window // LAYERS)
    wanted = policy.decide(interval(0.0, room=[share + beside] * LAYERS)) or {}
    parts = [sum(v == part for v in wanted.values()) for part in (DECODED, CODED)]
    assert parts == [2 * LAYERS, 4 * LAYERS]
    busiest = {(p, e) for p in range(LAYERS) for e in sorted(range(EXPERTS), key=lambda e: -TRAFFIC[p][e])[:6]}
    assert set(wanted) == busiest and [p for p, _ in list(wanted)[:LAYERS]] == [0, 1, 2], "one of each layer in turn"
    shares = made("alpha=0.75,resident=0.25")
    for room, fits in ((6 * SMALL + 30, (1, 6)), (6 * SMALL - 1, (2, 5)), (5 * SMALL, (0, 5))):
        assert shares.fit([room] * LAYERS) == [fits] * LAYERS


# --- Algorithm 2


@pytest.mark.parametrize(
    ("rho", "held", "more"),
    [(5.0, 5, ""), (1.0, 6, ""), (0.95, 6, ""), (0.9, 6, ""), (0.89, 7, ""), (0.5, 7, ""), (0.5, 6, ",theta=0.4")],
)
def test_rho_above_one_lowers_alpha_and_below_theta_raises_it(rho, held, more):
    """Between them nothing changes."""
    assert after(made(f"alpha=0.75{more}"), rho) == [held] * LAYERS


def test_bytes_come_first_and_alpha_grows_back_from_there():
    """(12): what the KV cache takes is not wanted, whatever rho says; what it gives back is filled as rho asks."""
    shares = made("alpha=1", room=[3 * SMALL + 1, 0, EXPERTS * WHOLE])
    assert shares.held == [3, 1, 8] and [held for _, held in shares.fit([0] * LAYERS)] == [0, 0, 0]
    assert after(shares, 0.1, room=[2 * SMALL] * LAYERS) == [2, 2, 2], "rho asks for more than there is"
    assert after(shares, 0.95, time=20.0) == [2, 2, 2] and after(shares, 0.1, time=30.0) == [3, 3, 3]


def test_changes_are_staggered_over_layers_or_not():
    shares = made("alpha=0.25,stagger=no")
    assert after(shares, 0.5) == [5, 2, 2], "as many, of one layer"
    assert after(shares, 0.5, time=20.0) == [5, 5, 2] and after(shares, 0.5, time=30.0) == [5, 5, 5]
    assert after(made("alpha=0.25"), 0.5) == [3, 3, 3]


def test_nothing_is_decided_before_its_time_or_without_steps():
    shares = made("alpha=0.5,interval=1")
    shares.measured(interval(0.5, 1e-9, 1, [[0, 0, 4000]] * LAYERS), ROOM)
    assert shares.held == [4, 4, 4] and shares.rho is None
    shares.measured(interval(5.0), ROOM)
    assert shares.held == [5, 5, 5], "what was counted meanwhile"
    shares.measured(interval(9.0), ROOM)
    assert shares.held == [5, 5, 5]


# --- convergence on a simulated machine


class Plant:
    """A machine whose steps ask for every expert with some probability, and load what is not there."""

    def __init__(self, shares, compute):
        self.shares, self.compute = shares, compute

    def loads(self, held):
        return [[0.5 * 100 * h, 0.5 * 100 * (EXPERTS - h)] for h in held]

    def rho(self, held):
        return self.compute / pass_seconds(self.loads(held), (3000.0, 1000.0))

    def run(self, rounds=60, room=lambda i: ROOM):
        seen = []
        for i in range(rounds):
            loaded = [[0, *row] for row in self.loads(self.shares.held)]
            self.shares.measured(interval(10.0 * (i + 1), self.compute, 1, loaded), room(i))
            seen.append(list(self.shares.held))
        return seen


@pytest.mark.parametrize("compute", [1e-6, 0.01, 0.3, 0.45, 0.52, 0.6, 0.75, 0.9, 1.1, 1.6, 1e6])
@pytest.mark.parametrize("stagger", ["yes", "no"])
def test_it_comes_to_rest(compute, stagger):
    """On machines of any speed: within bounds, without going to and fro, and where (13) can be had, near it."""
    plant = Plant(made(f"stagger={stagger}"), compute)
    seen = plant.run()
    assert all(1 <= h <= EXPERTS for row in seen for h in row)
    assert seen[-1] == seen[-2] == seen[-10], f"still moving: {seen[-10:]}"
    rho = plant.rho(seen[-1])
    more, less = [min(EXPERTS, h + 1) for h in seen[-1]], [max(1, h - 1) for h in seen[-1]]
    assert rho <= 1 or seen[-1] == [1] * LAYERS or plant.rho(less) < 0.9, "memory that could be given back"
    if stagger == "yes":
        assert rho >= 0.9 or plant.rho(more) <= rho, "memory that would help"


# --- what a pass is answered


def reached(layer, used, room, placed):
    counts = np.zeros(EXPERTS, np.int64)
    counts[list(used)] = 1
    share = room // LAYERS
    capacity = [share] * (LAYERS - 1) + [room - share * (LAYERS - 1)]
    return LayerReached(1.0, capacity, layer, counts, placed=placed, coming=[-1] * EXPERTS)


def test_what_is_needed_is_decoded_and_goes_back_to_its_coded_bytes_the_last_used_first():
    """The last layer's experts leave for the next one's: layers run in turn, so they are needed again the latest."""
    policy = Paged(setting(), PagedOptions(alpha=0.5, ahead="no"))
    window = 2 * EXPERTS * WHOLE
    room = window + LAYERS * 4 * SMALL + LAYERS
    at = [[2] * EXPERTS for _ in range(LAYERS)]
    for (p, e), placement in (policy.decide(interval(0.0, room=[room // LAYERS] * LAYERS)) or {}).items():
        at[p][e] = placement
    coded = [[e for e in range(EXPERTS) if at[p][e] == CODED] for p in range(LAYERS)]
    for layer in range(LAYERS):
        before = [list(row) for row in at]
        answer = policy.decide(reached(layer, range(EXPERTS), room, at[layer])) or {}
        for (p, e), placement in answer.items():
            at[p][e] = placement
        assert at[layer] == [DECODED] * EXPERTS
        assert sum(row.count(DECODED) for row in at) * WHOLE <= window
        gone = [(p, e) for p in range(layer) for e in range(EXPERTS) if at[p][e] != before[p][e]]
        assert all(p == 1 and at[p][e] == (CODED if e in coded[p] else 2) for p, e in gone)
        assert len(gone) == (EXPERTS if layer == 2 else 0)


def test_a_prompt_has_the_next_layer_prefetched_and_a_token_has_not():
    room = 4 * EXPERTS * WHOLE
    for used, ahead, later in ((range(4), "yes", 8), (range(3), "yes", 0), (range(8), "no", 0)):
        policy = Paged(setting(), PagedOptions(alpha=0.01, ahead=ahead))
        policy.decide(interval(0.0))
        answer = policy.decide(reached(0, used, room, [2] * EXPERTS)) or {}
        assert sum(p == 1 and v == DECODED for (p, _), v in answer.items()) == later
        assert [key for key in answer if key[0] == 0] == list(answer)[: len(used)], "what passes wait for comes first"


def test_coded_bytes_leave_for_the_cache_and_come_back_beside_passes():
    policy = Paged(setting(), PagedOptions(alpha=1, ahead="no"))
    window = 2 * EXPERTS * WHOLE
    ample = window + LAYERS * EXPERTS * SMALL + LAYERS
    assert len(policy.decide(interval(0.0, room=[ample // LAYERS] * LAYERS)) or {}) == LAYERS * EXPERTS
    answer = policy.decide(reached(0, [0], window + 2 * SMALL, [CODED] * EXPERTS)) or {}
    assert sum(v == 2 for v in answer.values()) == LAYERS * EXPERTS - 2
    placed = [2] * EXPERTS
    back = policy.decide(reached(1, [0], ample, placed))
    assert back is not None and list(back.beside.values()) == [CODED, CODED] and all(p == 1 for p, _ in back.beside)


def test_a_version_without_coded_bytes_stays_as_far_as_it_fits():
    """All that fit before any token, the busiest first, or the share asked for; at least the window."""
    ladder = PagedOptions().ladders([Version.of("mxfp4"), Version.of("w2", 64)])[0]
    assert [str(x) for x in ladder] == ["mxfp4", "stored"]
    of = Setting([EXPERTS] * LAYERS, ladder, [[WHOLE, 0]] * LAYERS, TRAFFIC, [np.zeros((EXPERTS, 2))] * LAYERS)
    for options, fits in (("", 20), ("alpha=0.1", 16), ("alpha=0.75", 18)):
        policy = Paged(of, read_options(PagedOptions, options))
        wanted = policy.decide(interval(0.0, room=[700, 700, 600])) or {}
        assert len(wanted) == fits and set(wanted.values()) == {DECODED}
        policy.decide(reached(0, range(EXPERTS), 2000, [wanted.get((0, e), 1) for e in range(EXPERTS)]))


def test_what_a_layer_needs_is_decoded_by_a_policy_that_began_amid_passes():
    """As after an interruption: what passes decoded is not also counted as staying, of which no pass takes care."""
    window = 2 * EXPERTS * WHOLE
    rooms = (window + LAYERS * EXPERTS * WHOLE, window + 800, window)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        policy = Paged(setting(), PagedOptions(alpha=1, resident=0.5, interval=0, ahead=("yes", "no")[seed % 2]))
        at = [[2] * EXPERTS for _ in range(LAYERS)]
        for turn in range(21):
            room = int(rng.choice(rooms))
            for layer in range(LAYERS):
                size = int(rng.choice((1, 2, 8))) if turn else EXPERTS
                used = rng.choice(EXPERTS, size, replace=False).tolist()
                answer = policy.decide(reached(layer, used, room, at[layer]))
                for (p, e), placement in (answer | answer.beside).items():
                    at[p][e] = placement
                assert all(at[layer][e] == DECODED for e in used)
            if not turn:
                policy.decide(interval(1.0, room=[room // LAYERS] * LAYERS))


# --- what users write


def test_what_is_written_is_what_it_takes():
    options = parse_policy("paged:alpha=0.5,theta=0.8,interval=0.1,stagger=no", True).options
    assert options == PagedOptions(alpha=0.5, theta=0.8, interval=0.1, stagger="no")
    assert options.on_demand and options.layers_held == 2 and not parse_policy("paged:lo=pinned").options.on_demand
    assert Paged(setting(), PagedOptions()).needs == Needs(interval=0.125, layers=True, timings=True)
