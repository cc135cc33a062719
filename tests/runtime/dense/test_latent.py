"""Attention over latents: the errors of the family's own code, whatever the map is, and what is left to that code."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import random_model
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)

from moepack.pack.spec import Matrix, Version
from moepack.runtime.dense import linears
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.latent import MAP, LatentMap, Latents, serve_latents
from moepack.runtime.dense.packed import PackedLinear
from moepack.runtime.kernels import trial
from moepack.runtime.kv import latents
from moepack.runtime.step.context import Step, opened

PARTS = (9, 1, 1, 3, 1, 40)  # tokens of successive passes
LENGTH = sum(PARTS)


def attention(name, dtype):
    """A random model of one layer of DeepSeek-V3, whose latents have 32 numbers for 4 heads of 16 and 16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32}
    heads = {"qk_nope_head_dim": 16, "v_head_dim": 16, "qk_rope_head_dim": 16}
    model = random_model("deepseek_v3", dtype, num_hidden_layers=1, **sizes, **heads)[0].eval()
    if name == "plain":
        return model
    module = model.model.layers[0].self_attn
    found = module.kv_b_proj
    matrix, version = Matrix("kv_b", found.out_features, found.in_features, False), Version.of(name, 32)
    made = PackedLinear(matrix, version)
    made.packed = trial.extent_of(version, matrix, np.random.default_rng(0))
    made.group = linears.Group([linears.PackedMatrix(matrix, version, made.packed)])
    module.kv_b_proj = made
    return model


def passes(model, x, mask=None):
    """What the layer's attention makes of successive parts of x [batch, LENGTH, hidden]; `mask` is of all tokens."""
    module, cache, out, at = model.model.layers[0].self_attn, DynamicCache(config=model.config), [], 0
    places = torch.arange(LENGTH).repeat(len(x), 1)
    for n in PARTS:
        part = slice(at, at + n)
        at += n
        seen = None
        if mask is not None or n > 1:
            seen = torch.ones(n, at, dtype=torch.bool).tril_(at - n).repeat(len(x), 1, 1, 1)
        if mask is not None:
            seen = seen & mask[:, None, None, :at]
        turn = model.model.rotary_emb(x, places[:, part])
        with torch.no_grad():
            out.append(module(x[:, part].contiguous(), position_embeddings=turn, attention_mask=seen, cache=cache)[0])
    return torch.cat(out, dim=1)


class Counted:
    """Counts attention over latents as they are, and over those that are expanded for some heads at a time."""

    def __init__(self, monkeypatch):
        self.absorbed = self.expanded = 0
        attend, by_heads = Latents.attend, Latents.by_heads

        def counted(of, *given):
            made = attend(of, *given)
            self.absorbed += made is not None
            return made

        def apart(of, *given):
            self.expanded += 1
            return by_heads(of, *given)

        monkeypatch.setattr(Latents, "attend", counted)
        monkeypatch.setattr(Latents, "by_heads", apart)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["plain", "w8", "w4"])
def test_errors_are_those_of_rounding(name, dtype, padded, monkeypatch):
    """Beside float64, no more than 1.2 times the errors of the family's own code: alone, and with a padded sequence."""
    monkeypatch.setattr(latents, "EXPANDED", 1 << 13)  # bytes: two heads or fewer at a time
    own = attention(name, dtype)
    exact = copy.deepcopy(own)
    if name != "plain":
        found = exact.model.layers[0].self_attn.kv_b_proj
        made = nn.Linear(found.in_features, found.out_features, bias=False)
        made.weight.data = found.weights(torch.float32)
        exact.model.layers[0].self_attn.kv_b_proj = made
    exact = exact.double()
    served = attention(name, dtype)
    serve_attention(served)
    assert serve_latents(served) == {"DeepseekV3Attention": 1}
    x = torch.randn(1 + padded, LENGTH, 64).to(dtype)
    mask = None
    if padded:
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        mask[1, :4] = False
    shown = slice(4 * padded, None)  # what a token before a sequence's first makes is nobody's
    ran = Counted(monkeypatch)
    wanted, plain, got = (passes(of, x.to(of.dtype), mask)[:, shown].double() for of in (exact, own, served))
    few = served.model.layers[0].self_attn._moepack_latent.most_absorbed(16)
    assert 9 <= few < 40 and (ran.absorbed, ran.expanded) == (5, 1)
    errors = [float((made - wanted).square().mean().sqrt()) for made in (got, plain)]
    assert errors[0] <= 1.2 * errors[1] + 1e-7 * float(wanted.abs().max()), errors


