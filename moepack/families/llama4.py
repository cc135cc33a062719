"""Llama-4's experts behind transformers' experts interface.

Its own code gives every expert every token, times a score that is 0 but for the token's expert, and adds up. Here an
expert gets its tokens alone, times their scores: what it reads is the same to the bit, and what the others would have
made of zeros is zero. As the score stands before the expert, the weight behind it is 1. Decides nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, grouped_mm_experts_forward
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from moepack.pack.errors import InputError

# transformers 5.24.0 reads this attribute of the text model's output, which lacks it: passes over text alone failed.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None


class Experts(Llama4TextExperts):
    """The experts, called as every family's are."""

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated = True, True
    _is_expert_parallel = False
    _apply_gate = _default_apply_gate
    config: Any

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # type: ignore[override]
        """The experts interface's: [tokens, hidden] and the router's choice [tokens, 1] to [tokens, hidden]."""
        run = ALL_EXPERTS_FUNCTIONS.get_interface(self.config._experts_implementation, grouped_mm_experts_forward)
        out: Tensor = run(self, hidden_states, top_k_index, top_k_weights)
        return out


class Moe(Llama4TextMoe):
    """The block, with the experts called for their own tokens."""

    experts: Any

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """As the original's: [batch, length, hidden] to [tokens, hidden] and the router's logits."""
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden)
        score, index = scores.topk(1, dim=1)
        routed = self.experts(hidden * score, index, torch.ones_like(score))
        out: Tensor = self.shared_expert(hidden)
        out.add_(routed)
        return out, logits


def behind_interface(block: Any) -> None:
    """Turn a block of Llama-4 into one whose experts are called through the interface.

    Raises:
        InputError: where a token has several experts, which no published model has.
    """
    if block.top_k != 1:
        raise InputError(
            f"llama4_text with num_experts_per_tok {block.top_k} is not supported: known are models with 1"
        )
    block.__class__, block.experts.__class__ = Moe, Experts
    block.experts.config = block.shared_expert.config
