"""Skeletons of models that convert modules as they make them, or pick elements by a mask."""

from types import SimpleNamespace

import pytest
import tiny_models
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from benchmarks import families
from moepack.calibrate.experts import describe, is_experts_module
from moepack.families.arguments import cache_in
from moepack.families.model_class import model_of
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.latent import serve_latents
from moepack.runtime.experts import backends
from moepack.runtime.kv import growing, latents
from moepack.runtime.kv.sizes import cache_bytes
from moepack.runtime.planning import measure
from moepack.runtime.planning.measure import _measure
from moepack.runtime.planning.options import Workload
from moepack.runtime.planning.outputs import Outputs
from moepack.runtime.planning.skeleton import LiveBytes, Probe, skeleton

TINY = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")


def described(model):
    """A model's layers of experts."""
    found = [(n, m) for n, m in model.named_modules() if is_experts_module(m)]
    return [describe(i, n, m) for i, (n, m) in enumerate(found)]


@pytest.mark.parametrize("name", [*TINY, "glm5_next", "hy_v4", "mistral_large4"])
def test_kv_bytes_are_those_of_real_caches(name):
    """Full attention, MLA, a window of 32 tokens, linear attention's states, an indexer's keys, pooled ones, and layers
    that keep no keys of their own: to the byte, at every length, in passes of up to 70 tokens."""
    torch.manual_seed(0)
    config = tiny_models.config_of(name, {}) if name in TINY else families.small(name)
    model = model_of(config, dtype=torch.bfloat16).eval()
    layers = described(model)
    made, mode = skeleton(config, torch.bfloat16)
    shape = Probe(made, layers, torch.device("cpu"), mode).kv_shape(70)
    assert dict(made.named_parameters()).keys() == dict(model.named_parameters()).keys()
    counters = 8 if name == "gpt_oss" else 0  # one counter for all sequences, counted for each
    for tokens in (8, 21, 31, 32, 33, 70):
        with torch.no_grad():
            cache = cache_in(model(input_ids=torch.arange(1, tokens + 1).repeat(2, 1), use_cache=True))
        assert shape.bytes(tokens, 2) == cache_bytes(cache) + counters
    if name == "gpt_oss":  # of its two layers one has the window
        with torch.no_grad():
            for _ in range(3):
                cache = model(torch.arange(1, 71).repeat(2, 1), past_key_values=cache, use_cache=True).past_key_values
        assert shape.bytes(4 * 70, 2) == cache_bytes(cache) + counters
        assert shape.bytes(2000) - shape.bytes(1000) == 1000 * shape.token_bytes // 2
    size = shape.bytes(40, 3)
    assert shape.bytes(0) == 0 and shape.tokens(size, 3, 1000) == 40 and shape.tokens(size - 1, 3, 1000) == 39


def test_a_mask_picks_all_where_values_are_unknown():
    with FakeTensorMode(), LiveBytes(torch.nn.Module()) as live:
        x, mask = torch.empty(4, 6, 3), torch.empty(4, 6, dtype=torch.bool)
        assert x[mask].shape == (24, 3) and x[:, mask[0]].shape == (4, 6, 3) and x[mask[:, 0], :2].shape == (4, 2, 3)
        before = live.now
        picked = x[mask]
        assert live.now - before == picked.numel() * 4
    with LiveBytes(torch.nn.Module()):
        assert torch.arange(4)[torch.tensor([True, False, True, False])].tolist() == [0, 2]


@pytest.mark.skipif(not backends.library(), reason="rows are coded by the compiled kernels")
def test_numbers_of_coded_rows_are_memory():
    """Those that an operation reads of them, as attention of float32 does of a whole cache."""
    from moepack.runtime.kernels.kv_rows import CodedRows

    rows = growing.coded(torch.randn(1, 2, 500, 32), 8)
    with LiveBytes(torch.nn.Module()) as live:
        total = CodedRows(rows, 32, 8, torch.float32).sum()
    assert total.numel() == 1 and live.peak >= 1000 * 32 * 4 > live.now


