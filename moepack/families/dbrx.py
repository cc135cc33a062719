"""DBRX: its experts are rows of three matrices, which become the interface's two stacks as a checkpoint is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import Concatenate, ConversionOps, Transpose, WeightConverter

from .interface import ExpertsModule, run
from .interface import behind_interface as behind


class Unstack(ConversionOps):
    """[experts * inner, hidden] to [experts, inner, hidden]."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: object
    ) -> dict[str, Any]:
        """Reshape every source's tensor."""
        tensors = {n: x[0] if isinstance(x, list) else x for n, x in input_dict.items()}
        return {n: x.view(self.experts, -1, x.shape[-1]) for n, x in tensors.items()}


def conversions(experts: ExpertsModule) -> list[WeightConverter]:
    """Return the conversions by which transformers' loader stacks a checkpoint's matrices for the interface."""
    apart = Unstack(experts.num_experts)
    first = [r"\.experts\.mlp\.w1$", r"\.experts\.mlp\.v1$"]
    return [
        WeightConverter(first, r".experts.gate_up_proj", [apart, Concatenate(dim=1)]),
        WeightConverter([r"\.experts\.mlp\.w2$"], r".experts.down_proj", [apart, Transpose(1, 2)]),
    ]


def forward(self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts on hidden states [batch, length, hidden]."""
    return run(self, hidden_states.flatten(0, -2), top_k_index, top_k_weights).view_as(hidden_states)


def behind_interface(experts: Any, config: PreTrainedConfig) -> None:
    """Replace a DBRX layer's three matrices, empty or not, by the interface's two stacks."""
    w1, v1, w2 = (p.detach().view(experts.num_experts, -1, experts.hidden_size) for p in experts.mlp.parameters())
    experts.act_fn = experts.mlp.activation_fn
    del experts.mlp
    experts.gate_up_proj = nn.Parameter(torch.cat([w1, v1], dim=1))
    experts.down_proj = nn.Parameter(w2.transpose(1, 2).contiguous())
    behind(experts, config, forward=forward)
