"""Queries, keys and values in one call: the bits of the module's own code, in families whose code does just that."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import random_model
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import moepack
from moepack.families.arguments import CACHE_NAMES
from moepack.runtime.dense import borrowed, linears, norms
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.projections import serve_projections
from moepack.runtime.experts import backends
from moepack.runtime.kernels.token_native import Projection

if backends.backend(torch.device("cpu")) != "native":
    pytest.skip("no compiled kernels", allow_module_level=True)

IDS = torch.randint(1, 60, (1, 9), generator=torch.Generator().manual_seed(0))  # of two, angles would be broadcast


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
def test_logits_keep_their_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = served(family, projections=True), served(family, projections=False)
    layers = 0 if family == "deepseek_v3" else model.config.num_hidden_layers
    assert sum(model.changed.values()) == layers, model.changed
    run, ran = Projection.run, []
    monkeypatch.setattr(Projection, "run", lambda *given: ran.append(1) or run(*given))
    for ids in (IDS, torch.cat((IDS, IDS.flip(1)))):
        for got, wanted in zip(logits(model, ids), logits(plain, ids), strict=True):
            assert torch.equal(got, wanted)
        assert len(ran) == 6 * layers  # the pass of two sequences adds none


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


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "phimoe", "glm4_moe"])
def test_attention_is_given_the_same_arguments(family: str) -> None:
    """A function that someone registered may read what torch's does not."""
    seen: list[dict[str, Any]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.append({"mask": mask, **kwargs})
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["spy"] = spy
    try:
        for projections in (True, False):
            model = served(family, projections)
            model.config._attn_implementation, model.config.sliding_window = "spy", 7
            x, turn = turned(model)
            given = {"attention_mask": None, "position_embeddings": turn, "position_ids": torch.arange(3)[None]}
            with torch.no_grad():
                model.model.layers[0].self_attn(hidden_states=x, **given, output_attentions=True)
    finally:
        del ALL_ATTENTION_FUNCTIONS["spy"]
    assert len(seen) == 2 and str(sorted(seen[0].items())) == str(sorted(seen[1].items()))


def turned(model: Any, tokens: int = 3) -> tuple[Tensor, Any]:
    """Random hidden states, and their angles."""
    x = torch.randn(1, tokens, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x, model.model.rotary_emb(x, torch.arange(tokens)[None])


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_another_weight_of_a_norm(name: str) -> None:
    """Under another address the kernel would read freed memory."""
    model, plain = served("qwen3_moe", projections=True), served("qwen3_moe", projections=False)
    before = logits(model)[-1]
    for each in (model, plain):
        norm = getattr(each.model.layers[0].self_attn, name)
        norm.weight.data = torch.linspace(-2, 2, len(norm.weight)).bfloat16()
    assert torch.equal(logits(model)[-1], logits(plain)[-1]) and not torch.equal(logits(model)[-1], before)


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "q_norm"])
def test_weights_that_learn_get_gradients(name: str) -> None:
    model = served("qwen3_moe", projections=True).requires_grad_(False)
    attention = model.model.layers[0].self_attn
    weight = getattr(attention, name).weight.requires_grad_()
    x, turn = turned(model)
    attention(hidden_states=x, position_embeddings=turn, attention_mask=None)[0].float().square().sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_a_hook_on_all_modules_sees_the_maps() -> None:
    model, seen = served("qwen3_moe", projections=True), []
    hook = register_module_forward_hook(lambda module, given, out: seen.append(module))
    try:
        logits(model)
    finally:
        hook.remove()
    assert seen.count(model.model.layers[0].self_attn.k_proj) == 6


def test_a_cache_under_its_older_name() -> None:
    """A decorator of the module's own code translates it."""
    model = served("qwen3_moe", projections=True)
    attention, cache, (x, turn) = model.model.layers[0].self_attn, DynamicCache(config=model.config), turned(model)
    own = next(name for name in CACHE_NAMES if name in inspect.signature(type(attention).forward).parameters)
    for name in {"cache", "past_key_values"} - {own}:
        with torch.no_grad(), contextlib.suppress(TypeError):  # a module without that decorator refuses the name
            attention(hidden_states=x, position_embeddings=turn, attention_mask=None, **{name: cache})
            assert cache.get_seq_length() == 3


def test_angles_that_the_trial_cannot_make() -> None:
    """A tower of images may come first, whose angles take other arguments: modules stay as they are."""
    model = served("qwen3_moe", projections=False)
    model.model.rotary_emb.forward = lambda grid: grid
    assert serve_projections(model) == {}
    assert not hasattr(model.model.layers[0].self_attn, "_moepack_projection")
