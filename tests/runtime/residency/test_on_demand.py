"""Experts without a resident version: what a layer waits for, what is fetched ahead, and what happens when it fails."""

import numpy as np
import pytest
import torch
from live_models import ids, least, load
from residency_simulation import Kind, WaitingSimulation
from support import damage, spy
from transformers import DynamicCache

import moepack
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import PAGE
from moepack.runtime.policies.contract import Changes
from moepack.runtime.residency.on_demand import OnDemandLoader

HIGH, LOW, NONE = range(3)
FOUR_TWO = "importance:hi=w4,lo=w2"
HOTTEST = "hotness:hi=w4,lo=stored,between=no,prefetch=yes"


class Waits(WaitingSimulation):
    def __init__(self, failing=()):
        super().__init__(Kind(pages=(2, 1, 0), reserve=0, room=7, keeps_base=True))
        self.failing = failing
        self.demand = OnDemandLoader(
            self.transitions, lambda key, version: (200, 100)[version],
            lambda key, version: f"layer {key[0]}, expert {key[1]}, version {version}",
        )  # fmt: skip

    def fails(self, key):
        return key in self.failing

    def arrive(self):
        self.finish(0, failed=self.fails(self.jobs[0][1]))

    def at(self):
        return {key: e.active for key, e in self.residency.entries.items() if e.active != NONE}


def moved(sim):
    m = sim.demand.moved
    return [m.demand_bytes, m.prefetch_bytes, m.prefetch_in_time, m.prefetch_late, m.prefetch_wasted]


def test_a_layer_waits_for_its_own_and_not_for_what_is_ahead():
    sim = Waits()
    sim.demand.reach(0, Changes({(0, 0): HIGH, (0, 1): LOW, (1, 0): HIGH}))
    assert sim.at() == {(0, 0): HIGH, (0, 1): LOW} and sim.demand.waits == 2 and moved(sim) == [300, 0, 0, 0, 0]
    placed, coming = sim.demand.where(1)
    assert placed == [NONE] * 3 and coming == [HIGH, -1, -1]
    sim.arrive()
    placed, coming = sim.demand.where(1)
    assert placed == [HIGH, NONE, NONE] and coming == [-1] * 3
    sim.demand.reach(1, Changes({(1, 0): HIGH}))
    assert sim.demand.waits == 2 and moved(sim) == [300, 200, 200, 0, 0], "it was there in time"
    sim.check()


def test_what_is_late_is_waited_for_and_what_is_not_needed_is_cancelled():
    sim = Waits()
    sim.demand.reach(0, Changes({(0, 0): HIGH, (1, 0): HIGH, (1, 1): LOW, (1, 2): LOW}))
    sim.demand.where(1)
    sim.demand.reach(1, Changes({(1, 0): HIGH}))
    assert sim.demand.waits == 2 and moved(sim) == [200, 200, 0, 200, 0]
    assert sim.residency.entries[1, 1].coming is None, "its deadline has passed"
    while sim.jobs:
        sim.arrive()
    sim.demand.where(0)
    assert sim.at() == {(0, 0): HIGH, (1, 0): HIGH} and sim.residency.counts.cancelled == 2
    assert moved(sim) == [200, 200, 0, 200, 0], "nothing was copied of them"
    sim.check()


def test_what_arrives_and_is_not_needed_is_wasted():
    """Unneeded at its deadline; at another precision than is needed; or given up by a later answer."""
    sim = Waits()
    sim.demand.reach(0, Changes({(1, 0): LOW, (1, 1): LOW, (1, 2): LOW}))
    while sim.jobs:
        sim.arrive()
    sim.demand.where(1)
    sim.demand.reach(0, Changes({(1, 2): NONE}))
    assert moved(sim) == [0, 300, 0, 0, 100] and (1, 2) not in sim.at()
    sim.demand.where(1)
    sim.demand.reach(1, Changes({(1, 0): HIGH}))
    assert moved(sim) == [200, 300, 0, 0, 300] and sim.at() == {(1, 0): HIGH, (1, 1): LOW}, "what came stays"
    sim.check()


def test_room_that_a_cancelled_copy_still_has_is_waited_for():
    sim = Waits()
    sim.demand.reach(0, Changes({(1, 0): HIGH, (1, 1): HIGH, (1, 2): HIGH}))
    sim.demand.reach(0, Changes({(1, e): NONE for e in range(3)} | {(0, e): HIGH for e in range(3)}))
    assert sim.at() == {(0, 0): HIGH, (0, 1): HIGH, (0, 2): HIGH} and not sim.jobs
    with pytest.raises(InputError, match="layer 0, expert 3, version 0: no block of memory"):
        sim.demand.reach(0, Changes({(0, 3): HIGH}))
    sim.check()


