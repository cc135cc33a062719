"""Calibration: the pass is the model's own forward, statistics count what they say, text becomes windows."""

import pytest
import torch
from passes import begun, through
from support import ids as token_ids
from transformers import AutoModelForCausalLM

from moepack.calibrate import statistics
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.experts import finish, hidden
from moepack.calibrate.forward import Observation
from moepack.calibrate.gather import LayerTokens, expert_tokens, gather_batch
from moepack.calibrate.stream import StreamedModel
from moepack.pack.spec import Version
from moepack.quantize import crossfit, expert_batch
from moepack.quantize.expert_batch import Settings, expert_batches, quantise_batch
from moepack.quantize.grid import Quantised, dequantise
from moepack.quantize.losses import loss
from moepack.quantize.methods import quantise_all


@pytest.fixture(scope="module")
def stream(demo_model):
    return StreamedModel(open_checkpoint(demo_model))


def test_pass_is_the_models_own_forward(demo_model, stream):
    """Layer by layer gives the same hidden states, to the bit, and the routers' own choices."""
    ids = token_ids(64, 0, 5)
    walk = begun(stream, ids, 2)  # 2 + 2 + 1: two batch sizes
    stream.free(None)
    observations = through(walk, stream, range(len(stream.layers)))
    assert all(p.is_meta for p in stream.model.parameters())
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.inference_mode():
        for batch, hidden in zip(ids.split(2), walk.hidden, strict=True):
            out = model.model(batch)
            assert torch.equal(model.model.norm(hidden), out.last_hidden_state)
        router = model(ids, output_router_logits=True).router_logits
    for observation, logits in zip(observations, router, strict=True):
        assert observation is not None and observation.inputs.shape == (5 * 64, 128)
        chosen = logits.reshape(320, -1).topk(2).indices
        assert torch.equal(observation.experts.long().sort(1).values, chosen.sort(1).values)
        assert torch.allclose(observation.gates.sum(1), torch.ones(320))


def make_observation(tokens=64, length=16, experts=8, top_k=2, hidden=16):
    g = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]).to(torch.int32)
    gates = torch.rand(tokens, top_k, generator=g)
    return Observation(torch.randn(tokens, hidden, generator=g), chosen, gates, length)


@pytest.mark.parametrize("at_once", [1 << 14, 12])
def test_statistics_count_what_they_say(at_once, monkeypatch):
    """Of all windows at once, or of one at a time in parts."""
    monkeypatch.setattr(statistics, "_AT_ONCE", at_once)
    o = make_observation()
    s = statistics.routing_statistics(o, 8)
    for e in range(8):
        hit = o.experts == e
        assert s["tokens"][e] == hit.sum()
        assert s["gate_sum"][e] == pytest.approx(float(o.gates[hit].sum()))
        for w in range(4):
            rows = hit[16 * w : 16 * w + 16]
            assert s["prefill_counts"][w, e] == rows[:8].sum() and s["decode_counts"][w, e] == rows[8:].sum()
            first = o.gates[16 * w : 16 * w + 8][rows[:8]]
            assert s["prefill_gates"][w, e] == pytest.approx(float(first.sum()))
        for f in range(8):
            both = hit.any(1) & (o.experts == f).any(1)
            assert s["coactivation"][e, f] == both.sum()
    shared = [len(set(o.experts[t].tolist()) & set(o.experts[t - 1].tolist())) / 2 for t in range(1, 64) if t % 16]
    assert float(s["reuse"]) == pytest.approx(sum(shared) / len(shared))


# --- losses


def quantised(stream, layer, experts, observation, settings):
    """All of a layer's experts in order, a batch at a time."""
    module, cpu, rows = stream.experts_module(layer), torch.device("cpu"), []
    for part in expert_batches(experts.layer, settings):
        batch = gather_batch(module, experts.select(part), part, observation, settings, cpu)
        rows += quantise_batch(batch, settings)
    return rows


