"""Serving in a budget with versions that change, on a real bundle, real threads and the CPU as the device."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import moepack
from moepack.cli import app
from moepack.pack.errors import BundleError, InputError
from moepack.pack.lossless import decode_lossless
from moepack.pack.reader import open_bundle
from moepack.reports.evaluate import evaluate
from moepack.runtime.devices import cpu as device_module
from moepack.runtime.devices import migration
from moepack.runtime.planning.plan import Plan, make_plan
from moepack.runtime.policies.hotness import HotnessOptions
from moepack.runtime.store import files as store_module
from moepack.runtime.trace import read_trace

SECONDS = float(os.environ.get("MOEPACK_STRESS_SECONDS", "10"))
FAST = "hotness:hi=bf16,lo=w2,between=no,prior=none,interval=0.02,rate=0,margin=0,slack=0"
ROOM = 1_900_000  # for three quarters of the experts at bf16, beside all at w2


def least(bundle: Path, policy: str = FAST, **options: Any) -> int:
    """The smallest budget that would do."""
    with pytest.raises(InputError, match=r"the least that would do is \d+ bytes") as refused:
        load(bundle, policy, 1000, **options)
    return int(str(refused.value).split("do is ")[1].split()[0])


def load(bundle: Path, policy: str = FAST, budget: int | None = None, **options: Any) -> Any:
    """A model; without a budget given, one with `ROOM`."""
    if budget is None:
        budget = least(bundle, policy, **options) + ROOM
    return moepack.load(bundle, policy=policy, device_memory=budget, **options)


def run(model: Any, seed: int) -> torch.Tensor:
    """Logits of a pass of as many tokens as a budget has room for, without a cache."""
    with torch.inference_mode():
        return model(ids(seed, 512), use_cache=False).logits


def ids(seed: int, size: int = 64, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, 4000, (batch, size), generator=torch.Generator().manual_seed(seed))


def wait_for(what: Callable[[], bool], model: Any = None, seconds: float = 20.0) -> None:
    """Serve until something has come about."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come about"
        if model is not None:
            run(model, int(1000 * time.monotonic()))
        time.sleep(0.005)


def ours() -> set[threading.Thread]:
    """The runtime's threads."""
    return {t for t in threading.enumerate() if t.name.startswith("moepack-")}


