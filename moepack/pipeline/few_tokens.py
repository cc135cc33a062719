"""Which experts have too few calibration tokens, and what a build says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moepack.pack.tables import FEW_TOKENS

from .work import WorkDirectory

if TYPE_CHECKING:
    from moepack.calibrate.stream import StreamedModel


def few_tokens(directory: WorkDirectory, stream: StreamedModel) -> dict[int, int]:
    """Layer -> the number of experts with fewer than FEW_TOKENS calibration tokens, where it is not 0."""
    from safetensors import safe_open

    out = {}
    for i in stream.expert_layers:
        with safe_open(directory.piece("calibrate", i, "statistics.safetensors"), framework="pt") as f:
            if n := int((f.get_tensor("tokens") < FEW_TOKENS).sum()):
                out[i] = n
    return out


def advice(few: Mapping[int, int], experts: int) -> str:
    """Make the message about experts with few tokens; empty if there are none."""
    if not few:
        return ""
    worst = max(few, key=lambda i: few[i])
    return (
        f"{sum(few.values()):,} of {experts:,} experts were reached by fewer than {FEW_TOKENS} tokens (most of them in "
        f"layer {worst}: {few[worst]}): their losses are estimated from their layers. Add text like the model's future "
        "input, or samples"
    )
