"""Queries, keys and values in one call: the bits of the module's own code, in families whose code does just that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import random_model
from torch import Tensor
from transformers import DynamicCache

import moepack
from moepack.runtime.dense import borrowed, linears, norms
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.projections import serve_projections
from moepack.runtime.experts import backends

if backends.backend(torch.device("cpu")) != "native":
    pytest.skip("no compiled kernels", allow_module_level=True)

IDS = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def served(family: str, projections: bool) -> Any:
    """A random model whose dense half is the kernels'."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if family == "deepseek_v3" else 4}
    model, _ = random_model(family, torch.bfloat16, hidden_size=256, **heads)
    experts = [SimpleNamespace(module=n) for n, _ in model.named_modules() if n.endswith(".experts")]
    linears.serve(model, SimpleNamespace(layers=experts, manifest=SimpleNamespace(dense=())), (), compiled=True)  # type: ignore[arg-type]
    norms.serve_norms(model)
    serve_attention(model)
    if projections:
        model.changed = serve_projections(model)
    return model.eval()


def logits(model: Any, ids: Tensor = IDS) -> list[Tensor]:
    """Of a prompt, and of tokens after it one by one."""
    cache, out = DynamicCache(config=model.config), []
    with torch.inference_mode():
        for part in (ids[:, :4], *ids[:, 4:].split(1, 1)):
            out.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
    return out


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "phimoe", "glm4_moe", "deepseek_v3"]
)
def test_logits_keep_their_bits(family: str) -> None:
    model = served(family, projections=True)
    layers = model.config.num_hidden_layers
    assert sum(model.changed.values()) == (0 if family == "deepseek_v3" else layers), model.changed
    for got, wanted in zip(logits(model), logits(served(family, projections=False)), strict=True):
        assert torch.equal(got, wanted)


def test_whoever_changes_a_map_or_a_norm_gets_the_modules_own_code(bundle: Path) -> None:
    """A hook, another module, another forward, and other weights in place of a map's."""
    model = moepack.load(bundle, policy="static:bf16", dtype=torch.bfloat16)
    attention = model.model.layers[0].self_attn
    assert attention._moepack_projection.holds(attention)
    seen: list[Tensor] = []
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


def test_a_step_that_the_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that reads another name, or computes something else by the known ones, stays."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    kind, rotate = modeling.Qwen3MoeAttention, modeling.apply_rotary_pos_emb
    borrowed._attention.cache_clear()  # its classes keep the function
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, sin, cos))
        assert served("qwen3_moe", projections=True).changed == {}
    borrowed._attention.cache_clear()

    class Clipped(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states.clamp(-1, 1), **kwargs)

    monkeypatch.setattr(modeling, "Qwen3MoeAttention", Clipped)
    assert served("qwen3_moe", projections=True).changed == {}
