"""The prediction of tokens a second: its arithmetic, by numbers worked out by hand or by simulation."""

import os
from collections import OrderedDict

import numpy as np
import pytest
from support import for_logits

from moepack.pack.reader import open_bundle
from moepack.reports.machine_rates import call_seconds, disk_rate, kernel_rate, move_rate
from moepack.reports.plan import plan, rows
from moepack.reports.speed import Rates, TokenBytes, chances, fresh, held_misses, recent_misses, speed, while_moving
from moepack.runtime.store.files import Stored

RATES = Rates(memory=10e9, kernels=5e9, disk=2e9, layer=1e-4, moves=1e9)


def said(planned):
    return dict(rows(planned))["speed"]


def test_what_takes_a_tokens_time():
    """1 GB dense and 1 GB of experts: 0.2 s of memory; kernels at half its rate take 0.1 s more, 10 layers 1 ms."""
    found = speed(TokenBytes(10, "w4", 1, 10**9, 10**9), RATES)
    assert found.memory == pytest.approx(0.2) and found.processor == pytest.approx(0.101) and found.disk == 0
    assert found.tokens_per_second == pytest.approx(1 / 0.301) and found.bound_by == "memory bandwidth"
    assert speed(TokenBytes(10, "w4", 1, 10**6, 10**9), RATES).bound_by == "processor"
    waiting = speed(TokenBytes(10, "w4", 1, 10**9, 10**9, 10**9), RATES)
    assert waiting.disk == pytest.approx(0.5) and waiting.bound_by == "disk"
    assert waiting.tokens_per_second == pytest.approx(1 / 0.801)


def test_prefetch_hides_behind_the_rest():
    """1.4 times the bytes, beside memory and processor; at least two fifths of them are waited for."""
    busy = speed(TokenBytes(10, "w4", 1, 10**9, 10**9, 10**9, prefetch=True), RATES)
    assert busy.disk == pytest.approx(1.4 * 0.5 - 0.301)
    idle = speed(TokenBytes(10, "w4", 1, 10**9, 10**9, 10**8, prefetch=True), RATES)
    assert idle.disk == pytest.approx(0.4 * 0.05)


def test_moves_take_their_share_of_the_cores():
    """A thread more on two cores: half as long again; a limit of a quarter of its rate, an eighth; none on three."""

    def of(moved, cores=2, threads=2):
        token = TokenBytes(10, "w4", 1, 10**9, 10**9, 10**8, moved=moved)
        rates = Rates(memory=10e9, kernels=10e9, disk=2e9, layer=0.01, moves=8e8)
        found = while_moving(speed(token, rates), token, rates, threads, cores)
        return [found.memory, found.processor, found.disk]

    assert of(None) == pytest.approx([0.3, 0.15, 0.05]) and of(2e8) == pytest.approx([0.225, 0.1125, 0.05])
    assert of(None, threads=8) == pytest.approx([0.225, 0.1125, 0.05]), "the speed was measured with eight on two"
    assert of(1e12) == of(None) and of(None, 3) == of(0.0) == pytest.approx([0.2, 0.1, 0.05])


def test_chances_of_a_layers_experts():
    assert chances(np.array([1.0, 1, 2, 4]), 1).tolist() == [0.125, 0.125, 0.25, 0.5]
    assert chances(np.array([1.0, 1, 1, 97]), 2) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert chances(np.ones(3), 8).tolist() == [1, 1, 1]


def test_locality_is_what_counts_do_not_explain():
    even = np.full(8, 0.25)  # independent tokens share a quarter
    assert fresh(even, 0.25) == 1 and fresh(even, 0.625) == pytest.approx(0.5) and fresh(even, 1.0) == 0
    assert fresh(even, 0.1) == 1 and fresh(np.ones(2), 1.0) == 1


def test_misses_of_a_fixed_set():
    rows = [np.array([0.5, 0.25, 0.25]), np.array([1.0, 0.5, 0.5])]
    assert held_misses(rows, [np.array([True, False, False]), np.ones(3, bool)]) == [0.5, 0.0]


@pytest.mark.parametrize("capacity", [24, 60, 100])
def test_misses_of_the_last_used_are_those_of_a_simulated_cache(capacity):
    """Two layers of 64 experts with Zipf's popularity, one of each a token: within 3 % of all choices."""
    popular = 1 / np.arange(1, 65)
    rows = [popular / popular.sum(), popular[::-1] / popular.sum()]
    rng, cache, missed = np.random.default_rng(0), OrderedDict[tuple[int, int], None](), 0
    draws = [rng.choice(64, 6000, p=row) for row in rows]
    for token in range(6000):
        for layer in range(2):
            key = layer, int(draws[layer][token])
            missed += key not in cache and token >= 1000
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > capacity:
                cache.popitem(last=False)
    assert sum(recent_misses(rows, capacity)) == pytest.approx(missed / 5000, abs=0.06)
    assert recent_misses(rows, 128) == [0, 0]


def test_a_plan_predicts_by_policy(bundle, monkeypatch):
    """Waits where experts are fetched, fewer the more fit; none where all are there; no word where it is not known."""

    def of(policy, room):
        least = plan(bundle, for_logits(device_memory=0, policy=policy)).least_bytes
        return plan(bundle, for_logits(device_memory=least + room, policy=policy))

    for policy in ("lru:hi=w4,lo=absent", "hotness:lo=stored,between=no"):
        small, large, whole = (of(policy, 16_384 * n) for n in (4, 24, 64))
        assert small.fetched_bytes_per_token > large.fetched_bytes_per_token > whole.fetched_bytes_per_token == 0
        took = small.seconds_per_token
        assert small.expected_tokens_per_second == pytest.approx(1 / (took.memory + took.processor + took.disk))
        assert took.disk > whole.seconds_per_token.disk == 0 and small.bound_by in said(small)
        assert small.moving_tokens_per_second is None
    fixed = of("static:w4", 1_000)
    assert fixed.fetched_bytes_per_token == 0 and fixed.moving_tokens_per_second is None
    monkeypatch.setattr("torch.get_num_threads", lambda: len(os.sched_getaffinity(0)))
    live = of("hotness:lo=stored", 16_384 * 4)
    assert live.moving_tokens_per_second < live.expected_tokens_per_second
    assert f"{live.moving_tokens_per_second:,.1f} while experts move" in said(live)
    other = of("importance", 1_000_000)
    assert other.seconds_per_token is None and "at most" in said(other)


def test_rates_are_measured(bundle):
    opened = open_bundle(bundle)
    version = opened.manifest.version("w4")
    assert disk_rate(opened, version, 2) > 1e6 and 1e-6 < call_seconds() < 1
    assert (kernel_rate(opened, version) or 1e9) > 1e6 and 1e6 < move_rate(opened, version) < 1e11


def test_the_disk_is_measured_on_several_experts_of_a_layer(bundle, monkeypatch):
    opened, read, seen = open_bundle(bundle), Stored.read_some, set()

    def noted(self, *given):
        seen.add(self.place)
        return read(self, *given)

    monkeypatch.setattr(Stored, "read_some", noted)
    disk_rate(opened, opened.manifest.version("w4"), 2)
    assert 2 * len(opened.layers) < len(seen) <= 8 * len(opened.layers)