def test_room_of_copies_that_the_kv_reserve_cancelled_is_waited_for():
    """The reserve has its bytes once the first has ended, and the pass begins while others still hold theirs."""
    sim = Waits()
    sim.demand.reach(0, Changes({(1, 0): HIGH, (1, 1): HIGH, (1, 2): HIGH}))
    assert not sim.transitions.grow_kv(3 * PAGE)
    sim.arrive()
    sim.transitions.tick()
    assert sim.transitions.kv_bytes == 3 * PAGE and len(sim.jobs) == 2
    sim.demand.reach(0, Changes({(0, 0): HIGH, (0, 1): HIGH}))
    assert sim.at() == {(0, 0): HIGH, (0, 1): HIGH} and not sim.jobs
    sim.check()


def test_a_needed_copy_that_fails_ends_the_pass_and_one_ahead_does_not():
    sim = Waits(failing=((0, 1), (1, 0)))
    sim.demand.reach(0, Changes({(0, 0): HIGH, (1, 0): LOW}))
    while sim.jobs:
        sim.arrive()
    sim.demand.where(1)
    assert sim.transitions.failures == 1
    for _ in range(2):  # again at once: there is nothing else to serve
        with pytest.raises(BundleError, match="layer 1, expert 0, version 1: simulated"):
            sim.demand.reach(1, Changes({(1, 0): LOW}))
    sim.failing = ()
    sim.demand.reach(1, Changes({(1, 0): LOW}))
    assert sim.at() == {(0, 0): HIGH, (1, 0): LOW}
    sim.check()


# --- on a bundle


