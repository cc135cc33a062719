"""Run Llama-4's experts through transformers' experts interface.

Llama-4's own code runs every expert on every token, times a score that is 0 except for the token's own expert, and sums
the outputs. Here an expert runs on its own tokens alone, times their scores. These inputs are the same to the bit; the
inputs left out are zeros, whose outputs are zeros. The score multiplies the input, so `top_k_weights` are 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, grouped_mm_experts_forward
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from moepack.pack.errors import InputError

# transformers 5.24.0 reads this attribute of the text model's output, which lacks it: passes over text alone fail.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None


class Experts(Llama4TextExperts):
    """Llama-4's experts, called as in other families."""

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated = True, True
    _is_expert_parallel = False
    _apply_gate = _default_apply_gate
    config: Any

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # type: ignore[override]
        """Run the experts on [tokens, hidden] by the router's choice [tokens, 1]; return [tokens, hidden]."""
        run = ALL_EXPERTS_FUNCTIONS.get_interface(self.config._experts_implementation, grouped_mm_experts_forward)
        out: Tensor = run(self, hidden_states, top_k_index, top_k_weights)
        return out


class Moe(Llama4TextMoe):
    """Llama-4's MoE block, with each expert run on its own tokens alone."""

    experts: Any

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the block as the original does: [batch, length, hidden] to [tokens, hidden] and the router's logits."""
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden)
        score, index = scores.topk(1, dim=1)
        routed = self.experts(hidden * score, index, torch.ones_like(score))
        out: Tensor = self.shared_expert(hidden)
        out.add_(routed)
        return out, logits


def behind_interface(block: Any) -> None:
    """Change the classes of a Llama-4 block and its experts, so that it calls them through the interface.

    Raises:
        InputError: where the router chooses several experts for a token; no published model does.
    """
    if block.top_k != 1:
        raise InputError(f"llama4_text with num_experts_per_tok {block.top_k} is not supported: only 1 is")
    block.__class__, block.experts.__class__ = Moe, Experts
    block.experts.config = block.shared_expert.config
