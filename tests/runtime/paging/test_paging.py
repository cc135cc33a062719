"""Models under `paged`: the bits of all experts resident, whatever moves, fails or runs at once; and the bytes."""

import functools
import itertools
import json

import pytest
import torch
from live_models import at, ids, least, load, logits, same, same_at_once, stop_after, wait_for
from support import cli, damage, for_logits, ok
from tiny_models import build_tiny

import moepack
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.reports.plan import plan
from moepack.runtime.experts import backends
from moepack.runtime.planning import plan as plan_module
from moepack.runtime.residency import kv_reserve
from moepack.runtime.residency.on_demand import OnDemandLoader
from moepack.runtime.trace import read_trace

ROOM = 8_000_000  # for all experts of the demo model, uncompressed
ONLY = "versions: [bf16]\ncalibration: {samples: 4, length: 32, batch_size: 4}\nallocation: {average_bits: 16}\n"


def paged(bundle, options="alpha=1", room=ROOM, **more):
    return load(bundle, f"paged:{options}" if options else "paged", room=room, **more)


def coded(model):
    """How many experts have coded bytes in memory, whether they are decoded beside them or not."""
    residency = model.moepack.manager.residency
    return sum(residency.source_of(key) is not None for key in residency.entries)


def bytes_agree(model):
    """Check that pools hold what the experts' entries hold, and that the policy's count of coded bytes is right."""
    live = model.moepack.manager
    blocks = [c.block for x in live.residency.entries.values() for c in x.complete.values() if c.block is not None]
    blocks += [x.flying.block for x in live.residency.entries.values() if x.flying is not None]
    assert sum(pool.taken for pool in live.transitions.headroom.pools) == len(blocks)
    assert live.tracker.peak <= live.tracker.budget


@pytest.fixture(scope="module")
def plain(bundle):
    """Every expert resident, uncompressed."""
    return moepack.load(bundle, policy="static:bf16")


SETTINGS = (("alpha=0.5,resident=0.25", ROOM), ("alpha=1", 2_500_000), ("alpha=0.01,ahead=no", 300_000), ("", 0))


@pytest.mark.parametrize(("options", "room"), SETTINGS)
def test_the_same_bits_as_all_resident(bundle, plain, options, room):
    """Prompts, padding, one token, generation: from memory, coded memory, and files, in budgets down to the least."""
    model = paged(bundle, options, room, kv_tokens=512, batch=3)
    for size, batch in ((48, 1), (1, 1), (7, 3), (512, 1), (2, 1)):
        tokens = ids(size, size, batch)
        mask = torch.ones_like(tokens)
        mask[:, : size // 3] = 0
        assert torch.equal(logits(model, tokens), logits(plain, tokens))
        here, there = (logits(m, tokens, attention_mask=mask)[mask == 1] for m in (model, plain))
        assert torch.equal(here, there), "experts that padding alone needs are not fetched"
    made = [m.generate(ids(1, 20), max_new_tokens=12, do_sample=False) for m in (model, plain)]
    assert torch.equal(*made)
    assert model.moepack.counters()["forward_waits"] > 0
    bytes_agree(model)


@pytest.mark.parametrize("way", ["reference", "float32"])
def test_other_kernels(bundle, way, monkeypatch):
    """Where experts are run by torch, padding's experts may be missing; or multiplied by tiles."""
    dtype = torch.float32 if way == "float32" else "auto"
    if way == "reference":
        monkeypatch.setattr(backends, "library", lambda: None)
    other = moepack.load(bundle, policy="static:bf16", dtype=dtype)
    model = paged(bundle, "alpha=0.5", dtype=dtype)
    same(model, other, 1, 5, 300)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]])
    want = logits(other, ids(1, 6), attention_mask=mask)[:, 3:]
    assert torch.equal(logits(model, ids(1, 6), attention_mask=mask)[:, 3:], want)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral"])
def test_families(family, demo_model, text, tmp_path):
    """Biases; shared experts and a layer without experts; every expert chosen by every token. One version is enough."""
    more = {"num_experts_per_tok": 4} if family == "mixtral" else {}
    path = build_tiny(family, tmp_path, ONLY, demo_model, text, **more)
    model = paged(path, "alpha=0.5", 200_000)
    assert at(model, "bf16@packed") and at(model, "stored")
    same(model, moepack.load(path, policy="static:bf16"), 1, 9, 64)


def test_the_least_budget_holds_the_decoded_experts_of_two_layers(bundle):
    """A byte less is refused, with the least that would do. `plan` says the same."""
    smallest = least(bundle, "paged")
    with pytest.raises(InputError, match=f"2 layers' experts at bf16: the least that would do is {smallest} bytes"):
        load(bundle, "paged", smallest - 1)
    live = load(bundle, "paged", smallest).moepack.manager
    layers = open_bundle(bundle).layers
    two = live.plan.sizes[0][0] * (layers[0].experts + layers[1].experts)
    assert live.plan.demand == two == smallest - live.plan.fixed
    assert coded(load(bundle, "paged:alpha=1", smallest)) == 0
    planned = plan(bundle, for_logits(device_memory=smallest + ROOM, policy="paged:alpha=1"))
    assert planned.least_bytes == smallest and planned.per_layer[0].versions["bf16@packed"] == layers[0].experts