def test_all_critical_is_bit_identical_at_the_least_budget(bundle):
    """Prompts, one token, a batch with padding, generation, as many experts a token as there are: a byte above the
    least that would do."""
    plain = moepack.load(bundle, policy="static:w4")
    batch = ids(7, 40, 2)
    mask = torch.ones_like(batch)
    mask[0, :13] = 0
    for policy in (f"{FOUR_TWO},r=1", "importance:hi=w4,lo=absent,r=1", "lru:hi=w4,lo=absent", HOTTEST):
        enough = least(bundle, policy, batch=2)
        with pytest.raises(InputError, match=f"a layer's experts at w4: the least that would do is {enough} bytes"):
            load(bundle, policy, enough - 1, batch=2)
        model = load(bundle, policy, enough + 1, batch=2)
        traffic = np.concatenate([x.tokens for x in open_bundle(bundle).calibration().layers])
        here = np.array(model.moepack.versions).ravel() == "w4"
        assert set(np.array(model.moepack.versions).ravel()[~here]) == {"stored" if policy == HOTTEST else "absent"}
        assert here.sum() == 16 and traffic[here].min() >= traffic[~here].max(), "the busiest, before any token"
        with torch.inference_mode():
            for tokens in (ids(1, 200), ids(2, 1), batch):
                assert torch.equal(model(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits)
            got, want = (m(batch, attention_mask=mask, use_cache=False).logits for m in (model, plain))
            assert torch.equal(got, want), "what padding chose runs, too"
            routers = [[layer.mlp.gate for layer in m.model.layers] for m in (model, plain)]
            for gate in (*routers[0], *routers[1]):
                gate.top_k = 16
            assert torch.equal(model(ids(3, 30), use_cache=False).logits, plain(ids(3, 30), use_cache=False).logits)
            for gate in (*routers[0], *routers[1]):
                gate.top_k = 2
        counters = model.moepack.counters()
        assert model.moepack.manager.tracker.peak <= enough + 1 and counters["forward_waits"] > 64
        cancelled = counters["bytes_moved"] - counters["demand_bytes"] - counters["prefetch_bytes"]  # half-way
        assert 0 <= cancelled < counters["prefetch_bytes"] or cancelled == 0
        parts = ("prefetch_in_time", "prefetch_late", "prefetch_wasted")
        assert sum(counters[name] for name in parts) == counters["prefetch_bytes"]
        model.moepack.close()


@pytest.mark.parametrize("policy", ["lru:hi=w4,lo=absent", HOTTEST])
def test_a_mask_may_have_columns_for_tokens_to_come(policy, bundle):
    """As long as a cache that is allocated ahead: they say nothing of the tokens that are read."""
    plain = moepack.load(bundle, policy="static:w4")
    model = load(bundle, policy, least(bundle, policy) + 100_000)
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    mask = torch.zeros(1, 40, dtype=torch.long)
    read = 0
    with torch.inference_mode():
        for part in (ids(1, 10), ids(2, 1), ids(3, 1)):
            mask[:, : read + part.shape[1]] = 1
            at = torch.arange(read, read + part.shape[1])[None]
            got, want = (
                m(part, attention_mask=mask, position_ids=at, past_key_values=cache).logits
                for m, cache in zip((model, plain), caches, strict=True)
            )
            assert torch.equal(got, want)
            read += part.shape[1]
    model.moepack.close()


@pytest.mark.parametrize("policy", ["lru:hi=w4,lo=absent", "importance:hi=w4,lo=absent,r=1", "paged:alpha=0.01"])
def test_a_damaged_expert_ends_the_pass_that_needs_it(damaged, policy):
    """Each pass, until the bytes are good again: stored ones are digested again once their file has changed."""
    version = "bf16" if policy.startswith("paged") else "w4"
    budget = least(damaged, policy) + 3_000_000
    damage(damaged, version, 2, range(16))
    model = load(damaged, policy, budget)
    said = rf"layer 2, expert \d+, version {version}"
    for _ in range(2):
        with torch.inference_mode(), pytest.raises(BundleError, match=said) as error:
            model(ids(1, 30), use_cache=False)
        assert error.value.problems[0].kind == "digest"
    assert model.moepack.counters()["transition_failures"] > 0
    damage(damaged, version, 2, range(16))
    with torch.inference_mode():
        assert torch.isfinite(model(ids(1, 30), use_cache=False).logits).all()


def test_kv_caches_take_the_experts_room_and_give_it_back(bundle):
    """Down to what one layer needs, and no further; what is computed stays the same."""
    policy = f"{FOUR_TWO},r=1"
    budget = least(bundle, policy, kv_tokens=64) + 800_000
    model = load(bundle, policy, budget, kv_tokens=64)
    plain = moepack.load(bundle, policy="static:w4")
    live, serving = model.moepack.manager, model.moepack
    held = []
    with torch.inference_mode():
        caches = [None, None]
        for start in range(0, 640, 160):
            part = ids(5, 640)[:, start : start + 160]
            outs = [m(part, past_key_values=c, use_cache=True) for m, c in zip((model, plain), caches, strict=True)]
            caches = [out.past_key_values for out in outs]
            assert torch.equal(outs[0].logits, outs[1].logits)
            held.append(sum(layer.resident_bytes for layer in serving.layers))
            assert live.tracker.reserved <= live.tracker.peak <= budget
        assert live.transitions.kv_bytes > 300_000 and held[-1] < held[0]
        assert sum(live.capacity()) >= live.plan.demand
        with pytest.raises(moepack.BudgetExceeded):
            model(ids(6, 20_000)[:, :20_000], use_cache=True)
        del outs, caches
        torch.equal(model(ids(1, 64), use_cache=False).logits, plain(ids(1, 64), use_cache=False).logits)


@pytest.mark.parametrize("policy", [FOUR_TWO + ",reuse=no", "lru:lo=absent", HOTTEST])
@pytest.mark.parametrize("where", ["reach", "_leave", "_fetch"])
def test_an_interruption_between_an_answer_and_its_end_costs_no_memory(bundle, policy, where):
    """What was to leave when Ctrl-C came leaves later, and a block that was just taken comes back."""
    tokens = ids(3)
    model = load(bundle, policy, least(bundle, policy))
    with model.moepack as served, torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        holder = served.manager.residency if where == "_fetch" else served.manager.on_demand
        for after in range(3):
            calls = iter(range(after))

            def interrupted(*_, calls=calls):
                if next(calls, None) is None:
                    raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                spy(patch, holder, where, interrupted)
                model(ids(after + 10), use_cache=False)
            assert torch.equal(model(tokens, use_cache=False).logits, expected)


def test_an_expert_moves_beside_passes():
    """Its present version serves until the other has arrived; the earlier one is freed when the pass has ended."""
    sim = Waits()
    sim.demand.reach(0, Changes({(0, 0): LOW}))
    step, _ = sim.residency.begin()
    answer = Changes({(0, 0): LOW})
    answer.beside = {(0, 0): HIGH}
    sim.demand.reach(0, answer)
    assert sim.at() == {(0, 0): LOW} and sim.demand.waits == 1 and sim.demand.where(0)[1][0] == HIGH
    sim.demand.reach(1, Changes({(1, 0): LOW}))
    assert sim.demand.waits == 2, "what a layer needs is waited for, and not that"
    while sim.jobs:
        sim.arrive()
    assert sim.demand.where(0)[0][0] == HIGH and sim.residency.leaving
    sim.residency.end(step)
    sim.demand.where(1)
    assert not sim.residency.leaving and moved(sim) == [200, 200, 0, 0, 0]
    sim.check()
