"""Queries, keys and values in one call: the bits of the module's own code, in families whose code does just that."""

import inspect

import pytest
import torch
from tiny_models import random_model, serve_linears
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

import moepack

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
from moepack.runtime.dense import borrowed, norms, projections
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.latent import serve_latents
from moepack.runtime.dense.latent_projections import serve_latent_projections
from moepack.runtime.dense.projections import serve_projections
from moepack.runtime.kernels.token_native import LatentProjection, Projection

IDS = torch.randint(1, 60, (1, 9), generator=torch.Generator().manual_seed(0))  # of two, angles would be broadcast
# Families with latents, and the rank of their queries
RANKS = {"deepseek_v2": None, "deepseek_v3": 128, "glm4_moe_lite": 128, "kimi_linear": None}


def served(family, projections, **extra):
    """A random model whose dense half is the kernels'."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if family in RANKS else 4}
    if family in RANKS:
        extra |= {"kv_lora_rank": 128, "q_lora_rank": RANKS[family], "qk_rope_head_dim": 32, "head_dim": 32}
    model, _ = random_model(family, torch.bfloat16, hidden_size=256, **heads, **extra)
    serve_linears(model)
    norms.serve_norms(model)
    serve_attention(model)
    serve_latents(model)
    if projections:
        model.changed = serve_projections(model) | serve_latent_projections(model)
    return model.eval()


def logits(model, ids=IDS):
    """Of a prompt, and of tokens after it one by one."""
    cache, out = DynamicCache(config=model.config), []
    with torch.inference_mode():
        for part in (ids[:, :4], *ids[:, 4:].split(1, 1)):
            out.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
    return out


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "phimoe", "glm4_moe", *RANKS])
def test_logits_keep_their_bits(family, monkeypatch):
    model, plain = served(family, projections=True), served(family, projections=False)
    layers = 1 if family == "kimi_linear" else model.config.num_hidden_layers
    assert sum(model.changed.values()) == layers, model.changed
    kind = LatentProjection if family in RANKS else Projection
    run, ran = kind.run, []
    monkeypatch.setattr(kind, "run", lambda *given: ran.append(1) or run(*given))
    for ids in (IDS, torch.cat((IDS, IDS.flip(1)))):
        for got, wanted in zip(logits(model, ids), logits(plain, ids), strict=True):
            assert torch.equal(got, wanted)
        # The pass of two sequences adds none, because their angles would be broadcast; kimi_linear has none
        assert len(ran) == 6 * layers or (family == "kimi_linear" and len(ran) > 6)


SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]


def test_layers_of_two_kinds():
    """Two layers slide and rotate, the one between does neither. After one trial for the class, all would rotate."""
    of = {"num_hidden_layers": 3, "layer_types": SLIDES, "sliding_window": 4, "mlp_only_layers": []}
    of |= {"vocab_size": 64, "num_experts": 4, "intermediate_size": 64}
    model, plain = (served("flint", projections, **of) for projections in (True, False))
    assert model.changed == {"FlintAttention": 2}
    assert ["_moepack_projection" in vars(layer.self_attn) for layer in model.model.layers] == [True, False, True]
    for got, wanted in zip(logits(model), logits(plain), strict=True):
        assert torch.equal(got, wanted)


def test_weights_of_zeros_prove_nothing(monkeypatch):
    """Zeros are the same by whichever angles: a first layer of such weights let the kernel have all the others."""
    model = served("qwen3_moe", projections=False, num_hidden_layers=3)
    first, rotate = model.model.layers[0].self_attn, apply_rotary_pos_emb
    for name in ("q_proj", "k_proj"):
        getattr(first, name).weight.data.zero_()
    names = inspect.unwrap(type(first).forward).__globals__
    monkeypatch.setitem(names, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, sin, cos))
    assert serve_projections(model) == {}


def test_other_angles_than_those_of_the_trial():
    """Half as many: the kernel would read past their end, so the module's own code runs, and it fails as ever."""
    model = served("qwen3_moe", projections=True)
    attention, (x, turn) = model.model.layers[0].self_attn, turned(model)
    place, half = attention._moepack_projection, tuple(t[..., : t.shape[-1] // 2].contiguous() for t in turn)
    assert projections._fits(x, turn, place) and not projections._fits(x, half, place)


def test_whoever_changes_a_map_or_a_norm_gets_the_modules_own_code(bundle):
    """A hook, another module, another forward, and other weights in place of a map's."""
    model = moepack.load(bundle, policy="static:bf16", dtype=torch.bfloat16)
    attention = model.model.layers[0].self_attn
    assert attention._moepack_projection.holds(attention)
    seen = []
    hook = attention.k_proj.register_forward_hook(lambda module, given, out: seen.append(out))
    logits(model)
    assert len(seen) == 6
    hook.remove()
    logits(model)
    assert len(seen) == 6 and attention._moepack_projection.holds(attention)
    plain = [x.clone() for x in logits(model)]
    own = attention.q_proj
    attention.q_proj = torch.nn.Linear(own.in_features, own.out_features, bias=False, dtype=torch.bfloat16)
    attention.q_proj.weight.data = own.weight.data.roll(1, 0)
    assert not torch.equal(logits(model)[-1], plain[-1])
    attention.q_proj = own
    assert torch.equal(logits(model)[-1], plain[-1])
    own.weight.data = own.weight.data.roll(1, 0)
    assert not torch.equal(logits(model)[-1], plain[-1])


def test_a_step_that_the_kernel_lacks(monkeypatch):
    """Code that reads another name, or computes something else by the known ones, stays."""
    modeling = modeling_qwen3_moe
    kind, rotate = modeling.Qwen3MoeAttention, modeling.apply_rotary_pos_emb
    borrowed._attention.cache_clear()  # its classes keep the function
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, sin, cos))
        assert served("qwen3_moe", projections=True).changed == {}
    borrowed._attention.cache_clear()

    class Clipped(kind):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states.clamp(-1, 1), **kwargs)

    monkeypatch.setattr(modeling, "Qwen3MoeAttention", Clipped)
    assert served("qwen3_moe", projections=True).changed == {}


