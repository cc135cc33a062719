"""`importance` over pinned memory: each pass chooses its critical experts, which run at `hi` wherever that is.

The present policy that waits makes the same choice, so where nothing is cached the bits are the same.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_stand_in import StandIn
from live_models import at, ids, load, logits, same, same_at_once, stop_after, wait_for
from tiny_models import FAMILIES, build_tiny

import moepack
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Version
from moepack.reports.plan import plan
from moepack.runtime.experts import critical as critical_module
from moepack.runtime.experts.handles import Snapshot
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.plan import make_plan
from moepack.runtime.policies.contract import Interval, Setting, critical_count
from moepack.runtime.policies.importance import Importance, ImportanceOptions
from moepack.runtime.policies.mixed_cache import NEWCOMERS
from moepack.runtime.policies.placements import Placement, Where
from moepack.runtime.policies.reducers import GATES, ranked
from moepack.runtime.policies.registry import parse_policy
from moepack.runtime.store.cudart import Cudart

SPARSE = """
versions: [bf16, w4, w2]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 32, batch_size: 4}
allocation: {average_bits: 4}
"""
VERSIONS = Version.of("w4", 64), Version.of("w2", 64)
WAITS = "importance:hi=w4,lo=w2,prefetch=no,reuse=no"
PINNED = "importance:hi=w4,lo=w2@pinned"
ALL: dict[str, Any] = {"prefill_tokens": 32, "kv_tokens": 32, "batch": 2}
SIZES = (1, 2, 9, 24)  # 2 and more are prompts; 24 tokens take another launch than few do
SHARES = (0.5, 0.75, 0.9)


def cached(model: Any, tokens: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Logits of a prompt and of decode steps behind it."""
    out, cache = [], None
    with torch.inference_mode():
        for step in range(steps):
            given = tokens if not step else torch.tensor([[7 * step + 1]] * len(tokens))
            made = model(given, use_cache=True, cache=cache)
            cache = made.cache
            out.append(made.logits)
    return out


def padded(model: Any) -> torch.Tensor:
    """The logits of a batch's text."""
    tokens, mask = ids(3, 9, batch=2), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    return logits(model, tokens, attention_mask=mask)[mask.bool()]


@pytest.fixture(scope="module")
def waits(small: Path) -> dict[tuple[float, str], Any]:
    """What the policy that waits makes, by share and ranking."""
    out: dict[tuple[float, str], Any] = {}
    for r in SHARES:
        for by in ("importance", "counts"):
            model = moepack.load(small, policy=f"{WAITS},r={r},by={by}", device_memory=1 << 40, **ALL)
            out[r, by] = {n: logits(model, ids(n, n)) for n in SIZES}, cached(model, ids(5, 6, 2)), padded(model)
            model.moepack.close()
    return out


def holds_nothing(small: Path, r: float = 0.75, by: str = "importance", **given: Any) -> Any:
    model = load(small, f"{PINNED},r={r},by={by}", room=0, **ALL, **given)
    assert at(model, "w2@pinned") == 24
    return model


@pytest.mark.parametrize("by", ["importance", "counts"])
@pytest.mark.parametrize("r", SHARES)
def test_the_choice_is_that_of_the_policy_that_waits(small: Path, waits: Any, r: float, by: str) -> None:
    model = holds_nothing(small, r, by)
    by_size, steps, text = waits[r, by]
    same(model, by_size, *SIZES)
    assert all(torch.equal(a, b) for a, b in zip(cached(model, ids(5, 6, 2)), steps, strict=True))
    assert torch.equal(padded(model), text)
    assert model.moepack.counters()["forward_waits"] == 0


