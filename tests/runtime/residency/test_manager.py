"""Serving in a budget with versions that change, on a real bundle, real threads and the CPU as the device."""

import logging
import os
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from live_models import FAST, check_exact, ids, least, load, rooms, run, wait_for
from support import at_once, damage

from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import Bundle, open_bundle
from moepack.runtime.devices import migration
from moepack.runtime.planning.plan import make_plan
from moepack.runtime.policies.hotness import HotnessOptions
from moepack.runtime.policies.reducers import RouterOutput
from moepack.runtime.residency import transitions
from moepack.runtime.store import files as store_module

SECONDS = float(os.environ.get("MOEPACK_STRESS_SECONDS", "3"))


def test_plans(bundle):
    opened = open_bundle(bundle)
    dense = 1_000_000

    def chosen(budget, **options):
        plan = make_plan(opened, HotnessOptions(**options), dense, budget)
        return str(plan.ladder[0]), str(plan.ladder[-1])

    assert chosen(10_000_000) == ("bf16", "w4"), "all of them are bf16"
    assert chosen(2_000_000, between="no") == ("w4", "w1"), "w4 for most loses less than bf16 for a few"
    assert chosen(2_000_000)[1] == "w1", "the longer ladder has more to choose from"
    assert chosen(2_000_000, lo="w2")[1] == "w2" and chosen(2_000_000, hi="bf16")[0] == "bf16"
    even = make_plan(opened, HotnessOptions(hi="bf16", lo="w2", between="no"), dense, 3_000_000)
    assert sum(rooms(even, kv=200_000)) < sum(rooms(even))
    high, low = even.sizes[0][0], even.sizes[0][even.base]
    assert sum(rooms(even)) == (3_000_000 - even.fixed - 70 * low) // (high - low), "a reserve of six"


def test_layers_share_by_loss_where_their_losses_compare(bundle, monkeypatch):
    """Evenly, unless the tables say how far every layer's losses reach the logits."""
    opened = open_bundle(bundle)

    def made():
        return make_plan(opened, HotnessOptions(hi="bf16", lo="w2", between="no"), 1_000_000, 3_000_000)

    even = made()
    assert even.by_loss is None and max(even.capacity()) - min(even.capacity()) <= even.sizes[0][0]
    tables = opened.calibration()
    layers = tuple(replace(layer, reach=np.full(5, 4.0 - p)) for p, layer in enumerate(tables.layers))
    monkeypatch.setattr(Bundle, "calibration", lambda self: replace(tables, layers=layers))
    shared = made()
    assert abs(sum(rooms(shared)) - sum(rooms(even))) <= 1
    assert shared.capacity()[0] > shared.capacity()[-1], "the first layer's losses reach four times as far"


def test_absent_experts_come_without_a_wait(bundle):
    """`lo=absent`: what calibration rarely saw takes no memory and adds nothing, until its tokens come."""
    policy = "hotness:lo=absent,interval=0.02,rate=0,margin=0,slack=0,anchor=0"
    enough, of_w1 = least(bundle, policy), least(bundle, "hotness:hi=w2,lo=w1")
    assert enough < of_w1
    with pytest.raises(InputError, match=f"half of the experts at w1: the least that would do is {enough} bytes"):
        load(bundle, policy, enough - 1)
    model = load(bundle, policy, enough + 60_000)
    before = model.moepack.versions
    assert all(0 < row.count("absent") < 16 for row in before)

    def came_and_went():
        moves = [pair for rows in zip(before, model.moepack.versions, strict=True) for pair in zip(*rows, strict=True)]
        moves = [(old, new) for old, new in moves if old != new]
        return any(old == "absent" for old, _ in moves) and any(new == "absent" for _, new in moves)

    wait_for(came_and_went, model)
    model.moepack.close()
    counters = model.moepack.counters()
    assert counters["forward_waits"] == counters["transition_failures"] == 0
    assert model.moepack.resident_bytes_peak <= model.moepack.budget_bytes
    check_exact(model, bundle)


def test_a_growing_cache_lowers_experts_before_any_is_absent(bundle, monkeypatch):
    """Until the policy has chosen anew, those above the lowest version go there; half of the bytes always stay."""
    policy = "hotness:lo=absent,interval=1e9,rate=0"
    model = load(bundle, policy, room=1_000_000)
    live, before = model.moepack.manager, model.moepack.versions
    monkeypatch.setattr(live.policy, "decide", lambda event: None)
    monkeypatch.setattr(live, "each_round", lambda: None)  # which gives back what no cache uses
    there = sum(name != "absent" for row in before for name in row)
    high = sum(name not in ("absent", "w1") for row in before for name in row)
    assert high > 20
    live.grow_kv(800_000)
    wait_for(lambda: live.transitions.kv_bytes == 800_000)
    after = model.moepack.versions
    assert sum(name != "absent" for row in after for name in row) == there, "lower versions sufficed"
    assert sum(name not in ("absent", "w1") for row in after for name in row) < high
    most = live.transitions.headroom.most_kv()
    live.grow_kv(most - 800_000)
    wait_for(lambda: live.transitions.kv_bytes == most)
    assert sum(name != "absent" for row in model.moepack.versions for name in row) >= 32
    with pytest.raises(MemoryError):
        live.grow_kv(1)
    model.moepack.close()


def test_no_damaged_expert_is_left_out_in_silence(damaged):
    """`lo=absent`: a model with a bad version is refused as ever, not served without the expert."""
    enough = least(damaged, "hotness:lo=absent") + 2_000_000
    damage(damaged, "bf16", 0, range(16))
    damage(damaged, "w4", 0, range(16))
    with pytest.raises(BundleError, match="digest"):
        load(damaged, "hotness:lo=absent", enough)