def test_packed_maps_expand_float16_latents_inside_their_memory():
    """The fault: weights were unpacked as float32 into a tile of float16, past its end."""
    module = attention("w4", torch.float16).model.layers[0].self_attn
    of = LatentMap(module)
    room = torch.zeros(2, 32, 128, dtype=torch.float16)
    with pytest.raises(ValueError, match="float32 or bfloat16, not"):
        module.kv_b_proj.group.matrices((0,)).unpack(0, room[0], 0, 1)
    held = Latents(module, of, torch.randn(1, 1, 40, 32).half(), torch.randn(1, 1, 40, 16).half())
    query = torch.randn(1, 4, 40, 32).half()
    with torch.no_grad():
        wanted = sdpa_attention_forward(module, query, *held.expanded(), None, scaling=0.1)[0]
        made = held.by_heads(sdpa_attention_forward, module, query, None, {"scaling": 0.1})
    assert (made - wanted).abs().max() <= 2**-9 * wanted.abs().max()


def test_a_layer_that_expands_otherwise_keeps_its_own_code(monkeypatch):
    """The fault: one family's arithmetic taken for another's by the names of its parts."""
    model = attention("plain", torch.bfloat16)
    kind = type(model.model.layers[0].self_attn)
    plain = kind.expand_kv

    def expand_kv(self, latents, turned):
        keys, values = plain(self, latents, turned)
        return keys, 1.1 * values

    monkeypatch.setattr(kind, "expand_kv", expand_kv)
    serve_attention(model)
    assert serve_latents(model) == {}


def test_what_is_left_to_the_familys_code(monkeypatch):
    """Gradients, another map and hooks on it see expanded keys and values; so does who watches, at no change."""
    model = attention("plain", torch.bfloat16)
    own = attention("plain", torch.bfloat16)
    serve_attention(own)
    serve_attention(model)
    serve_latents(model)
    module = model.model.layers[0].self_attn
    x = torch.randn(1, LENGTH, 64).bfloat16()
    ran = Counted(monkeypatch)

    def is_plain():
        ran.absorbed = ran.expanded = 0
        same = torch.equal(passes(model, x), passes(own, x))
        return same and ran.absorbed == ran.expanded == 0

    assert not is_plain() and ran.absorbed == 5
    unwatched = passes(model, x)
    keys = []
    with opened(Step(importance=SimpleNamespace(saw=lambda *call: keys.append(torch.cat([*call[2]], 1))))):
        assert torch.equal(passes(model, x), unwatched)
    assert keys and all(key.shape[1] == module.num_heads > 1 for key in keys)
    hook = module.kv_b_proj.register_forward_hook(lambda *_: None)
    assert is_plain()
    hook.remove()
    weight = module.kv_b_proj.weight
    module.kv_b_proj.weight = nn.Parameter(weight.detach().clone())
    assert is_plain()
    module.kv_b_proj.weight = weight
    assert not is_plain()
    held = torch.randn(1, 1, 3, 32).bfloat16(), torch.randn(1, 1, 3, 16).bfloat16()
    assert all(isinstance(t, Tensor) for t in module.expand_kv(*held)), "the map's gradient may be wanted"
    copied = copy.deepcopy(module)
    with torch.no_grad():
        assert isinstance(module.expand_kv(*held)[0], Latents)
        assert isinstance(copied.expand_kv(*held)[0], Tensor), "a copy's map is not where the kernels read"


def test_maps_that_are_no_plain_matrix_are_refused():
    module = attention("plain", torch.bfloat16).model.layers[0].self_attn
    assert LatentMap(module)._kernel() is not None
    module.v_head_dim = 24
    with pytest.raises(ValueError, match=MAP):
        LatentMap(module)


def test_a_layer_without_an_order_of_tokens_sees_all():
    """The fault: what transformers reads of the module where the call does not say it."""
    own, served = attention("plain", torch.bfloat16), attention("plain", torch.bfloat16)
    serve_attention(served)
    serve_latents(served)
    x = torch.randn(1, 6, 64).bfloat16()
    turn = own.model.rotary_emb(x, torch.arange(6)[None])
    made = []
    for model in (own, served):
        module = model.model.layers[0].self_attn
        module.is_causal = False
        with torch.no_grad():
            made.append(module(x, position_embeddings=turn, attention_mask=None)[0])
    assert (made[0] - made[1]).abs().max() <= 2**-6 * made[0].abs().max()


def test_a_static_caches_room_is_not_expanded(monkeypatch):
    """The fault: at a prompt, keys and values of all heads were made of the whole cache, beside every budget."""
    model = attention("plain", torch.bfloat16)
    serve_attention(model)
    serve_latents(model)
    ran = Counted(monkeypatch)
    ids = torch.arange(40)[None]
    made = []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=200)):
        with torch.no_grad():
            made.append(model(input_ids=ids, past_key_values=cache).logits)
    assert torch.equal(*made) and ran.expanded == 2
