"""Where the tensors of a Qwen3-MoE checkpoint stand in a GGUF file, and of which type: names in, a list out.

Quantises and writes nothing; needs no torch. GGUF holds the experts of a layer as three tensors, gate, up
and down, [experts, rows, cols] each; a checkpoint has a tensor an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

from benchmarks.common import Row

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
MIXES = ("BF16", "Q4_K_M", "Q2_K", "MXFP4")
ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        name: in the file.
        shape: rows before columns, as NumPy has it; GGUF's own order is the reverse.
        sources: the checkpoint's tensors; more than one are stacked.
        type: the name of its ggml type.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    type: str

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Its shape in bytes of its type."""
        return quant_shape_to_byte_shape(self.shape, GGMLQuantizationType[self.type])


def tensors(config: Row, mix: str) -> list[GgufTensor]:
    """The tensors of a file, in its order.

    Args:
        config: the checkpoint's config.json, of a Qwen3-MoE with an lm_head of its own.
        mix: one of MIXES. Q4_K_M and Q2_K: as llama.cpp's own
            quantiser mixes types under these names for a model with neither 8 experts nor 70 B parameters. MXFP4: the
            experts in MXFP4 and the rest in Q8_0, as gpt-oss' files are published.
    """
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    vocabulary = config["vocab_size"]
    inner = config["moe_intermediate_size"]
    experts = config.get("num_experts") or config["num_local_experts"]
    head = config["head_dim"]
    q = head * config["num_attention_heads"]
    kv = head * config["num_key_value_heads"]
    sizes = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
    out: list[GgufTensor] = []

    def add(name: str, shape: tuple[int, ...], sources: Sequence[str], layer: int = -1) -> None:
        part = name.removeprefix(f"blk.{layer}.").removesuffix(".weight")
        kind = "F32" if len(shape) == 1 or part == "ffn_gate_inp" else type_of(part, layer, layers, mix)
        out.append(GgufTensor(name, shape, tuple(sources), kind))

    add("token_embd.weight", (vocabulary, hidden), ["model.embed_tokens.weight"])
    for i in range(layers):
        here = f"blk.{i}"
        there = f"model.layers.{i}"
        add(f"{here}.attn_norm.weight", (hidden,), [f"{there}.input_layernorm.weight"], i)
        for name, theirs in ATTENTION.items():
            add(f"{here}.{name}.weight", sizes[name], [f"{there}.self_attn.{theirs}.weight"], i)
        for one in ("q", "k"):
            add(f"{here}.attn_{one}_norm.weight", (head,), [f"{there}.self_attn.{one}_norm.weight"], i)
        add(f"{here}.ffn_norm.weight", (hidden,), [f"{there}.post_attention_layernorm.weight"], i)
        add(f"{here}.ffn_gate_inp.weight", (experts, hidden), [f"{there}.mlp.gate.weight"], i)
        for name in EXPERTS:
            theirs = name.removeprefix("ffn_").removesuffix("_exps") + "_proj"
            shape = (experts, hidden, inner) if theirs == "down_proj" else (experts, inner, hidden)
            of = [f"{there}.mlp.experts.{e}.{theirs}.weight" for e in range(experts)]
            add(f"{here}.{name}.weight", shape, of, i)
    add("output_norm.weight", (hidden,), ["model.norm.weight"])
    add("output.weight", (vocabulary, hidden), ["lm_head.weight"])
    return out


def more_bits(layer: int, layers: int) -> bool:
    """Whether Q4_K_M gives a layer's attn_v and ffn_down more bits (llama-quant.cpp, use_more_bits)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def type_of(part: str, layer: int, layers: int, mix: str) -> str:
    """The type of a matrix by its name without layer and suffix (llama-quant.cpp, llama_tensor_get_type).

    Raises:
        ValueError: for a mix that is not in MIXES.
    """
    if mix not in MIXES:
        raise ValueError(f"mix {mix!r} is unknown: there are {', '.join(MIXES)}")
    if mix == "BF16":
        return "BF16"
    if mix == "MXFP4":
        return "MXFP4" if part in EXPERTS else "Q8_0"
    if part == "output":
        return "Q6_K"
    if mix == "Q4_K_M":
        return "Q6_K" if part in ("attn_v", "ffn_down_exps") and more_bits(layer, layers) else "Q4_K"
    return {"attn_v": "Q4_K", "attn_output": "Q3_K", "ffn_down_exps": "Q3_K"}.get(part, "Q2_K")


def metadata(config: Row, context: int) -> dict[str, int | float | str]:
    """Keys of the file beside general.architecture; integers are uint32, numbers with a point float32."""
    values: dict[str, int | float] = {
        "vocab_size": config["vocab_size"],
        "context_length": context,
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope_base(config)),
    }
    return {**{f"qwen3moe.{key}": value for key, value in values.items()}, "tokenizer.ggml.model": "none"}


def rope_base(config: Row) -> float:
    """The base of rotary frequencies, wherever the version of transformers that wrote the file keeps it."""
    kept = config.get("rope_parameters") or {}
    return float(kept.get("rope_theta") or config.get("rope_theta") or 10000.0)
