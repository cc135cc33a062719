"""Caches that append in place: the values of transformers' own, whatever else happens to them, and their bytes."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import PATIENCE
from torch import Tensor
from transformers import Gemma3TextConfig
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseCacheLayer

from moepack.runtime.experts import backends
from moepack.runtime.kv.forms import PLAIN
from moepack.runtime.kv.growing import INDEXERS, SPARE, GrowingLayer, coded, grow_in_place, growth
from moepack.runtime.kv.sizes import cache_bytes

HEADS, COLS = 2, 8
TOKEN = 2 * HEADS * COLS * 2  # bytes of one token's keys and values
OPS = st.lists(
    st.sampled_from(("one", "one", "one", "some", "crop", "reorder", "copy", "deepcopy", "reset", "swap", "mode"))
)


def states(number, tokens):
    made = torch.randn(2, 2, HEADS, tokens, COLS, generator=torch.Generator().manual_seed(number)).bfloat16()
    return made[0], made[1]


def append(cache, number, tokens, layer=0):
    """Append a pass's keys and values, and those of an indexer where the layer keeps such; return the latter."""
    keys, values = states(number, tokens)
    cache.update(keys, values, layer)
    if hasattr(cache.layers[layer], "update_indexer"):
        return cache.update_indexer(keys[:, 0], layer)
    if hasattr(cache.layers[layer], "update_index"):
        return cache.layers[layer].update_index(keys[:, :1].clone())
    return None


def filled(tokens, layers=1, bits=(), kind=DynamicLayer):
    cache = DynamicCache()
    cache.layers = [kind() for _ in range(layers)]
    grow_in_place(cache, 0, bits)
    for layer in range(layers):
        append(cache, layer, tokens, layer)
    return cache


def indexers(layer):
    """An indexer's keys in a layer, if any."""
    held = [getattr(layer, name, None) for name in INDEXERS.values()]
    return [keys for keys in held if keys is not None]


FORMS = ((), ((8, 8),), ((4, 8),), ((16, 4),))
INDEXED = (DynamicIndexedLayer, MiniMaxM3VLSparseCacheLayer)
KINDS = [(kind, ()) for kind in (DynamicLayer, *INDEXED)]
KINDS += [(DynamicLayer, bits) for bits in FORMS[1:] if backends.library()]


@given(ops=OPS, first=st.integers(1, 2 * SPARE), of=st.sampled_from(KINDS))
@settings(max_examples=200)
def test_it_holds_what_transformers_holds(ops, first, of):
    """Two caches of each kind, which copies share: whatever one of them appends, the other keeps its own.

    With fewer `bits` it holds the codes of the same numbers.
    """
    kind, bits = of
    plain, ours = [filled(first, kind=kind)] * 2, [filled(first, bits=bits, kind=kind)] * 2
    inference = False
    for number, op in enumerate(ops):
        with torch.inference_mode(inference):
            grow_in_place(ours[0], 0, bits)
            for pair in (plain, ours):
                cache = pair[0]
                if op in ("one", "some"):
                    appended = append(cache, number, 1 if op == "one" else 3)
                    assert appended is None or torch.equal(appended, indexers(cache.layers[0])[0])
                elif op == "crop" and cache.get_seq_length() > 1:
                    cache.crop(-1)
                elif op == "reorder":
                    cache.reorder_cache(torch.tensor([1, 0]))
                elif op == "copy":
                    pair[1] = copy.copy(cache)
                    pair[1].layers = [copy.copy(layer) for layer in cache.layers]
                elif op == "deepcopy":
                    pair[1] = copy.deepcopy(cache)
                elif op == "reset":
                    cache.reset()
                    append(cache, number, 2)
                elif op == "swap":
                    pair.reverse()
        inference ^= op == "mode"
        for mine, wanted in zip(ours, plain, strict=True):
            for a, b in zip(mine.layers, wanted.layers, strict=True):
                sizes = bits[0] if bits else (PLAIN, PLAIN)
                assert torch.equal(a.keys, coded(b.keys, sizes[0])), op
                assert torch.equal(a.values, coded(b.values, sizes[1])), op
                assert all(map(torch.equal, indexers(a), indexers(b))) and len(indexers(a)) == len(indexers(b)), op