def test_decode_steps_beside_prompts_have_the_same_bits(small: Path) -> None:
    """That attention is observed in one thread's prompts changes nothing in another's steps, whose kernels differ."""
    model = load(small, f"{PINNED},r=1", room=0, **{**ALL, "prefill_tokens": 256, "kv_tokens": 256})
    want, stop = cached(model, ids(3, 24), 6), threading.Event()

    def prompts() -> None:
        while not stop.is_set():
            logits(model, ids(7, 200))

    other = threading.Thread(target=prompts)
    other.start()
    try:
        for _ in range(8):
            for got, alone in zip(cached(model, ids(3, 24), 6), want, strict=True):
                assert torch.equal(got, alone)
    finally:
        stop.set()
        other.join()


@pytest.mark.parametrize("policy", [f"{PINNED},r=1", "importance:hi=w4,lo=w2,r=1"])
def test_families_that_read_the_attentions_name(policy: str, demo_model: Path, text: Path, made_once: Any) -> None:
    """An indexer masks the keys of `sdpa` and `eager` alone: observed attention is still called so."""

    def make(folder: Path) -> None:
        indexed = {"n_group": 1, "index_topk": 4, "index_head_dim": 32, "index_n_heads": 4}
        build_tiny("glm_moe_dsa", folder, SPARSE, demo_model, text, **FAMILIES["deepseek_v3"] | indexed)

    path = Path(made_once("sparse-attention", make) / "bundle")
    plain = moepack.load(path, policy="static:w4")
    model = moepack.load(path, policy=policy, device_memory=1 << 40, prefill_tokens=64, kv_tokens=64)
    same(model, plain, 24, 60)


def test_threads_choose_each_for_itself(small: Path, waits: Any) -> None:
    """Prompts of several threads at once, each with heavy hitters of its own."""
    model = holds_nothing(small, 0.5)
    same_at_once(model, waits[0.5, "importance"][0], SIZES, threads=3, rounds=12)
    assert model.config._attn_implementation == "sdpa"


def watch(monkeypatch: pytest.MonkeyPatch, share: float = 0.5) -> list[int]:
    """Hold every choice from now on to the rule, without heavy hitters; return how many experts ran at `hi` in each."""
    real, seen = critical_module.Critical.choose, list[int]()

    def choose(self: Any, snapshot: Snapshot, step: Any, position: int) -> Snapshot:
        made = real(self, snapshot, step, position)
        counts, sums = step.counters.layer(position)
        order = ranked(counts, counts if step.prompt.several else sums[GATES])
        high = set(order[: critical_count(made.of.critical_share, len(order))])
        words = made.device_table().tolist()
        for e, (word, active) in enumerate(zip(words, snapshot.handles, strict=True)):
            run = self.best[e] if e in high and active.version != self.best[e].version else active
            assert word == run.extent.data_ptr() + made.of.numbers[run.version.name], (position, e)
            assert run.version.name == "w4" or e not in high
        seen.append(len(high))
        return made

    monkeypatch.setattr(critical_module.Critical, "choose", choose)
    return seen


