"""LongCat-Flash: some of the experts that its router chooses among return their input and have no weights.

transformers' module has rows for them in `gate_up_proj` that no published checkpoint fills. Here the parameter holds
the experts with weights alone; the others' share of the input is added behind them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from .interface import ExpertsModule, run
from .interface import behind_interface as behind


def forward(self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts. An index past the experts with weights means no expert."""
    identity = top_k_index >= self.num_experts
    out = run(self, hidden_states, top_k_index.clamp(max=self.num_experts), top_k_weights)
    share = top_k_weights.masked_fill(~identity, 0).sum(-1, keepdim=True)
    return out + (hidden_states * share).to(out.dtype)


def behind_interface(experts: Any, config: PreTrainedConfig) -> None:
    """Put LongCat-Flash's experts behind the interface."""
    experts.num_experts = experts.num_routed_experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[: experts.num_experts].clone())
    experts.experts_without_weights = experts.zero_expert_num
    behind(experts, config, forward=forward, _is_expert_parallel=True)
