"""The bytes that go from one decoder layer to the next in calibration, by a configuration's numbers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .model_class import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def between_layers(config: PreTrainedConfig, length: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a window of `length` tokens: its hidden states, and upper bounds of all that passes beside them.

    Hyper-connections multiply hidden states (`hc_mult`). Beside them pass an indexer's choice for layers that share it,
    a router's state, earlier layers' outputs for residuals over blocks of layers, and keys and values that are shared.
    """
    text = config.get_text_config()
    facts = text.to_dict()
    layers = (facts.get("per_layer_config") or {}).values()

    def number(name: str) -> int:
        """The largest of any layer; 0 if the configuration has none."""
        return max(found.get(name) or 0 for found in (facts, *layers))

    hidden = length * text.hidden_size * itemsize
    beside = length * number("router_hidden_size") * itemsize
    if "shared" in (facts.get("indexer_types") or ()):
        beside += length * min(length, number("index_topk")) * 4
    if every := number("n_layers_per_attn_res_block"):
        beside += 2 * hidden * (1 + decoder_layers(config) // every)  # the embeddings' output, and all blocks so far
    if number("num_kv_shared_layers"):  # a pair for each of two kinds of attention
        beside += 4 * length * number("head_dim") * number("num_key_value_heads") * itemsize
    if facts.get("kv_source_layers"):  # latent pairs, with and without positions
        beside += 2 * length * (number("kv_lora_rank") + number("qk_rope_head_dim")) * itemsize
    return hidden * max(1, number("hc_mult")), beside
