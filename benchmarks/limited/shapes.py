"""The shapes of generated models, and the ids of their texts. Standard library and NumPy: every side imports it.

A text stays within one topic. A topic's tokens stand in clusters; a text stays in one cluster for some tokens, and
draws them there by Zipf's law.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Row

# topics, clusters of a topic, tokens of a cluster
TOPICS = 3
CLUSTERS = 8
WORDS = 96
# tokens that a text stays in a cluster, on average; the exponent of Zipf's law
STAY = 48
ZIPF = 0.8
BITS = {"bf16": 10.7, "mxfp4": 4.25, "w4": 4.19, "w2": 2.375}  # of a weight
CONTEXT = 32_768
SESSION = 7  # the seed of the texts that sides read
NAMES = ("first", "second", "third")  # the topics' names in tables


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3-MoE. Layers repeat after `distinct` but for their routers, a layer's experts after `kinds`."""

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    distinct: int = 2
    kinds: int = 4
    groups: tuple[tuple[str, int], ...] = (("w4", 128), ("w2", 64))  # versions of experts, and columns of a group
    released: str = "BF16"  # experts' dtype in the checkpoint that it stands for

    @property
    def expert_weights(self) -> int:
        """Weights of all experts."""
        return self.layers * self.experts * 3 * self.hidden * self.inner

    @property
    def attention_weights(self) -> int:
        """Weights of all attention matrices."""
        return self.layers * 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden

    @property
    def bundle_bytes(self) -> float:
        """About what the bundle takes: experts in their versions, the embedding in BF16, the rest in `w8` and `w4`."""
        rest = self.attention_weights
        table = self.vocabulary * self.hidden
        experts = self.expert_weights * sum(BITS[name] for name, _ in self.groups)
        return (experts + (rest + table) * (8.19 + 4.19)) / 8 + 2 * table

    def gguf_bytes(self, mix: str) -> float:
        """About what a GGUF file takes."""
        rest = self.attention_weights
        table = self.vocabulary * self.hidden
        if mix == "MXFP4":
            return (self.expert_weights * 4.25 + (rest + 2 * table) * 8.5) / 8
        bits = {"Q4_K_M": 4.9, "Q2_K": 3.0, "BF16": 16.0}[mix]
        return (self.expert_weights + rest + 2 * table) * bits / 8

    def config(self) -> Row:
        """What config.json says."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "moe_intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "head_dim": self.head_dim,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "use_sliding_window": False,
            "use_cache": True,
        }


SHAPES = {
    s.name: s
    for s in (
        Shape("qwen3-moe", 48, 128, 8, 2048, 768, 32, 4, 128, 151_936),
        # gpt-oss-20b's sizes and encoding; biases, sinks, windows and the clamp are left out, on both sides.
        Shape(
            "gpt-oss", 24, 32, 4, 2880, 2880, 64, 8, 64, 201_088, groups=(("mxfp4", 32), ("w2", 64)), released="MXFP4"
        ),
        Shape(
            "four", 4, 128, 8, 2048, 768, 32, 4, 128, 151_936, groups=(("w4", 64), ("w2", 64))
        ),  # of `benchmarks.peers`
        # A quarter of Qwen3-30B-A3B, whose experts are in BF16, entropy-coded.
        Shape("quarter", 12, 128, 8, 2048, 768, 32, 4, 128, 151_936, groups=(("bf16", 0),)),
        Shape("tiny", 4, 32, 4, 256, 256, 4, 2, 64, 4096),
        Shape("deep", 48, 64, 8, 256, 128, 8, 2, 64, 4096),  # products take next to nothing: what a layer's calls take
    )
}


def text(topic: int, length: int, seed: int) -> list[int]:
    """So many ids of one topic."""
    rng = np.random.default_rng([seed, topic])
    share = np.arange(1, WORDS + 1) ** -ZIPF
    ids: list[int] = []
    while len(ids) < length:
        first = (topic * CLUSTERS + int(rng.integers(CLUSTERS))) * WORDS
        ids += (first + rng.choice(WORDS, 1 + rng.geometric(1 / STAY), p=share / share.sum())).tolist()
    return ids[:length]


def word(token: int) -> str:
    """What an id reads as."""
    return f"w{token}"


def place(token: int) -> tuple[int, int] | None:
    """The topic and the cluster (of all clusters) of a token; None for one that no text has."""
    cluster = token // WORDS
    return (cluster // CLUSTERS, cluster) if cluster < TOPICS * CLUSTERS else None


def read_rows(path: Path) -> list[Row]:
    """The rows that are kept beside a model; none where there is no such file."""
    found: list[Row] = json.loads(path.read_text()) if path.is_file() else []
    return [{"depth": 0} | row for row in found]
