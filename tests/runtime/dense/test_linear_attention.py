"""Linear attention by the kernel in families' own models: errors of plain BF16, states in transformers' own cache."""

import pytest
import torch
from gpu_stand_in import kernels
from graph_recorder import recording
from kept_prompts import MOST, STEP, SYSTEM, read
from tiny_models import random_model, serve_linears
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next as code

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
from moepack.runtime.dense import linear_attention
from moepack.runtime.dense.gpu_linear_attention import serve_gpu_linear_attention
from moepack.runtime.dense.linear_attention import serve_linear_attention
from moepack.runtime.kernels import mamba_native
from moepack.runtime.kernels.delta_native import DeltaRule
from moepack.runtime.kernels.delta_triton import GpuDelta
from moepack.runtime.kernels.mamba_native import Mamba
from moepack.server.batching.engine import Engine

HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 40}
FAMILIES = {
    "qwen3_next": HEADS,
    "qwen3_5_moe_text": {**HEADS, "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 48},
    "kimi_linear": {},
    "nemotron_h": {},
    "granitemoehybrid": {},
}
SIZES = {**FAMILIES, "jamba": {"mamba_d_state": 5, "mamba_dt_rank": 7}}
IDS = torch.randint(1, 60, (2, 90), generator=torch.Generator().manual_seed(0))
STEPS = (70, *(1,) * 12, 8)  # tokens of the passes: a prompt of more than a block, tokens, and a few after them


def model_of(family, dtype=torch.bfloat16, **extra):
    """A random model, whose layers forget at many rates, not yet served."""
    model, _ = random_model(family, torch.float32, **{"hidden_size": 64, **SIZES[family], **extra})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape, generator=draw) * 6 - 4)
            elif name.endswith(("dt_bias", ".D", "conv1d.bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
            elif "conv1d" in name:
                parameter.mul_(2)
    return model.bfloat16().to(dtype).requires_grad_(False).eval()


def served(model):
    serve_linears(model)
    model.changed = serve_linear_attention(model)
    return model


def layers_of(model):
    return [m for m in model.modules() if hasattr(m, "conv1d")]


def outputs(model, steps=STEPS, mask=None):
    """What the layers of linear attention make of the same random input, pass by pass, and the cache after it."""
    cache = DynamicCache(config=model.config)
    made = []
    for layer in layers_of(model):
        dtype = layer.conv1d.weight.dtype
        x = torch.randn(2, sum(steps), layer.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
        at = 0
        for n in steps:
            given = None if mask is None or at else mask[:, :n]
            made.append(layer(hidden_states=x[:, at : at + n], cache=cache, attention_mask=given))
            at += n
    return torch.cat(made, 1), cache


@pytest.fixture
def runs(monkeypatch):
    """The tokens of each call of a kernel."""
    ran = []
    for kind in (DeltaRule, Mamba):
        run = kind.run
        monkeypatch.setattr(kind, "run", lambda *given, run=run: ran.append(given[2][-1]) or run(*given))
    return ran


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_are_at_most_those_of_plain_bf16(family, runs):
    """Against float32, of results and of states: of two sequences, one of which begins with padding."""
    mask = torch.ones(2, STEPS[0], dtype=torch.bool)
    mask[1, :3] = False
    model = served(model_of(family))
    layers = layers_of(model)
    assert sum(model.changed.values()) == len(layers) > 0
    runs.clear()
    with torch.no_grad():
        found = [outputs(m, mask=mask) for m in (model_of(family, torch.float32), model_of(family), model)]
    assert runs == [2 * n for n in STEPS] * len(layers)
    exact, plain, ours = (made.float() for made, _ in found)
    assert (ours - exact).norm() < 1.2 * (plain - exact).norm()
    for exact_layer, plain_layer, layer in zip(*(cache.layers for _, cache in found), strict=True):
        if hasattr(layer, "recurrent_states"):
            right, other, state = (x.recurrent_states[0] for x in (exact_layer, plain_layer, layer))
            assert state.dtype == torch.float32
            assert (state - right).norm() < 1.2 * (other - right).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scan_goes_on_from_its_state(dtype, monkeypatch):
    """Jamba's, in passes of many tokens, one and a few: as transformers' scan of all in one pass, padding included."""
    ran = []
    run = mamba_native.scan
    monkeypatch.setattr(mamba_native, "scan", lambda *given: ran.append(given[0].shape[-1]) or run(*given))
    mask = torch.ones(2, sum(STEPS), dtype=torch.bool)
    mask[1, :3] = False
    exact, plain, ours = (model_of("jamba", kind) for kind in (torch.float32, dtype, dtype))
    changed = linear_attention.serve_scans(ours)
    assert changed == {"JambaMambaMixer": len(layers_of(ours))}
    ran.clear()
    with torch.no_grad():
        wanted, _ = outputs(exact, (sum(STEPS),), mask)
        other, _ = outputs(plain, (sum(STEPS),), mask)
        got, _ = outputs(ours, STEPS, mask)
    assert ran == [*STEPS] * len(layers_of(ours))
    assert (got - wanted).norm() <= 1.2 * (other - wanted).norm() + 1e-6 * wanted.norm()
    compiled = torch.compile(layers_of(ours)[0], fullgraph=True, backend="eager")
    x = torch.randn(1, 3, ours.config.hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layers_of(plain)[0](x))


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_tokens_one_by_one_are_those_of_transformers(family, runs):
    """Of whole models, logits in BF16, and in float32, where modules keep their own code."""
    for dtype, most in ((torch.bfloat16, 1.2), (torch.float32, 1.0)):
        models = (
            model_of(family, torch.float32),
            model_of(family, dtype),
            served(model_of(family, dtype)),
        )
        assert bool(models[2].changed) == (dtype == torch.bfloat16)
        found = []
        for model in models:
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                parts = IDS.split([70, *(1,) * 20], 1)
                runs.clear()
                found.append(torch.cat([model(part, cache=cache).logits.float() for part in parts], 1))
        assert bool(runs) == bool(models[2].changed), "whole models call the modules in their own way"
        exact, plain, ours = found
        assert (ours - exact).norm() <= most * (plain - exact).norm() + 1e-5 * exact.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_states_are_those_inside_a_pass(family, runs):
    """A pass hands its states over where they are kept; a prompt that goes on from them gives the same bits."""
    model, prompt = served(model_of(family)), [*SYSTEM, 5, 6, 7]
    engine, plain = Engine(model, STEP, MOST), Engine(model, STEP)
    runs.clear()
    taken, first = read(engine, prompt, (203,), 4)
    assert taken == 0 and set(runs[: 2 * len(layers_of(model))]) == {192, 11}
    taken, again = read(engine, prompt, (203,), 4)
    assert taken == 192 and torch.equal(again, read(plain, prompt, (192, 203), 4)[1])
    assert torch.equal(first, read(plain, prompt, (203,), 4)[1]), "blocks of the kernels end where chunks do"


def test_caches_that_keep_more_are_left_to_the_model(runs):
    """As assisted generation does: a cache that records its past, so that tokens can be taken back."""
    model = served(model_of("qwen3_next"))
    layer = layers_of(model)[0]
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    x = torch.randn(1, 6, layer.hidden_size).bfloat16()
    runs.clear()
    with torch.no_grad():
        layer(hidden_states=x, cache=cache)
        assert not runs
        whole = layer(hidden_states=x)  # without a cache
        assert runs == [6]
        cache = DynamicCache(config=model.config)
        layer(hidden_states=x, cache=cache)
        held = cache.layers[layer.layer_idx]
        before = held.recurrent_states[0]
        cache.reorder_cache(torch.tensor([0]))  # as beams do: the cache has other tensors after it
        assert held.recurrent_states[0] is not before
        layer(hidden_states=x[:, :1], cache=cache)
        cache.reset()
        assert torch.equal(layer(hidden_states=x, cache=cache), whole)


def test_a_single_first_token_within_limits_is_the_modules_own(runs):
    """Nemotron-H limits steps in all passes but those of a single token after others."""
    layer = layers_of(served(model_of("nemotron_h")))[0]
    cache = DynamicCache(config=layer.config)
    x = torch.randn(1, 1, layer.hidden_size).bfloat16()
    runs.clear()
    with torch.no_grad():
        layer(x)
        layer(x, cache=cache)
        assert not runs
        layer(x, cache=cache)
    assert runs == [1]


def test_a_layer_with_hooks_or_adapters_runs_its_own_code(runs):
    model = served(model_of("qwen3_next"))
    layer = layers_of(model)[0]
    x = torch.randn(1, 3, layer.hidden_size).bfloat16()
    runs.clear()
    seen = []
    hook = layer.norm.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        layer(hidden_states=x)
    hook.remove()
    assert seen and not runs
    layer.in_proj_ba = nn.Linear(layer.hidden_size, layer.in_proj_ba.out_features, bias=False).bfloat16()
    assert layer(hidden_states=x).requires_grad and not runs
    with torch.no_grad():
        layer.A_log.data = layer.A_log.data.clone()
        layer(hidden_states=x)
        assert not runs


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_next", "A_log"), ("nemotron_h", "dt_bias"), ("granitemoehybrid", "D")]
)
def test_a_layer_whose_numbers_were_changed_in_place_runs_its_own_code(family, name, runs):
    """Also if torch does not count the change: the kernel has what followed from the old ones."""
    layer = layers_of(served(model_of(family)))[0]
    x = torch.randn(1, 3, layer.hidden_size).bfloat16()
    runs.clear()
    layer(hidden_states=x)
    assert runs.pop() and not runs
    getattr(layer, name).data.add_(1)
    layer(hidden_states=x)
    assert not runs


class Louder(code.Qwen3NextGatedDeltaNet):
    """Reads no name that the kernel does not know, and computes something else."""

    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        return super().forward(hidden_states=hidden_states, cache=cache, attention_mask=attention_mask, **kwargs) * 1.1


def test_code_that_differs_stays(monkeypatch):
    """Planted: results a tenth too large, and a state whose decay is another."""
    model = model_of("qwen3_next")
    Louder.forward.__code__ = Louder.forward.__code__.replace(
        co_names=(*Louder.forward.__code__.co_names, *linear_attention.NEEDED)
    )
    monkeypatch.setattr(linear_attention, "KNOWN", linear_attention.KNOWN | {"super", "forward"})
    for layer in layers_of(model):
        layer.__class__ = Louder
    assert not serve_linear_attention(model)
    for layer in layers_of(model):
        layer.__class__ = code.Qwen3NextGatedDeltaNet
    rule = code.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(code, "torch_recurrent_gated_delta_rule", lambda *a, g, **more: rule(*a, g=1.5 * g, **more))
    assert not serve_linear_attention(model)
    monkeypatch.undo()
    assert serve_linear_attention(model) == {"Qwen3NextGatedDeltaNet": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "kimi_linear"])
def test_one_token_on_a_gpu(family, dtype, monkeypatch):
    """Results and states have the errors of the modules' own code. Single tokens alone are launched; nothing waits.

    A hook on what the launches read leaves the modules their own code, to the bit.
    """
    kernels(monkeypatch)
    ran, run = [], GpuDelta.run
    monkeypatch.setattr(GpuDelta, "run", lambda *given: ran.append(len(given[2])) or run(*given))
    exact, plain, ours = (model_of(family, kind) for kind in (torch.float64, dtype, dtype))
    layers = layers_of(ours)
    assert serve_gpu_linear_attention(ours) == {type(layers[0]).__name__: len(layers)}
    ran.clear()
    steps = (9, 1, 1, 1, 4, 1)
    mask = torch.ones(2, steps[0], dtype=torch.bool)
    mask[1, :3] = False
    with torch.no_grad():
        found = [outputs(m, steps, mask) for m in (exact, plain, ours)]
        assert ran == [2] * 4 * len(layers)
        held = [torch.cat([t.recurrent_states[0].flatten() for t in states_of(cache)]) for _, cache in found]
        x = torch.randn(2, 1, layers[0].hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
        cache = found[2][1]
        at = [(t.conv_states[0].data_ptr(), t.recurrent_states[0].data_ptr()) for t in states_of(cache)]
        with recording() as made:
            for layer in layers:
                layer(hidden_states=x, cache=cache)
        assert made.broken == [] and made.count()["triton:_delta"] == made.count()["triton:_convolve"] == len(layers)
        assert at == [(t.conv_states[0].data_ptr(), t.recurrent_states[0].data_ptr()) for t in states_of(cache)]
        for layer in layers:
            layer.conv1d.register_forward_hook(lambda *_: None)
        assert torch.equal(outputs(ours, steps, mask)[0], outputs(plain, steps, mask)[0])
    results = [made for made, _ in found]
    for right, other, got in (results, held):
        assert (got - right).norm() <= 1.2 * (other - right).norm() + 1e-5 * right.norm()


def states_of(cache):
    """The layers of a cache that have a state."""
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