def test_losses_are_of_the_experts_output(stream):
    """Computed again here from the dequantised matrices, on an expert's own tokens and on others of the layer."""
    experts = stream.experts(2, range(16))
    g = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(15, generator=g)[:2] for _ in range(1200)]).to(torch.int32)
    observation = Observation(torch.randn(1200, 128, generator=g), chosen, torch.rand(1200, 2, generator=g), 100)
    versions = (Version.of("w4", 64), Version.of("w2", 64))
    settings = Settings("rtn", versions, loss_tokens=10**6)
    rows = quantised(stream, 2, experts, observation, settings)
    assert len(rows) == 16 and [v.version for v in rows[0]] == list(versions)
    token, slot = torch.where(chosen == 3)
    x, gates = observation.inputs[token], observation.gates[token, slot]
    held = torch.arange(1200)[torch.arange(1200) // 32 % 8 == 7]
    around = held if len(held) <= 256 else held[torch.linspace(0, len(held) - 1, 256).long()]
    around = around[~torch.isin(around, token)]

    def output(x, gate_up, down):
        gate, up = (x @ gate_up.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ down.T

    for item in rows[3]:
        matrices = [dequantise(q, item.version)[item.index] for q in item.quantised]
        everyone = gates.square().mean().sqrt().expand(len(around))
        for inputs, weight, found in ((x, gates, item.own), (observation.inputs[around], everyone, item.others)):
            want = output(inputs, experts.matrix(3, 0).float(), experts.matrix(3, 1).float())
            error = (output(inputs, *matrices) - want).square()
            assert found.loss.mse == pytest.approx(float(error.mean()), rel=1e-3)
            assert found.loss.relative == pytest.approx(float(error.sum() / want.square().sum()), rel=1e-3)
            assert found.loss.gated == pytest.approx(float((weight.square()[:, None] * error).mean()), rel=1e-3)
    nobody = rows[15][0]  # expert 15 got no token
    assert nobody.own.groups == 0 and nobody.others.loss.relative > 0


def output(module, x, weights):
    return finish(module, hidden(module, x, weights[0], None), weights[1], None)


def test_experts_with_few_tokens_are_no_worse_than_rounding(stream):
    """At 4 to 1 bits, with 0, 3, 32, 128 or 512 tokens, on unseen tokens (2 % tolerance)."""
    experts = stream.experts(3, range(16))
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(128, 128, generator=g) * 0.1
    x = torch.randn(6000, 128, generator=g) @ mix
    chosen = torch.randint(5, 16, (6000, 2), generator=g).to(torch.int32)
    for expert, count in enumerate((0, 3, 32, 128, 512)):
        chosen[torch.arange(count) * 11 + expert, 0] = expert
    observation = Observation(x, chosen, torch.rand(6000, 2, generator=g), 100)
    versions, module = tuple(Version.of(f"w{bits}", 64) for bits in (4, 3, 2, 1)), stream.experts_module(3)
    made = {m: quantised(stream, 3, experts, observation, Settings(m, versions)) for m in ("gptq", "rtn")}
    unseen = torch.randn(2000, 128, generator=g) @ mix
    for expert in range(5):
        exact = output(module, unseen, [experts.matrix(expert, m).float() for m in range(2)])
        for v, version in enumerate(versions):
            error = {}
            for method, rows in made.items():
                item = rows[expert][v]
                got = output(module, unseen, [dequantise(q, version)[item.index] for q in item.quantised])
                error[method] = loss(exact, got, torch.ones(2000)).relative
            assert error["gptq"] <= 1.02 * error["rtn"], (version.name, expert, error)


def test_starved_experts_take_a_fallback_that_does_better(stream, monkeypatch):
    """With a method that ruins everything, starved experts take another; the rest are left with it."""

    def ruin(method, weight, moments, versions, zeros, matrix):
        good = quantise_all("rtn", weight, None, versions)
        return {v: Quantised(q.codes, -q.scale, q.zero) for v, q in good.items()}

    monkeypatch.setattr(expert_batch, "quantise_all", ruin)
    monkeypatch.setattr(crossfit, "quantise_all", ruin)
    experts = stream.experts(3, range(16))
    g = torch.Generator().manual_seed(0)
    chosen = torch.randint(1, 16, (3000, 2), generator=g).to(torch.int32)
    observation = Observation(torch.randn(3000, 128, generator=g), chosen, torch.rand(3000, 2, generator=g), 100)
    settings = Settings("gptq", (Version.of("w2", 64),))
    rows = quantised(stream, 3, experts, observation, settings)
    assert rows[0][0].method in ("rtn", "hqq") and rows[0][0].others.loss.relative < 1
    assert {r[0].method for r in rows[1:]} == {"gptq"} and min(r[0].own.loss.relative for r in rows[1:]) > 1


def test_tokens_that_are_compared_were_not_learnt_from():
    o = make_observation()
    layer = LayerTokens.of(o)
    assert len(layer.compare) and not set(layer.learn.tolist()) & set(layer.compare.tolist())
    for e in range(8):
        tokens = expert_tokens(o, layer, e, enough=1000, plenty=1000, most=10**6)
        routed = torch.where((o.experts == e).any(1))[0].tolist()
        assert tokens.starved
        assert not (set(tokens.learn.tolist()) | set(layer.learn.tolist())) & set(tokens.compare.tolist())
        assert set(tokens.learn.tolist()) <= set(routed)
        assert tokens.measure.tolist() == routed and len(routed) == len(tokens.gates) == len(tokens.learnt)
        assert tokens.measure[tokens.learnt].tolist() == tokens.learn.tolist()
        assert set(tokens.others.tolist()) == set(layer.compare.tolist()) - set(routed)
        fed = expert_tokens(o, layer, e, enough=1, plenty=1000, most=5)
        assert fed.learn.tolist() == routed and not fed.starved and not fed.rich and bool(fed.learnt.all())
        rich = expert_tokens(o, layer, e, enough=1, plenty=1, most=5)
        if rich.rich:  # it was sent tokens of a cluster that is set aside
            assert sorted(rich.learn.tolist() + rich.measure.tolist()) == routed and not bool(rich.learnt.any())
            assert len(rich.measure) and not set(rich.measure.tolist()) & set(layer.learn.tolist())
    assert any(expert_tokens(o, layer, e, 1, 1, 5).rich for e in range(8))
