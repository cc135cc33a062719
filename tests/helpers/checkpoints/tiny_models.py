"""Tiny random models of every family the suite covers, saved as checkpoints a user would download."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moepack.pack.spec import ExpertLayer, Matrix

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "router_aux_loss_coef": 0.0,
}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_hidden_layers": 3,
}
_MLA: dict[str, Any] = {
    **_GROUPED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8, "num_key_value_heads": 4},
    "phimoe": {"num_local_experts": 4},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v3": _MLA,
    "qwen3_next": {
        "num_experts": 8,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    "granitemoe": {"num_local_experts": 4},
    "glm4_moe": _GROUPED,
    "jamba": {"num_local_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
}
WITH_STATES: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 24,
        "num_local_experts": 4, "moe_intermediate_size": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "nemotron_h": {
        "mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 24, "mamba_n_groups": 2, "mamba_dt_min": 0.02,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_d_state": 40, "mamba_n_groups": 1,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"], "num_experts": 4, "moe_intermediate_size": 48, "num_dense_layers": 1,
    },
}  # fmt: skip


# Sizes of latent layers with an indexer, in families like DeepSeek-V3.2
INDEXED = {"index_n_heads": 8, "index_head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16}
INDEXED |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "n_routed_experts": 4}
INDEXED |= {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}


def config_of(family: str, extra: dict[str, Any]):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    return CONFIG_MAPPING[family](**{**_BASE, **FAMILIES.get(family, {}), **WITH_STATES.get(family, {}), **extra})


def random_model(family: str, dtype: torch.dtype, attention: str | None = None, **extra) -> tuple[Any, list[Any]]:
    """A random model of `family` in memory, and its layers of experts."""
    from transformers import AutoModelForCausalLM

    config = config_of(family, extra)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    layers = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            inner = module.down_proj.shape[1 if family == "gpt_oss" else 2]
            matrices = (Matrix("gate_up", 2 * inner, 64), Matrix("down", 64, inner))
            layers.append(ExpertLayer(len(layers), name, module.num_experts, matrices))
    return model, layers


def serve_linears(model):
    """Let the kernels multiply by a model's dense matrices, as of a bundle that has no versions of them."""
    from moepack.runtime.dense import linears

    experts = [SimpleNamespace(module=n) for n, _ in model.named_modules() if n.endswith(".experts")]
    linears.serve(model, SimpleNamespace(layers=experts, manifest=SimpleNamespace(dense=())), (), compiled=True)


def build_tiny(family: str, folder: Path, recipe: str, demo_model: Path, text: Path, **extra) -> Path:
    """A bundle of a random model, with the demo model's tokenizer."""
    from support import build_from

    save_tiny(family, folder / "checkpoint", demo_model, **extra)
    build_from(recipe, folder / "checkpoint", folder / "bundle", [text])
    return folder / "bundle"


def save_tiny(
    family: str, path: Path, tokenizer: Path | None = None, dtype: torch.dtype = torch.bfloat16, **extra
) -> Path:
    """Save a random model of `family` at `path`, with a tokenizer copied from another checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(family, extra), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "bias" in name:  # random, so that a lost bias shows
                parameter.normal_(0, 0.1)
            if name.endswith("dt_proj.bias"):  # forgets slowly, so that a lost state shows
                parameter.sub_(4)
            if parameter.ndim >= 2 and ("bias" in name or "experts" in name):
                parameter.normal_(0, 0.1)
    model.to(dtype).save_pretrained(path)
    if tokenizer:
        copy_tokenizer(tokenizer, path)
    return path


def copy_tokenizer(source: Path, path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