def test_the_kv_cache_takes_expert_memory_and_gives_it_back(bundle, plain, monkeypatch):
    """Alpha falls as the reserve grows, and rises again when it shrinks; the bits stay the same throughout.

    On backends that are so slow that loading is what takes the time: on this small model it is not.
    """
    monkeypatch.setattr(kv_reserve, "LINGER", 1e9)  # what no cache needs goes back when this test says so
    monkeypatch.setattr(plan_module, "measure_rates", lambda *args: (float("inf"), 2e6, 1e6))
    model = paged(bundle, "alpha=1,interval=0,theta=1", room=1_200_000)  # too little to keep all experts decoded
    live = model.moepack.manager
    whole = coded(model)
    begun = live.policy.alpha
    seeds = itertools.count()

    def serve():
        tokens = ids(next(seeds), 1, 8)
        assert torch.equal(logits(model, tokens), logits(plain, tokens))

    serve()
    grown = live.tracker.budget - live.tracker.held("fixed") - live.plan.demand - live.plan.sizes[0][1] * whole // 2
    live.grow_kv(grown)
    wait_for(lambda: live.transitions._settle_kv() if live.transitions.kv_asked else True, serve)
    assert 0 < coded(model) <= whole // 2 and live.tracker.held("kv") == grown
    serve()
    assert live.policy.alpha < 0.6 * begun
    live.transitions.shrink_kv(grown)
    wait_for(lambda: coded(model) > 0.85 * whole, serve)
    assert live.policy.alpha > 0.9 * begun
    bytes_agree(model)


def test_threads_take_turns(bundle, plain):
    """Passes of prompts and of tokens on threads: the same bits; all of them end."""
    model = paged(bundle, "alpha=0.5", 1_000_000)
    want = {n: logits(plain, ids(n, n)) for n in (1, 60, 2, 300)}
    same_at_once(model, want, tuple(want), threads=3, rounds=8)
    bytes_agree(model)


SEAMS = ["_need", "_foresee", "_wait", "_leave", "_fetch", "_switch"]


@pytest.mark.parametrize(("where", "error"), [*((seam, KeyboardInterrupt) for seam in SEAMS), ("_fetch", RuntimeError)])
def test_an_interrupted_pass_lets_go(bundle, plain, where, error, monkeypatch):
    """However far it had come: the next pass finds experts whole, or loads them anew, and coded ones come back."""
    model = paged(bundle, "alpha=1,interval=0", 1_000_000)
    live = model.moepack.manager
    holder = live.residency if where in ("_fetch", "_switch") else live.on_demand
    stop_after(monkeypatch, holder, where, 5, error)
    with pytest.raises(error, match="stopped"):
        for n in (1, 300, 2, 300, 3, 300):
            logits(model, ids(n, n))
    monkeypatch.undo()
    same(model, plain, 1, 40)
    bytes_agree(model)
    wait_for(lambda: coded(model) > 0, functools.partial(same, model, plain, 1, 30))


def test_bandwidth_is_not_measured_on_damage(damaged):
    budget = least(damaged, "paged")
    damage(damaged, "bf16", 0, [1], 700)
    with pytest.raises(BundleError, match="layer 0, expert 1, version bf16: its bytes do not match"):
        load(damaged, "paged", budget)


def test_coded_bytes_that_are_no_code_are_refused(bundle, plain):
    """What only decoding shows: memory went bad after its digest was checked."""
    model = paged(bundle, "alpha=1,ahead=no", 2_500_000)
    handles = model.moepack.layers[2].current.handles
    extents = [h.packed.extent.numpy() for h in handles if h.packed is not None]
    kept = [extent.copy() for extent in extents]
    for extent in extents:
        extent[600:60_000] = 0xFF
    with pytest.raises(BundleError, match=r"layer 2, expert \d+, version bf16: "):
        logits(model, ids(300, 300))
    for extent, bytes_ in zip(extents, kept, strict=True):
        extent[:] = bytes_
    same(model, plain, 300)
    bytes_agree(model)


def test_a_trace_has_each_pass_of_an_evaluation(bundle, evaluation, tmp_path):
    """What routers chose, and what was in memory, moved and waited for by then."""
    policy, trace = "paged:alpha=0.5", tmp_path / "trace"
    words = ["eval", bundle, "-d", evaluation, "--policy", policy, "--device-memory", "60MB", "--trace", trace]
    result = json.loads(ok(cli(*words, "--length", "64", "--samples", "80", "--json", "-q")))
    assert result["resident_bytes_peak"] <= result["budget_bytes"] == 60_000_000 and result["tokens_per_second"] > 0
    read = read_trace(trace)
    assert read.policy == policy and read.versions == ["bf16", "w4", "w3", "w2", "w1"]
    assert [[sum(row) for row in x.counts] for x in read.records] == [[16 * 64 * 2] * 4] * 5, "windows, tokens, top 2"
    assert all(0 < x.reserved_bytes <= 60_000_000 for x in read.records)
    first, *_, last = read.records
    assert last.waits == result["forward_waits"] > 0 and last.bytes_moved >= first.bytes_moved > 0
    assert {v for row in first.active for v in row} == {-1, 0}


def test_a_load_that_is_given_up_leaves_nothing(bundle, plain, monkeypatch):
    """A coded copy that is on its way when its expert is needed is waited for, and then decoded."""
    model = paged(bundle, "alpha=0.01,interval=0,ahead=no", 2_500_000)
    live = model.moepack.manager
    key = next(k for k in live.residency.entries if k[0] == 1 and live.residency.source_of(k) is None)
    began = []
    real = OnDemandLoader.reach

    def reach(self, position, wanted):
        if position == 1 and not began:
            began.append(live.transitions.start(key, 1))
        return real(self, position, wanted)

    monkeypatch.setattr(OnDemandLoader, "reach", reach)
    same(model, plain, 300)
    assert began and live.residency.source_of(key) is not None
    bytes_agree(model)
