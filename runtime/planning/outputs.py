"""What a forward pass is asked to return beyond what was measured for the workload: more logits, a loss, every layer's
hidden states, attentions or router logits. Bounds from above, by shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
FUSED = ("sdpa", "flash", "flex", "paged")  # attention that keeps no weights, and returns none


@dataclass(frozen=True, slots=True)
class Outputs:
    """Of a model as it was measured.

    Attributes:
        vocab, hidden, heads, layers: of the model; layers of its decoder.
        routed: experts of all layers.
        itemsize: bytes of a number in activations.
        all_logits: whether logits of all tokens were measured.
        flags: the outputs that were on in the config, and so were measured.
    """

    vocab: int
    hidden: int
    heads: int
    layers: int
    routed: int
    itemsize: int
    all_logits: bool
    flags: frozenset[str]

    @classmethod
    def of(cls, model: Any, routed: int, all_logits: bool) -> Outputs:
        """Of a loaded model with so many experts in all layers."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings()  # a packed map has no `weight`; a resized one is not of the config's size
        return cls(
            getattr(head, "out_features", config.vocab_size),
            config.hidden_size,
            config.num_attention_heads,
            config.num_hidden_layers,
            routed,
            model.dtype.itemsize,
            all_logits,
            frozenset(name for name in FLAGS if _is_on(getattr(config, name, None))),
        )

    def bytes(self, config: Any, given: Mapping[str, Any], tokens: int, length: int, batch: int) -> int:
        """Bytes that a pass takes for them.

        Args:
            config: the model's, as it is now.
            given: the pass's arguments by name, with defaults.
            tokens, length, batch: of the pass: tokens and cached tokens of each sequence, sequences.
        """
        text, total = config.get_text_config(), tokens * batch
        hidden, attentions, router = (name not in self.flags and self._asked(text, given, name) for name in FLAGS)
        size = self._logits(given, tokens) * batch
        if hidden:
            size += (self.layers + 1) * total * self.hidden * self.itemsize
        if attentions and not str(text._attn_implementation).startswith(FUSED):
            size += self.layers * self.heads * total * length * self.itemsize
        if router:  # in float32, and a layer's probabilities for the loss that balances them
            size += 4 * total * (self.routed + 2 * -(-self.routed // self.layers))
        return size

    def _asked(self, config: Any, given: Mapping[str, Any], name: str) -> bool:
        wanted = given.get(name)
        return _is_on(getattr(config, name, None) if wanted is None else wanted)

    def _logits(self, given: Mapping[str, Any], tokens: int) -> int:
        """Of a sequence: those of more tokens than the last, and what a loss makes of logits in float32: a copy of
        narrower ones and their logarithmic probabilities."""
        kept = given.get("logits_to_keep", tokens)
        kept = kept.numel() if isinstance(kept, Tensor) else min(kept or tokens, tokens)
        size = 0
        if not self.all_logits and "logits_to_keep" in given:  # without that argument there always are all
            size += max(0, kept - 1) * self.vocab * self.itemsize
        if given.get("labels") is not None:
            size += kept * self.vocab * (4 + 4 * (self.itemsize < 4))
        return size


def _is_on(wanted: Any) -> bool:
    """A number or a list names hidden states by their index."""
    return wanted is not None and wanted is not False