def test_a_high_version_that_is_damaged_is_loaded_low(damaged, caplog):
    read = store_module.Stored.read_into

    def failing(self, *args):
        if "layer-001" in self.where and "bf16" in self.where:
            raise OSError("planted")
        read(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module.Stored, "read_into", failing)
        model = load(damaged, FAST.replace("prior=none", "interval=1e9"))
    model.moepack.close()
    assert set(model.moepack.versions[1]) == {"w2"} and "bf16" in model.moepack.versions[0]
    assert model.moepack.counters()["transition_failures"] > 0 and caplog.text.count("planted") == 1


def test_damage_and_loss_while_serving(damaged, caplog):
    """One layer's file is damaged, one is cut short, one vanishes: their experts stay, the others are promoted."""
    model = load(damaged, room=20_000_000)
    live = model.moepack.manager
    files = [damaged / "experts" / "bf16" / f"layer-00{p}.safetensors" for p in range(4)]
    damage(damaged, "bf16", 0, range(16))
    os.truncate(files[1], 8192)
    live.store.bundle._open.pop(("bf16", "experts", 2))
    files[2].unlink()
    with caplog.at_level(logging.WARNING, "moepack.runtime"):
        wait_for(lambda: model.moepack.versions[3].count("bf16") > 12 and live.transitions.failures > 36, model)
    assert [set(row) for row in model.moepack.versions[:3]] == [{"w2"}] * 3
    assert torch.isfinite(run(model, 1)).all()
    model.moepack.close()
    messages = [r.getMessage() for r in caplog.records if r.name == "moepack.runtime"]
    assert len(messages) == len(set(messages)) < model.moepack.counters()["transition_failures"]
    assert sum("layer-002" in m for m in messages) == 1, "a file that is gone is logged once, not for every expert"
    assert any("digest" in m for m in messages) and any("not there" in m for m in messages)


def test_no_limit_holds_up_what_leaves_for_the_kv_cache(bundle):
    """At 1 kB a second, of which each copy counts as four: a promotion under way and evictions end at once."""
    model = load(bundle)
    live = model.moepack.manager
    full = rooms(live.plan)
    wait_for(lambda: [row.count("bf16") for row in model.moepack.versions] == full, model)
    live.device.limit(1e3, hurried=live.device._hurried)
    live.grow_kv(500_000)
    wait_for(lambda: live.transitions.kv_bytes == 500_000)  # at the rate it would take longer than a test may
    assert sum(full) - sum(rooms(live.plan, kv=500_000)) > 2
    model.moepack.close()


def test_copies_keep_to_the_rate(bundle):
    """A small copy counts as FLOOR bytes."""
    model = load(bundle, FAST.replace("0.02,rate=0", "1e9,rate=50"))
    live, keys = model.moepack.manager, [(0, e) for e in range(10)]
    began = time.monotonic()
    live.transitions.want(dict.fromkeys(keys, 0))
    wait_for(lambda: model.moepack.versions[0].count("bf16") == 10)
    assert time.monotonic() - began > 0.9 * 10 * migration.FLOOR / 50e6


def test_under_threads_with_delays_everywhere(bundle, monkeypatch):
    """Forward passes on two threads, a restless policy, failing reads and KV growth, with delays at every seam.

    MOEPACK_STRESS_SECONDS says for how long.
    """
    random.seed(0)
    model = load(bundle)
    live, problems, stop = model.moepack.manager, [], time.monotonic() + SECONDS

    def delayed(owner, name, most=0.002, failing=0.0):
        original = getattr(owner, name)

        def slow(*args, **kwargs):
            time.sleep(random.random() * most)
            if random.random() < failing:
                raise OSError("planted")
            result = original(*args, **kwargs)
            time.sleep(random.random() * most)
            return result

        monkeypatch.setattr(owner, name, slow)

    delayed(store_module.Stored, "read_into", failing=0.05)
    for name in ("_make", "_publish", "poll", "reclaim", "start"):
        delayed(live.residency, name, 0.0005)
    monkeypatch.setattr(transitions, "RETRY", 0.05)
    monkeypatch.setattr(logging.getLogger("moepack.runtime"), "disabled", True)

    def restless():
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

    def serve():
        rng = random.Random(1)
        while time.monotonic() < stop:
            with live.step() as step:
                seen = [(h, _digest(h)) for snapshot in step.snapshots for h in snapshot.handles]
                time.sleep(rng.random() * 0.01)
                if any(_digest(h) != before for h, before in seen):
                    problems.append("bytes changed under a step")
                step.counters.add(0, RouterOutput(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)))
            if live.tracker.reserved > live.plan.budget:
                problems.append("over the budget")
            time.sleep(rng.random() * 0.004)

    def forward():
        with torch.inference_mode():
            while time.monotonic() < stop:
                if not torch.isfinite(model(ids(random.randint(0, 99), 8), use_cache=False).logits).all():
                    problems.append("not finite")
                time.sleep(random.random() * 0.02)

    def guarded(number):
        try:
            (restless, serve, forward)[number]()
        except BaseException as error:
            problems.append(repr(error))

    at_once(guarded, 3)
    assert model.moepack.health()["ok"], model.moepack.health()
    model.moepack.close()
    assert not problems, problems[:3]
    counts = live.residency.counts
    assert counts.promotions > 5 * SECONDS and counts.demotions > 0 and live.transitions.failures > 0
    assert live.tracker.peak <= live.plan.budget and live.waits == 0
    monkeypatch.undo()
    check_exact(model, bundle)


def _digest(handle):
    """Cheap, and different for different bytes."""
    return int(handle.extent.view(torch.int64).sum())
