"""Attention to the keys that an indexer chose: transformers' own results, and only those keys read."""

import copy

import pytest
import torch
from tiny_models import INDEXED, random_model
from transformers import DynamicCache

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)

from moepack.runtime.dense import borrowed, latent
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.latent import serve_latents
from moepack.runtime.kv.growing import GrowingLayer, grow_in_place

FEW = 8  # keys that a token sees
LATENT = {**INDEXED, "index_topk": FEW}
DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3}
BLOCKS = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2}
FAMILIES = {
    "deepseek_v32": LATENT,
    "glm_moe_dsa": {**LATENT, **DENSE, "indexer_types": ["full", "shared", "full"]},
    "dots3_note_text": {
        **LATENT,
        **DENSE,
        "layer_types": ["indexed_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "minimax_m3_vl_text": {
        **DENSE,
        **BLOCKS,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        "num_local_experts": 4,
    },
}
PASSES = (5, 1, 1, 1, 9, 1, 1, 3, 1, 40, 1, 2, 1)  # tokens: below, at and beyond the keys that a token sees


def models(family, dtype):
    """A random model of a family, and the same with the kernels' attention."""
    own = random_model(family, dtype, **FAMILIES[family])[0]
    served = copy.deepcopy(own)
    serve_attention(served)
    serve_latents(served)
    return own, served


class Reads:
    """Records how many keys each token of a pass reads, where it reads chosen ones alone."""

    def __init__(self, monkeypatch):
        self.keys = []
        plain = latent.over_seen

        def over_seen(attend, asked, held, seen):
            def counted(queries, keys):
                self.keys.append(keys[0].shape[2])
                return attend(queries, keys)

            return plain(counted, asked, held, seen)

        for module in (latent, borrowed):
            monkeypatch.setattr(module, "over_seen", over_seen)


def passes(module, turned, x, hidden):
    """What an attention module makes of successive parts of x [batch, length, hidden], of keys not hidden."""
    cache, at, out = DynamicCache(config=module.config), 0, []
    for n in PASSES:
        part = slice(at, at + n)
        at += n
        mask = torch.ones(n, at, dtype=torch.bool).tril_(at - n).repeat(len(x), 1, 1, 1)
        mask &= ~hidden[:, None, None, :at]
        turn = [of[:, part] for of in turned]
        places = torch.arange(part.start, at)[None]
        with torch.no_grad():
            out.append(module(x[:, part], turn, mask, cache=cache, position_ids=places)[0])
        grow_in_place(cache, 0)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("padded", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"])
def test_results_are_the_familys_own(family, dtype, padded, monkeypatch):
    """Of two sequences, one behind padding. Both sides choose the same keys: the same code does, of one input."""
    own, served = models(family, dtype)
    number = 1 if family == "minimax_m3_vl_text" else 0
    x = torch.randn(2, sum(PASSES), 64).to(dtype)
    hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
    hidden[1, :padded] = True
    turned = own.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    reads = Reads(monkeypatch)
    wanted, got = (passes(m.model.layers[number].self_attn, turned, x, hidden)[:, padded:] for m in (own, served))
    close = 2**-6 if dtype == torch.bfloat16 else 1e-5
    assert (got - wanted).abs().max() <= close * wanted.abs().max()
    assert max(reads.keys, default=FEW) == FEW
    if number == 0:
        beyond = sum(n for i, n in enumerate(PASSES) if n < 40 and sum(PASSES[: i + 1]) * 0.75 >= FEW)
        assert len(reads.keys) == 2 * beyond, "each token of short passes beyond reads its own keys"
    else:
        assert bool(reads.keys) == (dtype == torch.bfloat16)


def test_heads_that_share_keys_but_see_other_ones_are_transformers_own(monkeypatch):
    """The fault: the first head's keys taken for all of its group."""
    own, served = models("minimax_m3_vl_text", torch.bfloat16)
    module = served.model.layers[1].self_attn
    reads = Reads(monkeypatch)
    query, key = torch.randn(1, 4, 1, 16).bfloat16(), torch.randn(1, 2, 40, 16).bfloat16()
    mask = torch.full((1, 4, 1, 40), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    mask[..., 3:9] = 0
    table = type(module).forward.__wrapped__.__globals__[borrowed.REGISTRY]
    attention = table.get_interface("sdpa", None)
    plain = own.model.layers[1].self_attn
    for change in (False, True):
        if change:
            mask[:, 1, :, 20] = 0
        reads.keys.clear()
        wanted = borrowed.inspect.unwrap(attention)(plain, query, key, key, mask, scaling=0.25)[0]
        got = attention(module, query, key, key, mask, scaling=0.25)[0]
        assert (got - wanted).abs().max() <= 2**-6 * wanted.abs().max()
        assert reads.keys == ([] if change else [6, 6])


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_is_the_familys_own(family, monkeypatch):
    """In float32: padded sequences, beams, and speculation, which crops the cache, over layers of other kinds."""
    own, served = models(family, torch.float32)
    kinds = set()

    def grow(model, args, kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        grow_in_place(cache, 0)
        kinds.update(type(layer) for layer in getattr(cache, "layers", ()))

    served.register_forward_pre_hook(grow, with_kwargs=True)
    tokens = torch.randint(1, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    repeated = tokens[:1, :6].repeat(1, 4)
    reads = Reads(monkeypatch)
    for ids, seen, how in (
        (tokens, mask, {}),
        (tokens, mask, {"num_beams": 3}),
        (repeated, torch.ones_like(repeated), {"prompt_lookup_num_tokens": 3}),
    ):
        given = {"attention_mask": seen, "max_new_tokens": 8, "do_sample": False, **how}
        wanted, got = (model.generate(ids, **given) for model in (own, served))
        assert torch.equal(wanted, got), how
    assert any(issubclass(kind, GrowingLayer) and len(kind.appended) == 3 for kind in kinds)
    assert bool(reads.keys) == (family != "minimax_m3_vl_text"), "whose keys and values are read in BF16 alone"
