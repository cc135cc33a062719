"""The shapes of `benchmarks.contexts`: layers of released models, but four of them, and fewer experts and tokens.

DeepSeek-V2's has the sizes of DeepSeek-V2-Lite, and beside them the larger model's low rank of queries.
"""

from dataclasses import dataclass
from typing import Any

VOCABULARY = 4096  # tokens that texts have, which every model here has
COMMON = {
    "num_hidden_layers": 4,
    "vocab_size": 32_768,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A family, its kind of attention, and what its configuration says beside COMMON."""

    family: str
    attention: str
    facts: dict[str, Any]


SHAPES = {
    "Qwen3-30B-A3B": Shape(
        "qwen3_moe",
        "grouped",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        "grouped",
        {
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
    "DeepSeek-V2-16-heads": Shape(
        "deepseek_v2",
        "latent",
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,  # DeepSeek-V2's: llama.cpp expects none only in files of 26 layers and more
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "head_dim": 64,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 32,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
        },
    ),
    "Qwen3-Next-80B-A3B": Shape(
        "qwen3_next",
        "hybrid",
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 64,
            "num_experts_per_tok": 10,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
    ),
    "Kimi-Linear-48B-A3B": Shape(
        "kimi_linear",
        "hybrid",
        {
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "moe_router_activation_func": "sigmoid",
            "linear_attn_config": {
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
            },
        },
    ),
}

TINY = Shape(  # to see that the benchmark works
    "qwen3_moe",
    "grouped",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
)
