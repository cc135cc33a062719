"""Count how often routers chose each expert, beside a policy's own counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.runtime.experts.handles import LayerExperts


class RoutedCounts:
    """Counts since the start, on the experts' device; a `RoutingCounter`."""

    def __init__(self, layers: Sequence[LayerExperts]) -> None:
        most = max((layer.of.layer.experts for layer in layers), default=0)
        device = layers[0].of.device if layers else torch.device("cpu")
        self._counts = torch.zeros(len(layers), most + 1, dtype=torch.int64, device=device)
        self._experts = [layer.of.layer.experts for layer in layers]

    def add(self, position: int, index: Tensor, weights: Tensor) -> None:
        """Count the routing of one layer, the `position`-th of those with experts; `index`: [tokens, top_k]."""
        flat = index.reshape(-1).clamp(max=self._experts[position])
        self._counts[position].scatter_add_(0, flat, torch.ones_like(flat))

    def counts(self) -> list[list[int]]:
        """Return the counts, [layers][experts]."""
        return [row[:n] for row, n in zip(self._counts.cpu().tolist(), self._experts, strict=True)]
