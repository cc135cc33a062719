"""torch.compile of a loaded model, whole graphs: the operator's bits, a step a pass, and what is refused."""

import gc
import shutil
import threading
import time

import pytest
import torch
from live_models import load
from support import ids
from transformers.cache_utils import DynamicCache

import moepack
from moepack.pack.errors import InputError
from moepack.runtime.experts.forward import experts_forward

TOLERANCE = 2e-3  # of float32 logits of some units: compilers fuse and reorder the dense parts' sums
FAST = "hotness:hi=bf16,lo=w2,between=no,prior=none,interval=0.02,rate=0"
POLICIES = ((FAST, 30_000_000), ("lru:hi=bf16,lo=w2", None),
            ("paged:alpha=0.5,interval=0.02", 40_000_000))  # fmt: skip


@pytest.fixture(params=POLICIES, ids=lambda policy: policy[0].partition(":")[0])
def model(bundle, request):
    policy, memory = request.param
    torch.compiler.reset()
    return load(bundle, policy, memory, prefill_tokens=64, dtype=torch.float32)


def test_a_whole_graph_and_the_same_logits(model):
    """Under every policy, also after versions have changed: what was compiled reads handles when it runs."""
    compiled, live = torch.compile(model, fullgraph=True, backend="aot_eager"), model.moepack.manager
    compared = 0
    with torch.no_grad():
        for seed in (0, 1, 2, 3, 4, 5, 5, 5, 5):  # the same again: by then there is nothing to change
            steps, versions = live.residency.steps.begun if live else 0, model.moepack.versions
            got = compiled(ids(seed=seed), use_cache=False).logits
            assert not live or live.residency.steps.begun == steps + 1, "one step a pass"
            assert not live or not live.residency.steps.open
            want = model(ids(seed=seed), use_cache=False).logits
            if model.moepack.versions == versions:
                torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
                compared += 1
            time.sleep(0.1)
    assert compared > 0
    if live is not None:
        assert model.moepack.counters()["promotions"] > 0 and live.tracker.peak <= live.tracker.budget


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for the CPU needs g++")
def test_by_the_compiler_that_is_used(bundle):
    torch.compiler.reset()
    model = moepack.load(bundle, policy="static:w4", dtype=torch.float32)
    compiled = torch.compile(model.model.layers[1], fullgraph=True)
    x = torch.randn(1, 12, 128, generator=torch.Generator().manual_seed(0))
    where = model.model.rotary_emb(x, torch.arange(12)[None])
    with torch.no_grad():
        got, want = (layer(x, position_embeddings=where) for layer in (compiled, model.model.layers[1]))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_the_operator_is_the_forward_to_the_bit(model):
    module = model.model.layers[2].mlp.experts
    x, index = torch.randn(9, 128), torch.randint(0, 17, (9, 2))  # 16 is no expert
    gates = torch.rand(9, 2)
    with torch.no_grad():
        got = torch.ops.moepack.experts(x, index, gates, module._moepack.number)
        assert torch.equal(got, experts_forward(module, x, index, gates))
        torch.library.opcheck(torch.ops.moepack.experts.default, (x, index, gates, module._moepack.number))


def test_an_interrupted_pass_leaves_no_step(bundle):
    model = load(bundle, FAST, 30_000_000, prefill_tokens=64)
    steps = model.moepack.manager.residency.steps
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    index, gates = torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    numbers = [layer.number for layer in model.moepack.layers]

    def layer(position):
        torch.ops.moepack.experts(x, index, gates, numbers[position])

    with torch.no_grad():
        layer(0)
        assert len(steps.open) == 1, "and there the pass is interrupted"
        layer(0)
        assert len(steps.open) == 1, "the next one has ended it"
        for position in (1, 2, 3):
            layer(position)
        assert not steps.open
        thread = threading.Thread(target=layer, args=(0,))
        thread.start()
        thread.join()
        assert not steps.open, "a thread's end ends its pass"
        layer(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.model.layers[1].mlp.experts, "act_fn", None)
            patch.setattr(model.model.layers[1].mlp.experts, "_apply_gate", None)
            with pytest.raises(TypeError):
                layer(1)
        assert not steps.open, "so does an error"
    model.moepack.close()
    with pytest.raises(InputError, match=r"this model was closed|has gone"):
        layer(0)


def test_what_is_refused(bundle):
    torch.compiler.reset()
    model = load(bundle, FAST, 30_000_000, prefill_tokens=64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(Exception, match="a compiled pass in a budget keeps no cache: pass use_cache"):
        compiled(ids())
    for given, line in (
        ({"labels": ids()}, "without labels"),
        ({"output_hidden_states": True}, "without output_hidden"),
    ):
        torch.compiler.reset()
        with torch.no_grad(), pytest.raises(Exception, match=f"returns logits alone: {line}"):
            compiled(ids(), use_cache=False, **given)
    torch.compiler.reset()
    model = load(bundle, FAST, 30_000_000, prefill_tokens=64, all_logits=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        with pytest.raises(Exception, match="returns what it was loaded for: pass logits_to_keep=1"):
            compiled(ids(), use_cache=False)
        torch.compiler.reset()
        assert compiled(ids(), use_cache=False, logits_to_keep=1).logits.shape[1] == 1
    coding = moepack.load(bundle, policy="static:w4", kv=8)
    for cache in (None, DynamicCache(config=coding.config)):
        torch.compiler.reset()
        with torch.no_grad(), pytest.raises(Exception, match="makes no cache of codes: pass use_cache=False"):
            torch.compile(coding, fullgraph=True, backend="aot_eager")(ids(), past_key_values=cache)
    model = moepack.load(bundle, policy="static:w4", dtype=torch.float32)
    torch.compiler.reset()
    model.model.embed_tokens.weight.requires_grad_(True)
    with pytest.raises(Exception, match="a compiled pass has no gradients"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(ids(), use_cache=False)
    number = model.moepack.layers[0].number
    del model, compiled
    torch.compiler.reset()
    gc.collect()
    with pytest.raises(InputError, match="the model of a compiled pass has gone"):
        torch.ops.moepack.experts(torch.zeros(1, 128), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2), number)
