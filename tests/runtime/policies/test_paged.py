"""The residency planner: each branch, each bound, staggering, and where it comes to rest on simulated machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.policies.contract import Interval, Needs, Setting, read_options
from moepack.runtime.policies.paged import RESIDENT, Paged, PagedOptions, pass_seconds
from moepack.runtime.policies.placements import Placement, Where, read_placement
from moepack.runtime.policies.registry import parse_policy

LAYERS, EXPERTS = 3, 8
WHOLE, SMALL = 100, 70
VERSIONS = [Version.of("bf16"), Version.of("w4", 64)]
INF = float("inf")


def setting(rates: Sequence[float] = (INF, 3000.0, 1000.0), together: bool = True) -> Setting:
    traffic = [[float(1 + (e * 5 + p) % EXPERTS) for e in range(EXPERTS)] for p in range(LAYERS)]
    return Setting(
        [EXPERTS] * LAYERS, PagedOptions().ladders(VERSIONS)[0], [[WHOLE, SMALL, 0]] * LAYERS, traffic,
        [np.zeros((EXPERTS, 3))] * LAYERS, rates=rates, together=together,
    )  # fmt: skip


ROOM = [EXPERTS * WHOLE] * LAYERS


def interval(time: float, computed: float = 0.0, steps: int = 0, loaded: Any = (), room: Any = ROOM) -> Interval:
    return Interval(time, room, [np.zeros(EXPERTS, np.int64)] * LAYERS, (), steps, computed, loaded)


def made(options: str = "", **more: Any) -> Paged:
    policy = Paged(setting(**more), read_options(PagedOptions, options))
    policy.decide(interval(0.0))
    return policy


def after(policy: Paged, rho: float, stored: float = 120.0, time: float = 10.0, room: Any = ROOM) -> list[int]:
    """Experts in memory after an interval in which a step computed rho times as long as it loaded."""
    packed = 240.0
    times = packed / 3000, stored / 1000
    loading = LAYERS * (max(times) if policy._setting.together else sum(times))
    policy.decide(interval(time, rho * loading * 4, 4, [[0, 4 * packed, 4 * stored]] * LAYERS, room))
    assert policy.rho == pytest.approx(rho)
    return list(policy.held)


# --- equations 6 to 10


def test_shares_follow_bandwidth() -> None:
    """(8), and that no other split of two backends is sooner done (7), tried out."""
    rates = [300.0, 100.0]
    assert Paged(setting((INF, *rates))).alpha == 0.75
    best = min(range(101), key=lambda x: pass_seconds([[x, 100 - x]], rates))
    assert best == 75 and pass_seconds([[75, 25]], rates) == 0.25


def test_loading_times_by_hand() -> None:
    """tau_k = bytes / B (6); a layer's is the slowest backend's (9), or the sum; layers add (10)."""
    assert pass_seconds([[600, 100]], [300.0, 100.0]) == 2.0
    assert pass_seconds([[600, 100]], [300.0, 100.0], together=False) == 3.0
    assert pass_seconds([[600, 100], [0, 300]], [300.0, 100.0]) == 5.0
    assert pass_seconds([[600, 100], [0, 300]], [300.0, 100.0], together=False) == 6.0
    assert pass_seconds([[]], []) == 0.0


# --- the first choice


def test_alpha_at_first() -> None:
    """By bandwidth, or as told, or all where nothing was measured; the busiest of calibration."""
    assert made().held == [6, 6, 6], "3000 of 4000, of 8 experts"
    assert made("alpha=0.5").held == [4, 4, 4] and made("alpha=0.01").held == [1, 1, 1], "above 0"
    assert made(rates=()).held == [8, 8, 8]
    policy = Paged(setting(), PagedOptions(alpha=0.25))
    wanted = policy.decide(interval(0.0))
    traffic = policy._setting.traffic
    busiest = {(p, e) for p in range(LAYERS) for e in sorted(range(EXPERTS), key=lambda e: -traffic[p][e])[:2]}
    assert wanted is not None and set(wanted) == busiest and set(wanted.values()) == {1}
    first = list(wanted)[:LAYERS]
    assert [p for p, _ in first] == [0, 1, 2], "one of each layer in turn"
    assert min(policy.worth(key) for key in first) > max(policy.worth(key) for key in list(wanted)[LAYERS:])


def test_three_parts() -> None:
    """x uncompressed, y compressed, z stored: x + y + z = 1, and x yields first where bytes are short (12)."""
    policy = Paged(setting(), read_options(PagedOptions, "alpha=0.75,resident=0.25"))
    wanted = policy.decide(interval(0.0)) or {}
    parts = [sum(v == part for v in wanted.values()) for part in (RESIDENT, 1)]
    assert parts == [2 * LAYERS, 4 * LAYERS]
    assert (policy.decide(interval(0.1, room=[6 * SMALL + 30] * LAYERS)) or {}) and policy._before == [(1, 6)] * LAYERS
    policy.decide(interval(0.2, room=[6 * SMALL - 1] * LAYERS))
    assert policy._before == [(2, 5)] * LAYERS, "what is left does not hold a sixth"
    policy.decide(interval(0.3, room=[5 * SMALL] * LAYERS))
    assert policy._before == [(0, 5)] * LAYERS


# --- Algorithm 2


@pytest.mark.parametrize(
    ("rho", "held", "more"),
    [(5.0, 5, ""), (1.0, 6, ""), (0.95, 6, ""), (0.9, 6, ""), (0.89, 7, ""), (0.5, 7, ""), (0.5, 6, ",theta=0.4")],
)
def test_rho_above_one_lowers_alpha_and_below_theta_raises_it(rho: float, held: int, more: str) -> None:
    """Between them nothing changes."""
    policy = made(f"alpha=0.75{more}")
    assert policy.decide(interval(0.01)) is None or not policy.decide(interval(0.01))
    assert after(policy, rho) == [held] * LAYERS


def test_bytes_come_first_and_alpha_grows_back_from_there() -> None:
    """(12): what the KV cache takes leaves at once, whatever rho says; what it gives back is filled as rho asks."""
    policy = made("alpha=1")
    wanted = policy.decide(interval(0.1, room=[3 * SMALL + 1, 0, EXPERTS * WHOLE]))
    assert wanted is not None and [sum(p == q for q, _ in wanted) for p in range(LAYERS)] == [3, 0, 8]
    assert after(policy, 0.1, room=[2 * SMALL] * LAYERS) == [2, 2, 2], "rho asks for more than there is"
    assert after(policy, 0.95, time=20.0) == [2, 2, 2] and after(policy, 0.1, time=30.0) == [3, 3, 3]


def test_alpha_stays_above_zero_and_at_most_one() -> None:
    policy = made("alpha=0.25")
    for i in range(20):
        after(policy, 1e6, time=10.0 * (i + 1))
    assert policy.held == [1, 1, 1] and policy.alpha == 3 / 24
    policy = made()
    for i in range(20):
        after(policy, 1e-6, stored=1000.0, time=10.0 * (i + 1))
    assert policy.held == [8, 8, 8] and policy.alpha == 1.0


def test_changes_are_staggered_over_layers_or_not() -> None:
    policy = made("alpha=0.25,stagger=no")
    assert after(policy, 0.5) == [5, 2, 2], "as many, of one layer"
    assert after(policy, 0.5, time=20.0) == [5, 5, 2] and after(policy, 0.5, time=30.0) == [5, 5, 5]
    assert after(made("alpha=0.25"), 0.5) == [3, 3, 3]


def test_nothing_is_decided_before_its_time_or_without_steps() -> None:
    policy = made("alpha=0.5,interval=1")
    policy.decide(interval(0.5, 1e-9, 1, [[0, 0, 4000]] * LAYERS))
    assert policy.held == [4, 4, 4] and policy.rho is None
    policy.decide(interval(5.0))
    assert policy.held == [5, 5, 5], "what was counted meanwhile"
    policy.decide(interval(9.0))
    assert policy.held == [5, 5, 5]


def test_a_step_that_asks_for_nothing_needs_no_memory() -> None:
    policy = made("alpha=0.5")
    policy.decide(interval(10.0, 1.0, 1, [[0, 0, 0]] * LAYERS))
    assert policy.rho == INF and policy.held == [3, 3, 3]


def test_more_memory_than_balance_asks_for_is_not_taken() -> None:
    """Backends that work beside one another: beyond the split of (8) the compressed one is the slower (9)."""
    policy = made("alpha=0.75")
    assert after(policy, 0.5, stored=40.0) == [6, 6, 6]
    alone = made("alpha=0.75", together=False)
    assert after(alone, 0.5, stored=40.0) == [7, 7, 7]


# --- convergence on a simulated machine


class Plant:
    """A machine whose steps ask for every expert with some probability, and load what is not there."""

    def __init__(self, policy: Paged, compute: float, together: bool) -> None:
        self.policy, self.compute, self.together = policy, compute, together
        self.rates = policy._setting.rates[1:]

    def loads(self, held: Sequence[int]) -> list[list[float]]:
        return [[0.5 * 100 * h, 0.5 * 100 * (EXPERTS - h)] for h in held]

    def rho(self, held: Sequence[int]) -> float:
        return self.compute / pass_seconds(self.loads(held), self.rates, self.together)

    def run(self, rounds: int = 60, room: Callable[[int], Any] = lambda i: ROOM) -> list[list[int]]:
        seen = []
        for i in range(rounds):
            loaded = [[0, *row] for row in self.loads(self.policy.held)]
            self.policy.decide(interval(10.0 * (i + 1), self.compute, 1, loaded, room(i)))
            seen.append(list(self.policy.held))
        return seen


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("compute", [1e-6, 0.01, 0.3, 0.45, 0.52, 0.6, 0.75, 0.9, 1.1, 1.6, 1e6])
@pytest.mark.parametrize("stagger", ["yes", "no"])
def test_it_comes_to_rest(compute: float, together: bool, stagger: str) -> None:
    """On machines of any speed: within bounds, without going to and fro, and where (13) can be had, near it."""
    policy = made(f"stagger={stagger}", together=together)
    plant = Plant(policy, compute, together)
    seen = plant.run()
    assert all(1 <= h <= EXPERTS for row in seen for h in row)
    assert seen[-1] == seen[-2] == seen[-10], f"still moving: {seen[-10:]}"
    rho = plant.rho(seen[-1])
    more, less = [min(EXPERTS, h + 1) for h in seen[-1]], [max(1, h - 1) for h in seen[-1]]
    assert rho <= 1 or seen[-1] == [1] * LAYERS or plant.rho(less) < 0.9, "memory that could be given back"
    if stagger == "yes":
        at_best = plant.rho(more) <= rho
        assert rho >= 0.9 or at_best, "memory that would help"


def test_kv_comes_and_goes_on_a_machine() -> None:
    policy = made(together=False)
    plant = Plant(policy, 1e-6, False)
    seen = plant.run(60, lambda i: [2 * SMALL] * LAYERS if 20 <= i < 40 else ROOM)
    assert seen[19] == [8] * LAYERS and all(row == [2] * LAYERS for row in seen[20:40]) and seen[-1] == [8] * LAYERS
    assert seen[40] == [3] * LAYERS, "one expert a layer at a time"


# --- a version that has no packed form


def uncoded(options: str = "", room: int = EXPERTS) -> Paged:
    ladder = PagedOptions().ladders([Version.of("mxfp4"), Version.of("w2", 64)])[0]
    assert [str(x) for x in ladder] == ["mxfp4", "mxfp4@stored"]
    of = replace(setting((INF, 1000.0)), ladder=ladder, sizes=[[WHOLE, 0]] * LAYERS)
    policy = Paged(of, read_options(PagedOptions, options))
    policy.decide(interval(0.0, room=[room * WHOLE + 1] * LAYERS))
    return policy


def test_what_fits_is_on_the_device_as_it_is() -> None:
    """All of it, since it costs no loading; `resident` adds nothing. Without loads rho says nothing."""
    policy = uncoded(room=5)
    assert policy.held == [5, 5, 5] and uncoded().alpha == 1
    assert set((policy.decide(interval(1.0)) or {}).values()) <= {RESIDENT}
    assert uncoded("alpha=0.5,resident=0.25").held == [4, 4, 4]
    policy = uncoded("alpha=0.5")
    policy.decide(interval(10.0, 1.0, 1, [[0, 0]] * LAYERS))
    assert policy.rho == INF and policy.held == [4, 4, 4]


@pytest.mark.parametrize(("rho", "held"), [(5.0, 3), (1.0, 4), (0.95, 4), (0.5, 5)])
def test_alpha_follows_rho_there_too(rho: float, held: int) -> None:
    """Each of the four experts in the store loads 50 bytes a step, of 1,000 a second."""
    policy = uncoded("alpha=0.5")
    policy.decide(interval(10.0, rho * LAYERS * 0.2, 1, [[0, 200]] * LAYERS))
    assert policy.rho == pytest.approx(rho) and policy.held == [held] * LAYERS


@pytest.mark.parametrize("compute", [1e-6, 0.1, 0.3, 0.45, 0.6, 0.75, 1.1, 1e6])
def test_it_comes_to_rest_without_a_packed_form(compute: float) -> None:
    policy, seen = uncoded("alpha=0.5"), []
    for i in range(30):
        loaded = [[0, 50 * (EXPERTS - h)] for h in policy.held]
        policy.decide(interval(10.0 * (i + 1), compute, 1, loaded))
        seen.append(list(policy.held))
    assert seen[-1] == seen[-2] == seen[-10], f"still moving: {seen[-10:]}"
    loading = LAYERS * 0.05 * (EXPERTS - seen[-1][0])
    nearer = LAYERS * 0.05 * (EXPERTS - seen[-1][0] + 1)
    assert loading == 0 or 0.9 <= compute / loading <= 1 or seen[-1] == [1] * LAYERS or compute / nearer < 0.9


# --- what users write


def test_options_and_ladders() -> None:
    policy = parse_policy("paged:alpha=0.5,theta=0.8,interval=0.1,stagger=no", True)
    assert policy.options == PagedOptions(alpha=0.5, theta=0.8, interval=0.1, stagger="no")
    assert [str(x) for x in policy.options.ladders(VERSIONS)[0]] == ["bf16", "bf16@packed", "bf16@stored"]
    assert policy.options.bytes_per_second == 200e6 and replace(policy.options, rate=0.0).bytes_per_second is None
    assert made().needs == Needs(interval=0.1, timings=True)
    with pytest.raises(InputError, match="no lossless version to page: here are w4"):
        PagedOptions().ladders(VERSIONS[1:])


def test_placements_by_name() -> None:
    released = [Version.of("mxfp4"), Version.of("w2", 64)]
    assert str(read_placement("mxfp4@stored", released)) == "mxfp4@stored"
    assert str(read_placement("bf16@packed", VERSIONS)) == "bf16@packed"
    for name in ("mxfp4@packed", "w2@stored"):
        with pytest.raises(InputError, match=f"has no '{name}': here are mxfp4, w2, .*where its codes are entropy-cod"):
            read_placement(name, released)
    with pytest.raises(ValueError, match="mxfp4 is served as it is stored: it has no packed form"):
        Placement(released[0], Where.PACKED)