def rooms(plan: Plan, kv: int = 0) -> list[int]:
    """How many experts of each layer fit at the best version."""
    return [n // (row[0] - row[-1]) for n, row in zip(plan.capacity(kv), plan.growing(), strict=True)]


def check_exact(model: Any, bundle: Path) -> int:
    """Every active version is what the bundle holds, bit by bit; returns how many are lossless."""
    opened, lossless = open_bundle(bundle), 0
    for position, layer in enumerate(model.moepack.layers):
        for e, handle in enumerate(layer.current.handles):
            extent = opened.extent(handle.version.name, position, e)
            if handle.version.is_lossless:
                lossless += 1
                for m, want in enumerate(decode_lossless(layer.of.layer.matrices, extent)):
                    got = layer.current.weight(e, m, torch.bfloat16).view(torch.uint16)
                    assert torch.equal(got, torch.from_numpy(want.weight))
            else:
                assert torch.equal(handle.extent, torch.from_numpy(extent.copy()))
    return lossless


def test_the_hot_experts_are_promoted_in_the_budget(bundle: Path) -> None:
    model = load(bundle)
    live = model.moepack.live
    assert model.moepack.versions == (("w2",) * 16,) * 4 and check_exact(model, bundle) == 0
    room = rooms(live.plan)
    wait_for(lambda: [row.count("bf16") for row in model.moepack.versions] == room, model)
    model.moepack.close()
    assert sum(room) >= check_exact(model, bundle) > 0.8 * sum(room)
    counters = model.moepack.counters()
    assert counters["promotions"] >= sum(room) and counters["forward_waits"] == counters["transition_failures"] == 0
    assert live.tracker.reserved <= live.tracker.peak <= live.plan.budget
    assert model.moepack.resident_bytes_peak <= live.plan.budget


def test_no_weight_buffer_comes_from_the_allocator_after_loading(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(bundle)
    live = model.moepack.live
    monkeypatch.setattr(device_module, "CpuMemory", None)
    wait_for(lambda: live.residency.counts.promotions > 20, model)
    spans = []
    for pool in live.transitions.pools:
        start = pool._memory.tensor.data_ptr()
        spans.append((start, start + len(pool._memory.tensor)))
    for layer in live.layers:
        for handle in layer.current.handles:
            at = handle.extent.data_ptr()
            assert any(a <= at and at + handle.extent.numel() <= b for a, b in spans) and at % 64 == 0
    model.moepack.close()


def test_a_copy_that_never_ends_holds_nobody_up(bundle: Path) -> None:
    model = load(bundle)
    live, gate = model.moepack.live, threading.Event()
    read = store_module.Stored.read_into

    def stuck(self: Any, *args: Any) -> None:
        gate.wait(30)
        read(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module.Stored, "read_into", stuck)
        wait_for(lambda: live.residency.in_flight() > 0, model)
        began = time.monotonic()
        for seed in range(20):
            run(model, seed)
        assert time.monotonic() - began < 20 and live.residency.counts.promotions == 0
        gate.set()
    wait_for(lambda: live.residency.counts.promotions > 0, model)
    model.moepack.close()


def test_too_small_a_budget_is_refused_with_the_least(bundle: Path) -> None:
    policy = "hotness:hi=bf16,lo=w2,between=no"
    enough = least(bundle, policy)
    model = load(bundle, policy, enough)
    assert rooms(model.moepack.live.plan) == [0] * 4
    model.moepack.close()
    with pytest.raises(InputError, match=f"do is {enough} bytes"):
        load(bundle, "lru:hi=bf16,lo=w2", enough - 1)
    assert least(bundle, "hotness") < enough, "of the versions that are here, the smallest"
    for policy in ("hotness", "lru", "uniform"):
        with pytest.raises(InputError, match="needs a memory budget"):
            moepack.load(bundle, policy=policy)
    for policy, word in (("hotness:hi=w2,lo=w4", "not below"), ("hotness:hi=w1", "no version below")):
        with pytest.raises(InputError, match=word):
            load(bundle, policy, enough)
    with pytest.raises(InputError, match="the least that would do"):
        load(bundle, "uniform", 1_000_000)


def test_plans(bundle: Path) -> None:
    opened = open_bundle(bundle)
    dense = 1_000_000

    def chosen(budget: int, **options: Any) -> tuple[str, str]:
        plan = make_plan(opened, HotnessOptions(**options), dense, budget)
        return str(plan.ladder[0]), str(plan.ladder[-1])

    assert chosen(10_000_000) == ("bf16", "w4"), "all of them are bf16"
    assert chosen(2_000_000, between="no") == ("w4", "w1"), "w4 for most loses less than bf16 for a few"
    assert chosen(2_000_000)[1] == "w1", "the longer ladder has more to choose from"
    assert chosen(2_000_000, lo="w2")[1] == "w2" and chosen(2_000_000, hi="bf16")[0] == "bf16"
    shared = make_plan(opened, HotnessOptions(hi="bf16", lo="w2", between="no", share="loss"), dense, 3_000_000)
    even = make_plan(opened, HotnessOptions(hi="bf16", lo="w2", between="no"), dense, 3_000_000)
    assert abs(sum(rooms(shared)) - sum(rooms(even))) <= 1 and sum(rooms(even, kv=200_000)) < sum(rooms(even))
    kept = make_plan(opened, HotnessOptions(hi="bf16", lo="w2", between="no", keep="yes"), dense, 3_000_000)
    high, low = even.sizes[0][0], even.sizes[0][even.base]
    assert sum(rooms(even)) == (3_000_000 - even.fixed - 70 * low) // (high - low), "a reserve of six"
    assert sum(rooms(kept)) == (3_000_000 - kept.fixed - 64 * low) // high


def test_the_prior_is_high_from_the_start(bundle: Path) -> None:
    """What was busy in calibration is loaded at the high version: before any token, and without a promotion."""
    model = load(bundle, FAST.replace("prior=none", "interval=1e9"))
    plan = model.moepack.live.plan
    assert [row.count("bf16") for row in model.moepack.versions] == rooms(plan)
    for row, traffic, losses in zip(model.moepack.versions, plan.traffic, plan.losses, strict=True):
        worth = (np.array(traffic) * (losses[:, -1] - losses[:, 0])).tolist()
        high = [w for w, name in zip(worth, row, strict=True) if name == "bf16"]
        assert sorted(high) == sorted(worth)[-len(high) :]
    model.moepack.close()
    assert check_exact(model, bundle) == sum(rooms(plan)) and model.moepack.counters()["promotions"] == 0


def test_a_high_version_that_is_damaged_is_loaded_low(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = store_module.Stored.read_into

    def failing(self: Any, *args: Any) -> None:
        if "layer-001" in self.where and "bf16" in self.where:
            raise OSError("planted")
        read(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module.Stored, "read_into", failing)
        model = load(damaged, FAST.replace("prior=none", "interval=1e9"))
    model.moepack.close()
    assert set(model.moepack.versions[1]) == {"w2"} and "bf16" in model.moepack.versions[0]
    assert model.moepack.counters()["transition_failures"] > 0 and caplog.text.count("planted") == 1


def test_low_versions_go_and_come_back(bundle: Path) -> None:
    model = load(bundle, FAST.replace("0.02", "1e9"))
    live, most = model.moepack.live, sum(rooms(model.moepack.live.plan))
    entries, keys = live.residency.entries, sorted(live.residency.entries)
    for wanted in (keys[:most], keys[-most:]):
        live.transitions.want(dict.fromkeys(wanted, 0))
        wait_for(lambda wanted=wanted: all((e.active == 0) == (k in wanted) for k, e in entries.items()))
    low = sum(live.plan.base in entry.complete for entry in entries.values())
    assert most > 40 and low < 40, "of 64 low versions those of the high experts had to go"
    model.moepack.close()
    assert check_exact(model, bundle) == most and live.tracker.peak <= live.plan.budget


def test_damage_and_loss_while_serving(damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One layer's file is damaged, one is cut short, one vanishes: their experts stay, the others are promoted."""
    model = load(damaged, FAST, least(damaged) + 20_000_000)
    live = model.moepack.live
    files = [damaged / "experts" / "bf16" / f"layer-00{p}.safetensors" for p in range(4)]
    data = bytearray(files[0].read_bytes())
    for e in range(16):
        data[open_bundle(damaged).layer_file("bf16", 0).offset(e) + 200] ^= 1
    files[0].write_bytes(data)
    os.truncate(files[1], 8192)
    live.store.bundle._open.pop(("bf16", 2))
    files[2].unlink()
    with caplog.at_level(logging.WARNING, "moepack.runtime"):
        wait_for(lambda: model.moepack.versions[3].count("bf16") > 12 and live.transitions.failures > 36, model)
    assert [set(row) for row in model.moepack.versions[:3]] == [{"w2"}] * 3
    assert torch.isfinite(run(model, 1)).all()
    model.moepack.close()
    messages = [r.getMessage() for r in caplog.records if r.name == "moepack.runtime"]
    assert len(messages) == len(set(messages)) < model.moepack.counters()["transition_failures"]
    assert sum("layer-002" in m for m in messages) == 1, "a file that is gone is logged once, not for every expert"
    assert any("digest" in m for m in messages) and any("cannot be read" in m for m in messages)


def test_planted_unchecked_digest_is_found(damaged: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were digests not checked, damage would be served: the exactness check sees it."""
    file = damaged / "experts" / "w4" / "layer-001.safetensors"
    data = bytearray(file.read_bytes())
    for e in range(16):
        data[open_bundle(damaged).layer_file("w4", 1).offset(e) + 70] ^= 1
    file.write_bytes(data)

    original = store_module.Stored.read_into

    def blind(*arguments: Any) -> None:
        with contextlib.suppress(BundleError):
            original(*arguments)

    monkeypatch.setattr(store_module.Stored, "read_into", blind)
    model = load(damaged, FAST.replace("hi=bf16", "hi=w4"))
    wait_for(lambda: "w4" in model.moepack.versions[1], model)
    model.moepack.close()
    with pytest.raises(AssertionError):
        check_exact(model, bundle)


def test_the_kv_reserve_pushes_experts_out(bundle: Path) -> None:
    model = load(bundle)
    live = model.moepack.live
    full = rooms(live.plan)
    wait_for(lambda: [row.count("bf16") for row in model.moepack.versions] == full, model)
    live.grow_kv(500_000)
    wait_for(lambda: live.transitions.kv_bytes == 500_000)  # between forward passes, too
    fewer = rooms(live.plan, kv=500_000)
    assert sum(fewer) < sum(full) and sum(r.count("bf16") for r in model.moepack.versions) <= sum(fewer)
    assert live.tracker.reserved <= live.plan.budget
    with pytest.raises(MemoryError):
        live.grow_kv(live.plan.budget)
    live.transitions.shrink_kv(500_000)
    wait_for(lambda: [row.count("bf16") for row in model.moepack.versions] == full, model)
    model.moepack.close()


def test_lru_waits_and_is_exact(bundle: Path) -> None:
    """With room for what a layer needs, every token is computed losslessly, and the waits are counted."""
    policy = "lru:hi=bf16,lo=w2"
    budget = least(bundle, policy, dtype=torch.float32) + ROOM + 600_000
    model = load(bundle, policy, budget, dtype=torch.float32)
    plain = moepack.load(bundle, policy="static:bf16", dtype=torch.float32)
    for seed in range(4):
        torch.testing.assert_close(run(model, seed), run(plain, seed), rtol=1e-4, atol=1e-4)
    waits = model.moepack.counters()["forward_waits"]
    assert waits > 64 and model.moepack.live.tracker.peak <= budget and model.moepack.live.waited > 0
    assert check_exact(model, bundle) == sum(rooms(model.moepack.live.plan))
    model.moepack.close()


def test_eval_counts_and_traces(bundle: Path, evaluation: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = ["eval", str(bundle), "--data", str(evaluation), "--policy", FAST, "--device-memory", "60MB"]
    arguments += ["--length", "64", "--samples", "160", "--trace", str(trace), "--json", "-q"]
    out = CliRunner().invoke(app, arguments)
    assert out.exit_code == 0, out.output
    result = json.loads(out.stdout)
    assert result["promotions"] > 10 and result["forward_waits"] == 0 and result["budget_bytes"] == 60_000_000
    assert result["resident_bytes_peak"] <= 60_000_000 and result["tokens_per_second"] > 0
    read = read_trace(trace)
    assert len(read.records) == 10 and read.policy == FAST and read.versions == ["bf16", "w4", "w3", "w2", "w1"]
    for record in read.records:
        assert all(sum(row) == 16 * 64 * 2 for row in record.counts), "16 windows of 64 tokens, top 2"
        assert record.reserved_bytes <= 60_000_000
    assert read.records[-1].bytes_moved > read.records[0].bytes_moved
    assert any(v == 0 for row in read.records[-1].active for v in row)


def test_static_and_uniform_are_traced_too(bundle: Path, evaluation: Path, tmp_path: Path) -> None:
    for policy in ("static:w4", "uniform"):
        path = tmp_path / "t.jsonl"
        score = evaluate(bundle, [str(evaluation)], policy, device_memory=60_000_000, length=64, samples=16, trace=path)
        assert score.promotions == score.forward_waits == 0 and score.resident_bytes_peak <= 60_000_000
        assert len(read_trace(path).records) == 1


def test_the_threads_end_with_the_model(bundle: Path) -> None:
    before = ours()
    model = load(bundle)
    assert sorted(t.name for t in ours() - before) == ["moepack-migration", "moepack-transitions"]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    wait_for(lambda: not ours() - before)


def test_a_round_that_fails_is_seen_and_tried_again(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(bundle)
    live = model.moepack.live
    assert model.moepack.health()["worker"] == "running" and model.moepack.health()["ok"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.policy, "decide", lambda event: 1 / 0)
        wait_for(lambda: live.worker.failures > 0, model)
        health = model.moepack.health()
        assert not health["ok"] and health["worker"] == "failing" and "division by zero" in health["error"]
        assert torch.isfinite(run(model, 1)).all()
    wait_for(lambda: model.moepack.health()["ok"] and live.residency.counts.promotions > 0, model)
    assert model.moepack.counters()["worker_failures"] == live.worker.failures
    assert sum("a round failed" in r.getMessage() for r in caplog.records) == 1
    model.moepack.close()
    assert model.moepack.health()["worker"] == "stopped"
    assert moepack.load(bundle, policy="static:w2").moepack.health()["worker"] == "none"


def test_closing_while_rounds_fail_ends_the_threads(bundle: Path) -> None:
    before = ours()
    model = load(bundle)
    live = model.moepack.live
    live.policy.decide = lambda event: 1 / 0
    wait_for(lambda: live.worker.failures > 0, model)
    model.moepack.close()
    assert not ours() - before
    assert not live.store._files


def test_a_finalizer_on_the_workers_own_thread(bundle: Path) -> None:
    """The collector may end a model on its own worker, between any two of its instructions."""
    before = ours()
    model = load(bundle)
    live = model.moepack.live
    wait_for(lambda: live.residency.counts.promotions > 0, model)
    bell, ended = live.worker._bell, threading.Event()

    class Bell:
        """The queue, with the model's finalizer run inside `get`."""

        put, empty, qsize, get_nowait = bell.put, bell.empty, bell.qsize, bell.get_nowait

        @staticmethod
        def get(timeout: float) -> None:
            live.abandon()
            ended.set()
            bell.get(timeout=timeout)

    live.worker._bell = Bell
    live.worker.wake()
    bell.put(None)
    assert ended.wait(5)
    live.worker.join()
    assert model.moepack.health()["worker"] == "stopped" and not live.store._files
    wait_for(lambda: not ours() - before)


def test_a_slow_file_holds_no_pass_up(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the high version are opened when it is first asked for: a file system that hangs then hangs no pass."""
    model = load(bundle)
    live, gate = model.moepack.live, threading.Event()
    stored = live.store.stored
    monkeypatch.setattr(live.store, "stored", lambda *place: (gate.wait(20), stored(*place))[1])
    wait_for(lambda: live.residency.in_flight() > 0, model)
    began = time.monotonic()
    for seed in range(5):
        run(model, seed)
    assert time.monotonic() - began < 10 and live.residency.counts.promotions == 0
    gate.set()
    wait_for(lambda: live.residency.counts.promotions > 0, model)
    model.moepack.close()


def test_a_pass_that_runs_while_the_model_is_closed(bundle: Path) -> None:
    """It goes on with its epoch to its end; one that begins afterwards is told in one line."""
    model = load(bundle, FAST.replace("0.02", "1e9"))
    live = model.moepack.live
    want = run(model, 3)
    keys = list(live.residency.entries)
    assert {name for row in model.moepack.versions for name in row} == {"w2"}

    def close(*_: Any) -> None:
        live.transitions.want(dict.fromkeys(keys[::2], 0))
        wait_for(lambda: any(e.active == 0 for e in live.residency.entries.values()))
        model.moepack.close()

    hook = model.model.layers[1].register_forward_pre_hook(close)
    got = run(model, 3)
    hook.remove()
    assert torch.equal(got, want) and all(layer.reading is None for layer in live.layers), "and then it was let go"
    with pytest.raises(InputError, match="this model was closed: load the bundle again"):
        run(model, 3)
    with pytest.raises(InputError, match="this model was closed"), live.step():
        pass


def test_a_step_ends_though_the_device_fails(bundle: Path) -> None:
    model = load(bundle)
    live = model.moepack.live
    with pytest.raises(RuntimeError, match="planted"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.residency, "_mark", lambda: (_ for _ in ()).throw(RuntimeError("planted")))
        run(model, 1)
    assert not live.residency._steps.open and torch.isfinite(run(model, 1)).all()
    model.moepack.close()


@pytest.mark.parametrize("where", ["moepack.runtime.residency.live.Live._pools", "moepack.runtime.devices.glibc.own"])
def test_a_load_that_fails_leaves_no_thread(bundle: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ours()
    enough = least(bundle) + ROOM

    def failing(*_: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(where, failing)
    with pytest.raises(MemoryError, match="planted"):
        load(bundle, FAST, enough)
    assert not ours() - before


def test_copies_keep_to_the_rate_and_are_cancelled(bundle: Path) -> None:
    """A small copy counts as FLOOR bytes; one that is no longer wanted ends at its next chunk."""
    model = load(bundle, FAST.replace("0.02,rate=0", "1e9,rate=50"))
    live, keys = model.moepack.live, [(0, e) for e in range(10)]
    began = time.monotonic()
    live.transitions.want(dict.fromkeys(keys, 0))
    wait_for(lambda: model.moepack.versions[0].count("bf16") == 10)
    assert time.monotonic() - began > 0.9 * 10 * migration.FLOOR / 50e6
    live.device.limit(1.0)
    live.transitions.want(dict.fromkeys([(1, e) for e in range(10)], 0))
    wait_for(lambda: live.residency.in_flight() == 2)
    live.transitions.want(dict.fromkeys(keys, 0))
    wait_for(lambda: live.residency.in_flight() == 0, seconds=2)
    assert live.residency.counts.promotions == 10 and live.residency.counts.cancelled == 2
    model.moepack.close()
    assert live.residency.counts.failures == 0


def test_under_threads_with_delays_everywhere(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes on two threads, a restless policy, failing reads and KV growth, with delays at every seam.

    MOEPACK_STRESS_SECONDS says for how long.
    """
    random.seed(0)
    model = load(bundle)
    live, problems, stop = model.moepack.live, [], time.monotonic() + SECONDS

    def delayed(owner: Any, name: str, most: float = 0.002, failing: float = 0.0) -> None:
        original = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(random.random() * most)
            if random.random() < failing:
                raise OSError("planted")
            result = original(*args, **kwargs)
            time.sleep(random.random() * most)
            return result

        monkeypatch.setattr(owner, name, slow)

    delayed(store_module.Stored, "read_into", failing=0.05)
    for name in ("_make", "_publish"):
        delayed(live.residency, name, 0.0005)
    for name in ("poll", "reclaim", "start"):
        delayed(live.residency, name, 0.0005)
    monkeypatch.setattr(live.transitions, "_retry", 0.05)
    monkeypatch.setattr(logging.getLogger("moepack.runtime"), "disabled", True)

    def restless() -> None:
        keys = list(live.residency.entries)
        while time.monotonic() < stop:
            chosen = random.sample(keys, random.randint(0, 45))
            live.transitions.want(dict.fromkeys(chosen, 0))
            if random.random() < 0.3:
                try:
                    live.grow_kv(random.randint(1, 400_000))
                except MemoryError:
                    live.transitions.shrink_kv(live.transitions.kv_bytes)
            time.sleep(random.random() * 0.05)

    def serve(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < stop:
            with live.step() as step:
                seen = [(h, _digest(h)) for snapshot in step.snapshots for h in snapshot.handles]
                time.sleep(rng.random() * 0.01)
                if any(_digest(h) != before for h, before in seen):
                    problems.append("bytes changed under a step")
                step.counters.add(0, torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))
            if live.tracker.reserved > live.plan.budget:
                problems.append("over the budget")
            time.sleep(rng.random() * 0.004)

    def forward() -> None:
        with torch.inference_mode():
            while time.monotonic() < stop:
                if not torch.isfinite(model(ids(random.randint(0, 99), 8), use_cache=False).logits).all():
                    problems.append("not finite")
                time.sleep(random.random() * 0.02)

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                problems.append(repr(error))

        return run

    threads = [threading.Thread(target=guarded(w)) for w in (restless, lambda: serve(1), forward)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert model.moepack.health()["ok"], model.moepack.health()
    model.moepack.close()
    assert not problems, problems[:3]
    counts = live.residency.counts
    assert counts.promotions > 5 * SECONDS and counts.demotions > 0 and live.transitions.failures > 0
    assert live.tracker.peak <= live.plan.budget and live.waits == 0
    monkeypatch.undo()
    check_exact(model, bundle)


def _digest(handle: Any) -> int:
    """Cheap, and different for different bytes."""
    return int(handle.extent.view(torch.int64).sum())