@pytest.mark.parametrize(("family", "kept"), [("gpt_oss", 5), ("glm4_moe", 3)])
def test_leaving_out_repeated_layers_changes_no_byte(family, kept, monkeypatch):
    """What a prompt and a token take, at a short and a long cache: of five layers, and of those that differ."""
    every = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
    config = tiny_models.config_of(family, {"num_hidden_layers": 5, **(every if family == "gpt_oss" else {})})
    bundle = SimpleNamespace(layers=described(skeleton(config, torch.bfloat16)[0]), manifest=SimpleNamespace(dense=()))
    monkeypatch.setattr(measure, "_in_file", lambda model, bundle: 0)
    numbers = []
    shorten = Probe.shorten

    def counted(self):
        shorten(self)
        numbers.append(len(self.model.model.layers))

    made = []
    for instead in (counted, lambda self: None):
        monkeypatch.setattr(Probe, "shorten", instead)
        asked = Workload(kv_tokens=100, prefill_tokens=24, batch=2)
        made.append(_measure(bundle, config, torch.bfloat16, torch.device("cpu"), asked, (), False))
    assert made[0] == made[1] and numbers == [kept]


def attending(family, shared, dtype):
    """A model of 16 heads, its layers of experts, and its skeleton."""
    config = tiny_models.config_of(family, {"num_attention_heads": 16, "num_key_value_heads": shared})
    torch.manual_seed(0)
    model = model_of(config, dtype=dtype).eval()
    return model, described(model), *skeleton(config, dtype)


@pytest.mark.parametrize(
    ("family", "tokens", "kv", "batch"),
    [("deepseek_v2", 4, "8", 3), ("deepseek_v2", 48, "16", 1), ("qwen3_moe", 4, "16", 3), ("qwen3_moe", 48, "8", 1)],
)
def test_attention_is_counted_as_it_is_served(family, tokens, kv, batch, monkeypatch):
    """The fault: a budget held back keys and values of all heads, of which some heads' are made at a time."""
    monkeypatch.setattr(latents, "EXPANDED", 1 << 18)
    context = 700
    shared = {"deepseek_v2": 16, "qwen3_moe": 2}
    device = torch.device("cpu")
    model, layers, made, mode = attending(family, shared[family], torch.bfloat16)
    own = Probe(made, layers, device, mode, kv, own=True).headroom([tokens, 1], batch, context)
    counted = Probe(made, layers, device, mode, kv).headroom([tokens, 1], batch, context)
    assert serve_attention(model)
    assert bool(serve_latents(model)) == (family == "deepseek_v2")
    taken = Probe(model, layers, device, kv=kv).headroom([tokens, 1], batch, context)
    assert taken[0] <= counted[0] <= 0.6 * own[0]
    assert taken[1] <= counted[1] <= own[1]


@pytest.mark.parametrize(
    ("family", "shared", "dtype", "kernels"),
    [("deepseek_v2", 16, torch.float16, "on"), ("qwen3_moe", 2, torch.bfloat16, "off")],
)
def test_attention_without_kernels_is_counted_as_its_own(family, shared, dtype, kernels, monkeypatch):
    """The faults: latents of a dtype that no kernel takes, and one token with kernels off, were counted as served."""
    monkeypatch.setenv(backends.DENSE, kernels)
    device = torch.device("cpu")
    model, layers, made, mode = attending(family, shared, dtype)
    counted = Probe(made, layers, device, mode).headroom([48, 1], 2, 700)
    if kernels == "on":
        assert serve_attention(model) and not serve_latents(model)
    taken = Probe(model, layers, device).headroom([48, 1], 2, 700)
    assert taken[0] <= counted[0] and taken[1] <= counted[1]


def heads(config):
    head = SimpleNamespace(out_features=32)
    model = SimpleNamespace(config=config, dtype=torch.bfloat16, get_output_embeddings=lambda: head)
    return Outputs.of(model, 8, all_logits=False).heads


def test_the_heads_of_layers_that_differ_are_the_most():
    """transformers refuses to read a number that layers have of their own, and with it went any budget."""
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, num_attention_heads=4)
    assert heads(config) == 4
    config.per_layer_config = {1: {"num_attention_heads": 6}}
    assert heads(config) == 6
