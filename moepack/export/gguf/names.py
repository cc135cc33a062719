"""What llama.cpp calls the tensors and settings of a model, by its `model_type` in config.json.

A new family is a Family in FAMILIES: its architecture, and what its settings are made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

from moepack.pack.errors import InputError
from moepack.pack.manifest.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class Family:
    """A model family that llama.cpp runs."""

    model: MODEL_ARCH  # whose tensors the gguf package names
    in_float32: tuple[str, ...]  # matrices that llama.cpp wants in F32; vectors always are
    # A matrix of an expert -> the file's tensors that hold its rows, in equal parts.
    experts: Mapping[str, tuple[str, ...]]
    settings: Callable[[JsonObject], JsonObject]  # raises ValueError for what llama.cpp does not do

    @property
    def architecture(self) -> str:
        """Return the model's architecture name in GGUF files."""
        return MODEL_ARCH_NAMES[self.model]

    def name(self, tensor: str) -> str:
        """The file's name of a tensor outside the experts. Raises KeyError for one that the architecture lacks."""
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", tensor)
        first = tensor if found is None else f"model.layers.0.{found[2]}"
        name = get_tensor_name_map(self.model, 1).get_name(first, (".weight",))
        if name is None:
            raise KeyError(tensor)
        return name if found is None else name.replace("blk.0.", f"blk.{found[1]}.", 1)


def _qwen3moe(config: JsonObject) -> JsonObject:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    unlike = {
        "attention_bias": config.get("attention_bias"),
        "norm_topk_prob: false": not config.get("norm_topk_prob"),
        "mlp_only_layers": config.get("mlp_only_layers"),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "use_sliding_window": config.get("use_sliding_window"),
        f"rope_type {rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
    }
    for what, has in unlike.items():
        if has:
            raise ValueError(what)
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "vocab_size": config["vocab_size"],
    }


FAMILIES = {
    "qwen3_moe": Family(
        MODEL_ARCH.QWEN3MOE,
        in_float32=("ffn_gate_inp",),
        experts={"gate_up": ("ffn_gate_exps", "ffn_up_exps"), "down": ("ffn_down_exps",)},
        settings=_qwen3moe,
    ),
}


def family_of(where: str, config: JsonObject) -> Family:
    """The family of a config.json. Raises InputError, by name, for one whose tensors are not known here."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(f"--to gguf: {where}: names of {kind}'s tensors are not known here: those of {known} are")
    return FAMILIES[kind]


def settings(where: str, family: Family, config: JsonObject) -> JsonObject:
    """The keys of a file for a config.json. Raises InputError for a setting that llama.cpp's architecture lacks."""
    try:
        own = family.settings(config)
    except KeyError as error:
        raise InputError(f"--to gguf: {where}: its config.json has no {error.args[0]}") from None
    except ValueError as error:
        raise InputError(f"--to gguf: {where}: llama.cpp's {family.architecture} has no {error}") from None
    keys = {f"{family.architecture}.{key}": value for key, value in own.items()}
    return {"general.architecture": family.architecture, "general.quantization_version": 2, **keys}