def turned(model, tokens=3):
    """Random hidden states, and their angles."""
    x = torch.randn(1, tokens, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x, model.model.rotary_emb(x, torch.arange(tokens)[None])


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "q_norm"])
def test_weights_that_learn_get_gradients(name):
    model = served("qwen3_moe", projections=True).requires_grad_(False)
    attention = model.model.layers[0].self_attn
    weight = getattr(attention, name).weight.requires_grad_()
    x, turn = turned(model)
    attention(hidden_states=x, position_embeddings=turn, attention_mask=None)[0].float().square().sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_a_hook_on_all_modules_sees_the_maps():
    model, seen = served("qwen3_moe", projections=True), []
    hook = register_module_forward_hook(lambda module, given, out: seen.append(module))
    try:
        logits(model)
    finally:
        hook.remove()
    assert seen.count(model.model.layers[0].self_attn.k_proj) == 6


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_those_of_the_modules_own_code(family):
    """Of several tokens: the module normalises a part of wider rows. And what it is told after loading counts."""
    model = served(family, projections=True)
    attention = model.model.layers[0].self_attn
    place = attention._moepack_projection
    tokens = min(8, place.most)  # torch multiplies more, with other bits
    for seed in range(40):
        x = torch.randn(1, tokens, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
        positions = torch.arange(tokens)[None]
        with torch.inference_mode():
            turn = model.model.rotary_emb(x, positions)
            held = attention.kv_a_proj_with_mqa(x)
            _, latent, _ = place.projection.run(x, turn)
            assert torch.equal(latent[:, 0], attention.kv_a_layernorm(held[..., :128]))
    assert place.follows(attention) and place.takes(turn, tokens)
    if family == "deepseek_v2":
        assert not place.takes(turn.conj(), tokens)
    attention.config.rope_interleave = not getattr(attention.config, "rope_interleave", True)
    assert not place.follows(attention)