@pytest.mark.parametrize("kind", [DynamicLayer, *INDEXED])
def test_its_bytes_are_foreseen_and_within_the_workload(kind):
    cache = filled(20, layers=20, kind=kind)
    grow_in_place(cache, 50)
    each = 20 * 2 * (TOKEN + (0 if kind is DynamicLayer else COLS * 2))
    moved = []
    for tokens in range(21, 90):
        before, (more, token, alone) = cache_bytes(cache), growth(cache)
        assert token == each and alone
        held = [layer.keys.data_ptr() for layer in cache.layers]
        for layer in range(20):
            append(cache, tokens, 1, layer)
        assert cache_bytes(cache) == before + more
        moved.append(sum(a != layer.keys.data_ptr() for a, layer in zip(held, cache.layers, strict=True)))
        assert each * tokens <= cache_bytes(cache) <= each * (50 if tokens <= 50 else tokens + SPARE)
    assert max(moved[SPARE + 35 :]) <= 2, "layers copy at different tokens"
    assert max(moved[1:29]) <= 2


@pytest.mark.parametrize("kind", INDEXED)
def test_a_saved_layer_is_transformers_own(kind):
    cache = filled(3, kind=kind)
    grow_in_place(cache, 0)
    append(cache, 1, 1)
    held = cache.layers[0]
    made = pickle.loads(pickle.dumps(held))
    assert type(held) is not kind and type(made) is kind
    assert torch.equal(made.keys, held.keys) and torch.equal(indexers(made)[0], indexers(held)[0])


def test_replaced_tensors_free_their_room():
    """Beam search, a longer pass or a reset leave no memory behind: the budget has counted what is held alone."""
    for replace in ("reorder_cache", "update", "batch_select_indices", "reset"):
        cache = filled(20)
        grow_in_place(cache, 0)
        cache.update(*states(1, 1), 0)
        assert cache_bytes(cache) > 21 * TOKEN * 2
        if replace == "update":
            cache.update(*states(2, 4), 0)
        elif replace == "reset":
            cache.reset()
        else:
            getattr(cache, replace)(torch.tensor([1, 0]))
        assert cache_bytes(cache) == {"update": 25, "reset": 0}.get(replace, 21) * TOKEN * 2, replace


def test_layers_of_other_kinds_beside():
    """A cache with a sliding window: the layers that append in place say what they take ahead."""
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    cache = DynamicCache(config=config)
    for layer in range(2):
        cache.update(*states(layer, 20), layer)
    grow_in_place(cache, 0)
    before, (added, token, alone) = cache_bytes(cache), growth(cache)
    for layer in range(2):
        cache.update(*states(layer, 1), layer)
    assert token == 2 * TOKEN and not alone and added > token
    assert cache_bytes(cache) == before + added + token  # the sliding layer's token is as large


def test_copies_append_in_threads(monkeypatch):
    """Two copies share a room with one place. Each thread stops before it writes, so both have looked for place."""
    cache = filled(3)
    grow_in_place(cache, 0)
    cache.update(*states(1, 1), 0)
    other = copy.copy(cache.layers[0])
    both, narrow = threading.Barrier(2), Tensor.narrow

    def late(self, *where):
        if threading.current_thread() is not threading.main_thread() and where[-1] == 1:
            both.wait(PATIENCE)
        return narrow(self, *where)

    monkeypatch.setattr(Tensor, "narrow", late)
    new = [states(n, 1) for n in (7, 8)]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda layer, x: layer.update(*x), (cache.layers[0], other), new))
    for (keys, values), (key, value) in zip(made, new, strict=True):
        assert torch.equal(keys[..., -1:, :], key) and torch.equal(values[..., -1:, :], value)


def test_what_does_not_fit_is_transformers_own():
    """Another batch is refused, as in a `DynamicLayer`, and a wider dtype makes all wide."""
    cache = filled(3)
    grow_in_place(cache, 0)
    cache.update(*states(1, 1), 0)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        cache.update(*(x[:1] for x in states(2, 1)), 0)
    cache.layers[0].update(*(x.float() for x in states(2, 1)))
    assert cache.layers[0].keys.dtype == torch.float32 and cache.layers[0].keys.shape[-2] == 5


def test_what_it_leaves_alone():
    empty, sliding = DynamicCache(), filled(3)
    grow_in_place(empty, 0)
    grow_in_place(None, 0)
    sliding.layers[0].__class__ = type("Other", (type(sliding.layers[0]),), {})
    grow_in_place(sliding, 0)
    assert type(sliding.layers[0]).__name__ == "Other"
    assert growth(empty) == growth(sliding) == growth(object()) == (0, 0, False)
    cache = filled(3)
    grow_in_place(cache, 0)
    keys, values = (x.requires_grad_() for x in states(5, 1))
    cache.update(keys, values, 0)
    cache.update(*states(6, 1), 0)
    cache.layers[0].keys.square().sum().backward()
    assert type(cache.layers[0]) is GrowingLayer and keys.grad is not None, "gradients flow as they did"
