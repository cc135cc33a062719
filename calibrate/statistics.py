"""What the policies want to know about a layer's routing, from what its experts saw. Pure: tensors in, tensors out."""

from __future__ import annotations

import torch
from torch import Tensor

from .forward import Observation


def routing_statistics(observation: Observation, experts: int) -> dict[str, Tensor]:
    """Routing statistics of one layer.

    The first half of a window stands for a prompt, the second for its continuation: policies that place experts after
    the prefill (context-aware-cxl-ndp, section 3.2) are judged by how well the one foretells the other.

    Returns:
        tokens: int64 [experts], tokens routed to each expert.
        gate_sum: float32 [experts], the sum of their gate weights.
        prefill_counts, decode_counts: int32 [windows, experts], tokens of each half of each window.
        prefill_gates: float32 [windows, experts], sums of gate weights over the first half.
        coactivation: int64 [experts, experts], tokens that went to both; the diagonal is `tokens`.
        reuse: float32 [], the share of a token's experts that the token before it used too.
    """
    chosen = observation.experts.long()
    top_k, length = chosen.shape[1], observation.length
    windows, half = len(chosen) // length, length // 2
    by_window = chosen.view(windows, length, top_k)
    gates = observation.gates.view(windows, length, top_k)
    hot = torch.zeros(len(chosen), experts).scatter_(1, chosen, 1.0)
    onehot = hot.view(windows, length, experts)
    shared = (onehot[:, 1:] * onehot[:, :-1]).sum(-1).mean() / top_k if length > 1 else torch.zeros(())
    prefill_gates = torch.zeros(windows, experts)
    prefill_gates.scatter_add_(1, by_window[:, :half].flatten(1), gates[:, :half].flatten(1))
    return {
        "tokens": torch.bincount(chosen.flatten(), minlength=experts),
        "gate_sum": torch.zeros(experts).scatter_add_(0, chosen.flatten(), observation.gates.flatten()),
        "prefill_counts": onehot[:, :half].sum(1).to(torch.int32),
        "decode_counts": onehot[:, half:].sum(1).to(torch.int32),
        "prefill_gates": prefill_gates,
        "coactivation": _coactivation(hot),
        "reuse": shared.float(),
    }


def _coactivation(hot: Tensor) -> Tensor:
    """Counts of pairs; float64, because float32 stops counting at 2**24."""
    out = torch.zeros(hot.shape[1], hot.shape[1], dtype=torch.float64)
    for part in hot.split(1 << 16):
        out += part.T @ part
    return out.long()
