"""A policy is one file and one line: those in docs/extending/policy.md are added here, word by word, and serve."""

import time

import numpy as np
import pytest
import torch
from live_models import load, run, wait_for
from support import ROOT, documented, for_logits

from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import PAGE, Version, align
from moepack.reports.plan import plan
from moepack.runtime.experts.forward import experts_forward
from moepack.runtime.policies import registry
from moepack.runtime.policies.contract import Interval, PrefillEnded, Setting
from moepack.runtime.policies.registry import parse_policy

VERSIONS = tuple(Version.of(name, 64) for name in ("w4", "w3", "w2"))


@pytest.fixture
def tiers(tmp_path, monkeypatch):
    return added("tiers", 0, tmp_path, monkeypatch)


@pytest.fixture
def certain(tmp_path, monkeypatch):
    return added("certain", 1, tmp_path, monkeypatch)


def added(name, block, where, monkeypatch):
    """A documented file, as a module beside the others, and the documented line."""
    module = documented("policy", f"moepack.runtime.policies.{name}", where, block)
    document = (ROOT / "docs" / "extending" / "policy.md").read_text()
    line = next(x for x in document.splitlines() if x.startswith("    tiers.")).replace("tiers", name)
    entries = (*registry.ENTRIES, *eval(f"({line})", {name: module}))  # the documentation's own line
    monkeypatch.setattr(registry, "ENTRIES", entries)
    return module


def test_quarters_by_rank_as_long_as_there_is_room(tiers):
    ladder = tiers.TiersOptions().ladders(VERSIONS)[0]
    assert [str(placement) for placement in ladder] == ["w4", "w3", "w2", "w2@host", "absent"]
    with pytest.raises(InputError, match="has no 'w2': here are w4, w3"):
        tiers.TiersOptions().ladders(VERSIONS[:2])
    policy = tiers.Tiers(Setting([4], ladder, [(4, 3, 2, 0, 0)], [], []), tiers.TiersOptions())
    counts = [np.array([1, 5, 0, 2])]
    assert policy.decide(Interval(0.0, [9], counts)) is None, "it decides when a prompt has been read"
    assert policy.decide(PrefillEnded(0.0, [9], counts)) == {(0, 1): 0, (0, 3): 1, (0, 0): 2}
    assert policy.decide(PrefillEnded(0.0, [6], [np.array([9, 0, 0, 0])])) == {(0, 0): 0, (0, 1): 2, (0, 3): 3}
    wanted = {(0, 0): 0, (0, 1): 1, (0, 3): 2, (0, 2): 3}
    assert policy.decide(PrefillEnded(0.0, [9], [np.array([0, 0, 1, 0])])) == wanted


def test_one_file_and_one_line_serve(tiers, bundle):
    """Three versions on the device, one on the host and absent experts in one layer; and what is computed is theirs."""
    assert str(parse_policy("tiers")) == "tiers" and "tiers[:KEY=VALUE,...]" in registry.usages(in_budget=True)
    with pytest.raises(InputError, match="policy tiers:speed=1: option 'speed' is unknown: there are rate"):
        parse_policy("tiers:speed=1")
    least = plan(bundle, for_logits(device_memory=0, policy="tiers")).least_bytes
    opened = open_bundle(bundle)
    sizes = {v.name: align(v.resident_size(opened.layers[0].matrices), PAGE) for v in opened.versions}
    w4, w3, w2 = (sizes[v.name] for v in VERSIONS)
    room = 4 * 4 * (w4 + w3 + w2) + w4
    planned = plan(bundle, for_logits(device_memory=least + room, policy="tiers"))
    assert planned.feasible and planned.per_layer[0].versions == {"absent": 16}
    model = load(bundle, "tiers", least + room)
    live = model.moepack.manager
    assert set(model.moepack.versions[0]) == {"absent"}
    plain = [model.model.layers[p].mlp.experts for p in range(4)]
    assert all(float(run(model, 0).abs().sum()) > 0 for _ in range(2)), "without any expert the dense parts go on"
    kinds = {"w4", "w3", "w2", "w2@host", "absent"}
    wait_for(lambda: kinds <= {n for row in model.moepack.versions for n in row} and not len(live.residency.flying))
    model.moepack.manager.round(time.monotonic())
    for layer, module in zip(live.layers, plain, strict=True):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
        index = torch.tensor([[e, (e + 5) % 16] for e in range(5)])
        gates = torch.full((5, 2), 0.5)
        got = experts_forward(module, x, index, gates)
        want = torch.zeros(5, 128)
        for token, row in enumerate(index.tolist()):
            for expert in row:
                if layer.current.handles[expert].version is not None:
                    first, second = (layer.current.weight(expert, m, torch.float32).T for m in (0, 1))
                    gate, up = (x[token] @ first).chunk(2)
                    want[token] += 0.5 * (torch.nn.functional.silu(gate) * up) @ second
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert live.tracker.peak <= least + room and live.host.reserved > 0
    assert model.moepack.counters()["forward_waits"] == 0


def test_the_less_doubt_the_higher_the_precision(certain):
    """Tokens of experts 2, 0 and 3 were routed with 0.1, 0.5 and 0.9 nats each; there is room for two versions."""
    ladder = certain.CertainOptions(hi="w4", lo="w2").ladders(VERSIONS)[0]
    policy = certain.Certain(Setting([4], ladder, [(4, 3, 2)], [], []), certain.CertainOptions())
    sums = {certain.ENTROPY: [np.array([1.0, 0.0, 0.4, 0.9])]}
    event = Interval(0.0, [3], [np.array([2, 0, 4, 1])], sums)
    assert policy.decide(event) == {(0, 2): 0, (0, 0): 1}, "the last one stays at the base, as does one never chosen"
    assert policy.worth((0, 2)) > policy.worth((0, 0)) > policy.worth((0, 3))


def test_a_policys_own_statistic_is_added_up_where_the_router_is(certain, bundle):
    """The entropy of prompts with padding and of decoding, by torch's own distribution; none of it is any other's."""
    model = load(bundle, "certain:hi=w4,lo=w2", room=100_000)
    policy = model.moepack.manager.policy
    assert set(policy.needs.sums) == {certain.ENTROPY} == set(model.moepack.manager.statistics._take().sums)
    told = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, given, out: told.append(out[0].reshape(-1, 16)))
        layer.mlp.experts.register_forward_pre_hook(lambda module, given: told.append(given[1]))
    want = np.zeros((4, 16))
    total = 0
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for ids, text in ((torch.arange(10).view(2, 5), mask), (torch.tensor([[7]]), torch.tensor([[1]]))):
        told.clear()
        with torch.inference_mode():
            model(ids, attention_mask=text, use_cache=False)
        real = text.bool().view(-1)
        total += 2 * int(real.sum())
        for row, logits, index in zip(want, told[::2], told[1::2], strict=True):
            nats = torch.distributions.Categorical(logits=logits[real].double()).entropy()
            np.add.at(row, index[real].numpy(), nats[:, None].numpy())
    wait_for(lambda: policy.counts[-1].sum() == total)
    np.testing.assert_allclose(policy.entropy, want, rtol=1e-5)
    wait_for(lambda: "w4" in {name for row in model.moepack.versions for name in row})
