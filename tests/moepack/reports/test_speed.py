"""The prediction of tokens a second: its arithmetic, by numbers worked out by hand or by simulation."""

import os

import pytest
from support import for_logits

from moepack.pack.reader import open_bundle
from moepack.reports.machine_rates import call_seconds, disk_rate, kernel_rate, move_rate
from moepack.reports.plan import plan, rows
from moepack.reports.speed import Rates, TokenBytes, speed
from moepack.runtime.store.files import Stored

RATES = Rates(memory=10e9, kernels=5e9, disk=2e9, layer=1e-4, moves=1e9)


def test_what_takes_a_tokens_time():
    """1 GB dense and 1 GB of experts: 0.2 s of memory; kernels at half its rate take 0.1 s more, 10 layers 1 ms."""
    found = speed(TokenBytes(10, "w4", 1, 10**9, 10**9), RATES)
    assert found.memory == pytest.approx(0.2) and found.processor == pytest.approx(0.101) and found.disk == 0
    assert found.tokens_per_second == pytest.approx(1 / 0.301) and found.bound_by == "memory bandwidth"
    assert speed(TokenBytes(10, "w4", 1, 10**6, 10**9), RATES).bound_by == "processor"
    waiting = speed(TokenBytes(10, "w4", 1, 10**9, 10**9, 10**9), RATES)
    assert waiting.disk == pytest.approx(0.5) and waiting.bound_by == "disk"
    assert waiting.tokens_per_second == pytest.approx(1 / 0.801)


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
        assert took.disk > whole.seconds_per_token.disk == 0 and small.bound_by in dict(rows(small))["speed"]
        assert small.moving_tokens_per_second is None
    fixed = of("static:w4", 1_000)
    assert fixed.fetched_bytes_per_token == 0 and fixed.moving_tokens_per_second is None
    monkeypatch.setattr("torch.get_num_threads", lambda: len(os.sched_getaffinity(0)))
    live = of("hotness:lo=stored", 16_384 * 4)
    assert live.moving_tokens_per_second < live.expected_tokens_per_second
    assert f"{live.moving_tokens_per_second:,.1f} while experts move" in dict(rows(live))["speed"]
    other = of("importance", 1_000_000)
    assert other.seconds_per_token is None and "at most" in dict(rows(other))["speed"]


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
