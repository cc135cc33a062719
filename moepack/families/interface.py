"""Put experts that have code of their own behind transformers' experts interface, by another class for their module.

Enough by itself for experts that are called as the interface calls them and have its parameters: `gate_up_proj` and
`down_proj` in its layout, `act_fn` or `_apply_gate`. Files beside this one adapt experts that differ more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, grouped_mm_experts_forward


class ExpertsModule(nn.Module):
    """For annotations: what the interface reads of a module of experts, whose class is a family's own."""

    config: PreTrainedConfig
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]


def run(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a module's experts by the interface: hidden states [tokens, hidden], experts and gates [tokens, top_k]."""
    forward = ALL_EXPERTS_FUNCTIONS.get_interface(self.config._experts_implementation, grouped_mm_experts_forward)
    out: Tensor = forward(self, hidden_states, top_k_index, top_k_weights)
    return out


@functools.cache
def _behind(kind: Any, layout: tuple[tuple[str, Any], ...]) -> Any:
    own = {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
        "_is_expert_parallel": False,
        "forward": run,
    }
    if not hasattr(kind, "_apply_gate"):
        own["_apply_gate"] = _default_apply_gate
    return type("Experts", (kind,), {**own, "__module__": __name__, **dict(layout)})


def behind_interface(module: Any, config: Any, **layout: Any) -> None:
    """Change the class of an experts module to one that the interface runs.

    Args:
        module: the experts; its parameters stay.
        config: the configuration of the model part that they belong to, which names the implementation.
        layout: attributes of the class that differ from an untransposed gated layout without biases: `is_transposed`,
            `has_bias`, a `forward`.
    """
    kind: Any = type(module)
    module.__class__ = _behind(kind, tuple(layout.items()))
    module.config = config
