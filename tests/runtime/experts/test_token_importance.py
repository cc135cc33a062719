"""Heavy hitters, from queries and keys: against whole matrices, and without any trace in what a model computes."""

import math

import pytest
import torch
from live_models import least
from support import load_for_logits
from tiny_models import random_model

import moepack
from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Matrix
from moepack.runtime.experts.token_importance import TokenImportance, attention_received, heavy_hitters
from moepack.runtime.policies.reducers import HEAVY
from moepack.runtime.step.context import Step, opened


def model_of(family, attention="sdpa", **extra):
    model, _ = random_model(family, torch.float32, attention, **extra)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.normal_(0, 0.5)  # else all weights are nearly equal
    return model


def layers_of(model):
    names = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    return [
        ExpertLayer(i, name, 8, (Matrix("gate_up", 96, 64), Matrix("down", 64, 48))) for i, name in enumerate(names)
    ]


class Recorder(TokenImportance):
    """Keeps what tokens received, beside who the heavy hitters are."""

    def __init__(self, model, workspace=1 << 20):
        super().__init__(model, layers_of(model), 0.25, workspace)
        self.heavy = []

    def saw(self, *args):
        super().saw(*args)
        self.heavy += [mask.clone() for mask in self._heavy.values()][len(self.heavy) :]


def whole(model, share, text=None, **given):
    """Heavy hitters from the whole matrices that a model with plain attention gives."""
    with torch.inference_mode():
        maps = model(**given, output_attentions=True).attentions
    out = []
    for weights in maps:  # [batch, heads, queries, keys]
        tokens = weights.shape[2]
        rows = weights if text is None else weights * text[:, None, :, None]
        received = rows.float().mean(1).sum(1)[:, -tokens:]
        out.append(heavy_hitters(received, share, text))
    return out


def seen(model, text=None, cached=0, workspace=1 << 20, **given):
    recorder = Recorder(model, workspace)
    shape = tuple(given["input_ids"].shape)
    mask = None if text is None else text.reshape(-1).long()
    with torch.inference_mode(), opened(Step(importance=recorder)), recorder.watching(shape, mask, cached):
        out = model(**given)
    return recorder.heavy, out


def ids(batch, tokens):
    return torch.randint(1, 4000, (batch, tokens), generator=torch.Generator().manual_seed(1))


