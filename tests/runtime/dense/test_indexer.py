"""An indexer's scores by the kernel: the sums of float64, the keys that the family's own code chooses, its cache."""

import copy

import pytest
import torch
from tiny_models import INDEXED, random_model
from transformers import DynamicCache

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)

from expert_layers import native

from moepack.runtime.dense import indexer
from moepack.runtime.dense.indexer import serve_indexers
from moepack.runtime.kernels.dense_native import index_scores

MOST = 32  # keys that are chosen
SIZES = {**INDEXED, "index_topk": MOST, "num_hidden_layers": 1}
PARTS = (20, 1, 15, 1, 1, 7, 40, 1, 3)  # tokens of successive passes


@pytest.mark.parametrize("level", range(native.use_level() + 1))
@pytest.mark.parametrize("sizes", [(1, 1, 64, 128, 1000), (2, 3, 5, 24, 300), (1, 2, 8, 32, 131), (2, 1, 3, 40, 7)])
def test_scores_are_those_of_float64(level, sizes):
    """Of whole strips of keys and parts of one, and of heads and columns that fill no vector."""
    batch, tokens, heads, cols, length = sizes
    torch.manual_seed(0)
    query = torch.randn(batch, tokens, heads, cols).bfloat16()
    key = torch.randn(batch, length + 1, cols).bfloat16()[:, 1:]
    weights = torch.randn(batch, tokens, heads)
    products = torch.einsum("bthc,blc->bthl", query.double(), key.double()).relu()
    wanted = torch.einsum("bth,bthl->btl", weights.double(), products)
    most = torch.einsum("bth,bthl->btl", weights.double().abs(), products).max()
    native.use_level(level)
    try:
        got = index_scores(query, key, weights)
    finally:
        native.use_level()
    assert (got - wanted).abs().max() <= 1e-6 * most


def test_scores_of_other_shapes_are_refused():
    query, key, weights = torch.randn(1, 2, 4, 32).bfloat16(), torch.randn(1, 9, 32).bfloat16(), torch.randn(1, 2, 4)
    for wrong in ((query, key[..., :16], weights), (query, key, weights.bfloat16()), (query.float(), key, weights)):
        with pytest.raises(ValueError, match="do not fit"):
            index_scores(*wrong)


def choices(module, turned, x, low, hidden):
    """The keys that an indexer chooses in successive parts of x, and its keys in the cache."""
    cache, at, out = DynamicCache(config=module.config), 0, []
    for n in PARTS:
        part = slice(at, at + n)
        at += n
        mask = torch.ones(n, at, dtype=torch.bool).tril_(at - n).repeat(len(x), 1, 1) & ~hidden[:, None, :at]
        turn = [of[:, part] for of in turned]
        chosen = module(x[:, part], low[:, part], turn, mask, None, cache=cache)
        assert chosen.dtype == torch.int32
        seen = torch.zeros(mask.shape, dtype=torch.bool).scatter_(-1, chosen.long(), True) & mask
        out += [set(keys.nonzero().flatten().tolist()) for row in seen for keys in row]
    return out, cache.layers[0].indexer_keys


@pytest.mark.parametrize("angles", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2"])
def test_chosen_keys_are_the_familys_own(family, angles, monkeypatch):
    """Two sequences, one behind padding; of all keys one in a hundred, with nearly equal scores, may be another.

    A family that rotates by float32 keeps keys of float32, which its own code reads.
    """
    model = random_model(family, torch.bfloat16, **SIZES)[0]
    own = model.model.layers[0].self_attn.indexer
    served = copy.deepcopy(own)
    assert serve_indexers(served) == {type(own).__name__: 1}
    calls = []
    scores = index_scores
    monkeypatch.setattr(indexer, "index_scores", lambda *given: calls.append(given[0].shape[1]) or scores(*given))
    length = sum(PARTS)
    x, low = torch.randn(2, length, 64).bfloat16(), torch.randn(2, length, 32).bfloat16()
    hidden = torch.zeros(2, length, dtype=torch.bool)
    hidden[1, :5] = True
    turned = model.model.rotary_emb(x.to(angles), torch.arange(length)[None])
    (wanted, kept), (got, ours) = (choices(of, turned, x, low, hidden) for of in (own, served))
    assert torch.equal(ours, kept)
    few = [15, 1, 1, 7, 1, 3]  # beyond the keys that all are chosen of
    assert calls == (few if angles == torch.bfloat16 else [])
    assert [len(keys) for keys in got] == [len(keys) for keys in wanted]
    assert sum(len(a - b) for a, b in zip(got, wanted, strict=True)) <= 0.01 * sum(map(len, wanted))


def test_an_indexer_that_computes_otherwise_keeps_its_own_code(monkeypatch):
    module = random_model("deepseek_v32", torch.bfloat16, **SIZES)[0].model.layers[0].self_attn.indexer
    kind = type(module)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, *args, **given: plain(self, 2 - x, *args, **given))
    assert serve_indexers(module) == {}
    monkeypatch.undo()
    assert serve_indexers(random_model("deepseek_v32", torch.float32, **SIZES)[0]) == {}
