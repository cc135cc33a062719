"""What no policy may do wrong, whatever it decides: families and batches that are unlike the model it was made on."""

import pytest
import torch
from live_models import least
from support import load_for_logits
from tiny_models import build_tiny

from moepack.pack.errors import InputError
from moepack.runtime.policies.registry import ENTRIES

MODELS = {
    "all experts chosen, a dense layer between": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 8},
    ),
    "a dense layer, shared experts": ("deepseek_v3", {}),
    "windows, sinks, biases": ("gpt_oss", {}),
    "linear attention": ("qwen3_next", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
}
RECIPE = """
versions: [bf16, w4, w2]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 32, batch_size: 4}
"""
POLICIES = [*(entry.name for entry in ENTRIES), "hotness:lo=absent"]
REFUSED = {(p, "linear attention"): "attention" for p in POLICIES if p.startswith("importance")}  # words, by both


@pytest.fixture(scope="module", params=MODELS)
def made(request, demo_model, text, made_once):
    family, more = MODELS[request.param]

    def make(folder):
        build_tiny(family, folder, RECIPE, demo_model, text, **more)

    return request.param, made_once(f"every-policy-{family}", make) / "bundle"


@pytest.mark.parametrize("policy", POLICIES)
def test_serves_a_byte_above_the_least(policy, made):
    """One token, a batch of unlike lengths with padding, generation with a cache, a longer prompt."""
    name, bundle = made
    room = {"kv_tokens": 64, "batch": 2, "prefill_tokens": 24}
    if words := REFUSED.get((policy, name)):
        with pytest.raises(InputError, match=words):
            load_for_logits(bundle, policy=policy, device_memory=1 << 40, **room)
        return
    memory = (1 << 40) if policy == "static" else least(bundle, policy, **room) + 1
    model = load_for_logits(bundle, policy=policy, device_memory=memory, **room)
    with model.moepack as served, torch.inference_mode():
        one = model(torch.tensor([[7]]), use_cache=False).logits
        assert torch.isfinite(one).all()
        ids = torch.tensor([[0, 0, 0, 9, 10, 11], [3, 4, 5, 6, 7, 8]])
        mask = (torch.arange(6) >= torch.tensor([[3], [0]])).long()
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert out.shape == (2, 12)
        long = torch.arange(1, 25)[None]
        mask = torch.ones_like(long)
        out = model.generate(long, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert out.shape == (1, 28) and torch.isfinite(model(long, use_cache=False).logits).all()
        assert served.resident_bytes_peak <= memory
        assert served.counters()["worker_failures"] == 0 == served.counters()["transition_failures"]