FAMILIES = {
    "qwen3_moe": {},  # two heads share a key
    "mixtral": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},  # sinks; plain attention alone
    "deepseek_v3": {},  # latent attention, the first layer without experts
    # its mask by name; a window in every other layer
    "afmoe": {
        "num_experts": 8,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "global_attn_every_n_layers": 2,
        "sliding_window": 8,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("workspace", [1 << 20, 3000])
def test_heavy_hitters_are_those_of_the_whole_matrices(family, attention, workspace):
    """Causal, with a sliding window, grouped heads, sinks; a batch with padding on the left; and prompts in chunks."""
    if (family, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("it has no such attention")
    plain = model_of(family, "eager", **FAMILIES[family])
    model = model_of(family, attention, **FAMILIES[family])
    count, first = len(layers_of(model)), -len(layers_of(model))
    tokens = ids(3, 24)
    mask = torch.ones_like(tokens)
    mask[0, :10], mask[1, :1] = 0, 0
    padded = {"input_ids": tokens, "attention_mask": mask}
    for given, text in (({"input_ids": tokens}, None), (padded, mask.bool())):
        got, out = seen(model, text, workspace=workspace, **given)
        want = whole(plain, 0.25, text, **given)[first:]
        assert len(got) == count and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        with torch.inference_mode():
            assert torch.equal(model(**given).logits, out.logits), "what is computed is the same to the bit"
    begun = {"input_ids": tokens[:, :14]}
    with torch.inference_mode():
        caches = [m(**begun, use_cache=True).past_key_values for m in (model, plain)]
    rest = tokens[:, 14:]
    got, _ = seen(model, cached=14, workspace=workspace, input_ids=rest, past_key_values=caches[0])
    want = whole(plain, 0.25, input_ids=rest, past_key_values=caches[1])[first:]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_cache_of_a_fixed_length():
    """The step's tokens are in its middle."""
    from transformers import StaticCache

    plain, model = model_of("qwen3_moe", "eager"), model_of("qwen3_moe")
    tokens = ids(1, 20)
    want = whole(plain, 0.25, input_ids=tokens)
    for attention in (plain, model):
        got, _ = seen(attention, input_ids=tokens, past_key_values=StaticCache(attention.config, max_cache_len=64))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    cache = StaticCache(model.config, max_cache_len=64)
    with torch.inference_mode():
        model(tokens[:, :12], past_key_values=cache)
        begun = plain(tokens[:, :12], use_cache=True).past_key_values
    got, _ = seen(model, cached=12, input_ids=tokens[:, 12:], past_key_values=cache)
    want = whole(plain, 0.25, input_ids=tokens[:, 12:], past_key_values=begun)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_attention_received_by_hand():
    """Two queries, two keys, one head: products 0 and ln 3."""
    q = torch.tensor([[[[0.0], [1.0]]]])
    k = torch.tensor([[[[0.0], [math.log(3.0)]]]])
    got = attention_received(q, k, None, 1.0)
    assert got[0].tolist() == pytest.approx([1.25, 0.75]), "1 and 1/4; 3/4 of the second query's"
    both = attention_received(q, k, None, 1.0, causal=False)
    assert both[0].tolist() == pytest.approx([0.75, 1.25])
    sunk = attention_received(q, k, None, 1.0, sinks=torch.tensor([0.0]))
    assert sunk[0].tolist() == pytest.approx([0.5 + 0.2, 0.6]), "a sink takes its part"
    bent = attention_received(q, k, None, 1.0, softcap=0.5)
    low = math.exp(0.5 * math.tanh(2 * math.log(3.0)))
    assert bent[0].tolist() == pytest.approx([1 + 1 / (1 + low), low / (1 + low)])
    text = torch.tensor([[False, True]])
    assert attention_received(q, k, None, 1.0, text=text)[0].tolist() == pytest.approx([0.25, 0.75])


def test_other_models_and_decoding_are_left_alone():
    """Only the model that reads a prompt is seen, while it does; what families read in configurations stays."""
    model, other = model_of("qwen3_moe"), model_of("qwen3_moe")
    recorder = Recorder(model)
    calls = []
    for which, m in (("mine", model), ("other", other)):
        attention = m.model.layers[0].self_attn
        attention.register_forward_pre_hook(
            lambda at, _, w=which: calls.append(f"{w} {at.config._attn_implementation}")
        )
    with torch.inference_mode():
        with opened(Step(importance=recorder)), recorder.watching((1, 8), None, 0):
            model(ids(1, 8))
            other(ids(1, 8))
        heard = len(recorder.heavy)
        model(ids(1, 8))
    assert calls == ["mine sdpa", "other sdpa", "mine sdpa"] and heard == 2 == len(recorder.heavy)
    with pytest.raises(RuntimeError), recorder.watching((1, 8), None, 0):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa", "however a pass ends"


@pytest.mark.parametrize(
    ("family", "attention", "word"),
    [
        ("qwen3_next", "sdpa", r"Qwen3NextForCausalLM's layers do not give \(model\.layers\.0"),
        ("qwen3_moe", "flex_attention", "flex_attention"),
    ],
)
def test_attention_that_does_not_tell_is_refused_by_name(family, attention, word):
    model = model_of(family)
    model.config._attn_implementation_internal = attention
    with pytest.raises(InputError, match=word) as refused:
        TokenImportance(model, layers_of(model), 0.2, 1 << 20)
    assert "needs attention weights" in str(refused.value) and "by=counts" in str(refused.value)


def test_served_models(bundle):
    """One attention or the other, importance or not: everything critical gives the bits of the version alone."""
    policy = "importance:hi=w4,r=1"
    for attention in ("eager", "sdpa"):
        budget = least(bundle, policy, attn_implementation=attention) + 2_000_000
        plain = moepack.load(bundle, policy="static:w4", attn_implementation=attention)
        model = load_for_logits(bundle, policy=policy, device_memory=budget, attn_implementation=attention)
        told = []
        decide = model.moepack.manager.policy.decide
        model.moepack.manager.policy.decide = lambda event: told.append(event) or decide(event)  # noqa: B023
        with torch.inference_mode():
            for tokens in (ids(1, 64), ids(2, 40), ids(1, 1)):
                assert torch.equal(model(tokens).logits, plain(tokens).logits)
        prompts = [e for e in told if e.is_prompt]
        assert len(prompts) == 8 and all(e.sums[HEAVY].sum() == 2 * 13 for e in prompts[:4]), (
            "13 of 64, to two experts each"
        )
        assert all(e.sums[HEAVY].sum() == 2 * 2 * 8 for e in prompts[4:]), "8 of 40 of either sequence"
        assert not any(e.sums[HEAVY].any() for e in told if not e.is_prompt)
        assert all((e.sums[HEAVY] <= e.counts).all() for e in prompts)
        model.moepack.close()
    model = load_for_logits(bundle, policy=policy, device_memory=budget)
    model.config._attn_implementation_internal = "flex_attention"
    with torch.inference_mode(), pytest.raises(InputError, match="flex_attention"):
        model(ids(1, 8))
    model.moepack.close()
