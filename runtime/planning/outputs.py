"""Upper bounds, from shapes, of the bytes of outputs that the workload's measurement did not include.

These outputs are further logits, a loss, and every layer's hidden states, attentions or router logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
FUSED = ("sdpa", "flash", "flex", "paged")  # attention implementations that neither keep nor return weights


@dataclass(frozen=True, slots=True)
class Outputs:
    """The sizes of a model, and the outputs that its measurement included."""

    # `vocab`, `hidden`, `heads`, `layers`: the model's sizes; `layers` counts its decoder's
    vocab: int
    hidden: int
    heads: int
    layers: int
    routed: int  # experts of all layers
    itemsize: int  # bytes of a number in activations
    all_logits: bool  # whether the measurement included the logits of all tokens
    flags: frozenset[str]  # the names of outputs that the config turned on, and that were measured

    @classmethod
    def of(cls, model: PreTrainedModel, routed: int, all_logits: bool) -> Outputs:
        """Describe a loaded model with `routed` experts in all layers."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings()  # a packed head has no `weight`; a resized head's config is out of date
        return cls(
            getattr(head, "out_features", config.vocab_size),
            config.hidden_size,
            _heads(config),
            config.num_hidden_layers,
            routed,
            model.dtype.itemsize,
            all_logits,
            frozenset(name for name in FLAGS if _is_on(config, {}, name)),
        )

    def bytes(self, config: PreTrainedConfig, given: Mapping[str, Any], tokens: int, length: int, batch: int) -> int:
        """Return the bytes of a pass's outputs that were not measured.

        `given` are the pass's arguments by name, with defaults. `tokens` and `length` are the new tokens and the cached
        tokens of each of `batch` sequences.
        """
        text = config.get_text_config()
        total = tokens * batch
        hidden, attentions, router = (name not in self.flags and _is_on(text, given, name) for name in FLAGS)
        size = self._logits(given, tokens) * batch
        if hidden:
            size += (self.layers + 1) * total * self.hidden * self.itemsize
        if attentions and not str(text._attn_implementation).startswith(FUSED):
            size += self.layers * self.heads * total * length * self.itemsize
        if router:  # in float32, with a layer's probabilities for the load balancing loss
            size += 4 * total * (self.routed + 2 * -(-self.routed // self.layers))
        return size

    def _logits(self, given: Mapping[str, Any], tokens: int) -> int:
        """Return a sequence's bytes for further logits, and for a loss (a float32 copy and log probabilities)."""
        kept = given.get("logits_to_keep", tokens)
        kept = kept.numel() if isinstance(kept, Tensor) else min(kept or tokens, tokens)
        size = 0
        if not self.all_logits and "logits_to_keep" in given:  # without that argument a model returns all
            size += max(0, kept - 1) * self.vocab * self.itemsize
        if given.get("labels") is not None:
            size += kept * self.vocab * (4 + 4 * (self.itemsize < 4))
        return size


def _heads(config: PreTrainedConfig) -> int:
    """Return the number of attention heads; of layers that differ, the most."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return max(int(layer.num_attention_heads) for layer in layers)


def _is_on(config: PreTrainedConfig, given: Mapping[str, Any], name: str) -> bool:
    wanted = given.get(name)
    if wanted is None:
        wanted = getattr(config, name, None)
    return wanted is not None and wanted is not False  # a number or a list names hidden states by their index
