"""Run Llama-4's experts through transformers' experts interface.

Llama-4's own code runs every expert on every token, times a score that is 0 except for the token's own expert, and sums
the outputs. Here an expert runs on its own tokens alone, times their scores. These inputs are the same to the bit; the
inputs left out are zeros, whose outputs are zeros. The score multiplies the input, so `top_k_weights` are 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from moepack.pack.errors import InputError

from .interface import behind_interface as behind

# transformers 5.24.0 reads this attribute of the text model's output, which lacks it: passes over text alone fail.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None


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


def behind_interface(block: Llama4TextMoe, config: PreTrainedConfig) -> None:
    """Change the classes of a Llama-4 block and its experts, so that it calls them through the interface.

    Raises:
        InputError: where the router chooses several experts for a token; no published model does.
    """
    if block.top_k != 1:
        raise InputError(f"llama4_text with num_experts_per_tok {block.top_k} is not supported: only 1 is")
    block.__class__ = Moe
    behind(block.experts, config, is_transposed=True)