@pytest.mark.parametrize("on_gpu", [False, True])
def test_words_follow_promotions(
    small: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """Experts come at either version beside passes, from host memory; those on the device at `hi` serve low too."""
    if on_gpu:
        request.getfixturevalue("gpu")
    model = load(small, f"{PINNED},r=0.5,by=counts", room=60_000, **ALL)
    live = model.moepack.manager
    shares = live.plan.critical
    for layer, share in zip(live.layers, shares, strict=True):
        monkeypatch.setattr(layer.of, "critical_share", share, raising=False)
    seen, read = watch(monkeypatch), []
    monkeypatch.setattr("moepack.runtime.store.files.Stored.read_into", lambda *of: read.append(of))

    def serve() -> None:
        for n in (1, 9):
            logits(model, ids(len(seen), n))

    before = model.moepack.versions
    wait_for(lambda: live.residency.counts.promotions >= 6 and model.moepack.versions != before, serve)
    assert at(model, "w4") and at(model, "w2") and at(model, "w2@pinned") and not read
    assert len(set(seen)) > 1 and model.moepack.counters()["forward_waits"] == 0
    assert live.tracker.peak <= live.tracker.budget
    assert (
        live.host.reserved == live.plan.on_host(Where.PINNED) == 24 * (live.plan.blocks[0][0] + live.plan.blocks[0][2])
    )


def test_all_critical_is_the_version_alone(small: Path) -> None:
    """Whatever is on the device, and while threads run passes and experts come."""
    plain = moepack.load(small, policy="static:w4")
    want = {n: logits(plain, ids(n, n)) for n in SIZES}
    model = load(small, f"{PINNED},r=1", room=60_000, **ALL)
    wait_for(lambda: model.moepack.manager.residency.counts.promotions >= 3, lambda: same(model, want, *SIZES))
    same_at_once(model, want, SIZES, threads=3, rounds=8)


def test_memory_is_divided_by_shares(small: Path, gpu: StandIn) -> None:
    """Blocks at `hi` for what is critical of as many experts as fit; all at `hi` where all fit."""
    policy = f"{PINNED},r=0.75,by=counts"
    bundle, options = open_bundle(small), parse_policy(policy).options
    needed = make_plan(bundle, options, 0, 1 << 40)
    high, low = needed.blocks[0][:2]
    base = needed.fixed + needed.reserve - needed.workspace
    made = make_plan(bundle, options, 0, base + 3 * (3 * high + low)).divided()
    assert [critical_count(r, 4) for r in made.critical] == [4, 3, 2] and high == 2 * low
    assert made.most == ((3, 0, 0), (3, 1, 0), (3, 1, 0)), "the last: 2 and 2, and what is left makes one larger"
    assert make_plan(bundle, options, 0, 1 << 40).divided().most == ((8, 0, 0),) * 3
    model = load(small, policy, 1 << 40, **ALL)
    assert at(model, "w4") == 24


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (f"{PINNED},prefetch=yes", r"prefetch=yes needs passes that wait, and no pass waits under lo=w2@pinned"),
        (f"{PINNED},reuse=no", r"reuse=no needs passes that wait"),
        (f"{PINNED},by=random", r"by=random needs passes that wait"),
        (f"{PINNED},renormalise=yes", r"renormalise=yes needs passes that wait"),
        ("importance:hi=w4,lo=w4@pinned", r"lo=w4@pinned is not below hi=w4"),
        ("importance:hi=w2,lo=w4@pinned", r"lo=w4@pinned is not below hi=w2"),
        ("importance:lo=@pinned", r"lo=@pinned names no version"),
        ("importance:lo=absent@pinned", r"no version 'absent'"),
        ("importance:lo=w5@pinned", r"no version 'w5'"),
        ("hotness:hi=w2,lo=w4@pinned", r"lo=w4@pinned is above hi=w2"),
        ("hotness:lo=w5@pinned", r"no version 'w5'"),
        ("lru:lo=w4@pinned,prefetch=yes", r"prefetch=yes needs passes that wait, and no pass waits under lo=w4@pinned"),
    ],
)
def test_what_cannot_be_is_refused(small: Path, policy: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        moepack.load(small, policy=policy, device_memory=1 << 40)


def test_host_memory_must_hold_both(small: Path, gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    both = make_plan(open_bundle(small), parse_policy(PINNED).options, 0, 1 << 40).on_host(Where.PINNED)
    said = rf"host_memory of {both - 1} bytes .* every expert at w4@pinned and at w2@pinned: .* {both} bytes"
    with pytest.raises(TooSmallError, match=said):
        load(small, PINNED, host_memory=both - 1, **ALL)
    monkeypatch.setattr("moepack.runtime.residency.opening.host_limits", lambda: {"pinnable_bytes": both - 1})
    with pytest.raises(TooSmallError, match=said):
        load(small, PINNED, **ALL)
    load(small, PINNED, host_memory=both, **ALL)
    with pytest.raises(InputError, match=r"process's memory"):
        moepack.load(small, policy=PINNED, memory="8GB")
    assert plan(small, LoadOptions(policy=PINNED, device_memory=1 << 30, device="cuda")).pinned_bytes == both


def test_a_load_that_ends_early_unpins(small: Path, gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, refused by the system, or because a version of `hi` is damaged."""
    monkeypatch.setattr("moepack.runtime.devices.cuda_memory.PIECE", 1)
    with monkeypatch.context() as stops:
        stop_after(stops, Cudart, "register", 30)
        with pytest.raises(KeyboardInterrupt):
            load(small, PINNED, 1 << 40, **ALL)
    assert not gpu.cudart.registered
    gpu.cudart.fails = lambda name, size, flags: 2 * (len(gpu.cudart.registered) == 30 or name == "allocate")
    with pytest.raises(InputError, match=r"experts in pinned memory need \d+ bytes of it: .*out of memory"):
        load(small, PINNED, 1 << 40, **ALL)
    gpu.cudart.fails = lambda *of: 0
    assert not gpu.cudart.registered

    def damaged(self: Any, *given: Any) -> None:
        raise BundleError.single(self.where, "digest", "does not match")

    monkeypatch.setattr("moepack.runtime.store.files.Stored.read_into", damaged)
    with pytest.raises(BundleError, match=r"does not match"):
        load(small, PINNED, 1 << 40, **ALL)
    assert not gpu.cudart.registered


def test_what_comes_beside_passes() -> None:
    """By hand: two layers of four, of which all and half are critical; and few at a time."""
    versions = [Placement(v) for v in VERSIONS]
    ladder = (*versions, Placement(VERSIONS[1], Where.PINNED))
    losses = [np.zeros((4, 3))] * 2
    options = ImportanceOptions(hi="w4", lo="w2@pinned", r=0.75)
    policy = Importance(Setting([4, 4], ladder, [[4, 2, 0]] * 2, [[4.0, 3, 2, 1]] * 2, losses), options)
    assert not policy.needs.layers and not policy.needs.prediction and GATES in policy.needs.sums
    nothing = [np.zeros(4, np.int64)] * 2, {GATES: [np.zeros(4)] * 2}
    first = policy.decide(Interval(0.0, [10, 10], *nothing))
    assert first == {(0, 0): 0, (1, 0): 0, (0, 1): 0, (1, 1): 0, (0, 2): 0}, "the busiest, as far as they fit"
    assert policy.decide(Interval(1.0, [10, 10], *nothing)) is None
    counts, gates = (
        [np.array([0, 0, 1, 0]), np.array([0, 1, 1, 0])],
        [np.array([0, 0, 1.0, 0]), np.array([0, 0.2, 0.8, 0])],
    )
    now = policy.decide(Interval(2.0, [10, 10], counts, {GATES: gates}))
    assert now is not None and list(now.items()) == [((0, 2), 0), ((1, 2), 0), ((1, 1), 0), ((0, 0), 0), ((1, 0), 0)], (
        "(1, 1) is at `hi` already and stays so; the least recently used left"
    )
    assert policy.decide(Interval(3.0, [2, 2], *nothing)) == {(0, 2): 0}, "less room"
    counts, gates = [np.array([0, 0, 0, 0]), np.array([1, 1, 0, 0])], [np.zeros(4), np.array([0.9, 0.1, 0, 0])]
    assert policy.decide(Interval(4.0, [4, 4], counts, {GATES: gates})) == {(1, 0): 0, (1, 1): 1}
    experts = [64] * 4
    wide = Setting(experts, ladder, [[4, 2, 0]] * 4, [[1.0] * 64] * 4, [np.zeros((64, 3))] * 4)
    policy, room = Importance(wide, options), [1 << 20] * 4
    held = policy.decide(Interval(0.0, [0] * 4, [np.zeros(64, np.int64)] * 4))
    assert not held
    for time in range(1, 9):
        used = Interval(float(time), room, [np.full(64, 3)] * 4, {GATES: [np.full(64, 0.5)] * 4})
        now = policy.decide(used)
        assert now is not None and len(now) == min(256, time * NEWCOMERS)
    assert [sum(v == 0 for (p, _), v in now.items() if p == layer) for layer in range(4)] == [64, 56, 40, 32]
