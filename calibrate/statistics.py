"""Routing statistics of a layer, for policies. Pure: tensors in, tensors out."""

from __future__ import annotations

import torch
from torch import Tensor

from .forward import Observation

_AT_ONCE = 1 << 14  # tokens of a chunk, at least one window; each token takes a row of all experts


def routing_statistics(observation: Observation, experts: int) -> dict[str, Tensor]:
    """Routing statistics of one layer.

    The first half of a window stands for a prompt, the second for its continuation: policies that place experts after
    the prefill (context-aware-cxl-ndp, section 3.2) are judged by how well the first predicts the second.

    Returns:
        tokens: int64 [experts], tokens routed to each expert.
        gate_sum: float32 [experts], the sum of their gate weights.
        prefill_counts, decode_counts: int32 [windows, experts], tokens of each half of each window.
        prefill_gates: float32 [windows, experts], sums of gate weights over the first half.
        coactivation: int64 [experts, experts], tokens that went to both; the diagonal is `tokens`.
        reuse: float32 [], the share of a token's experts that the token before it used too.
    """
    top_k = observation.experts.shape[1]
    length = observation.length
    windows = len(observation.experts) // length
    half = length // 2
    out = {
        "tokens": torch.zeros(experts, dtype=torch.int64),
        "gate_sum": torch.zeros(experts),
        "prefill_counts": torch.zeros(windows, experts, dtype=torch.int32),
        "decode_counts": torch.zeros(windows, experts, dtype=torch.int32),
        "prefill_gates": torch.zeros(windows, experts),
    }
    pairs = torch.zeros(experts, experts, dtype=torch.float64)  # float32 stops counting at 2**24
    shared = 0
    step = max(1, _AT_ONCE // length)
    for first in range(0, windows, step):
        here = slice(first, min(first + step, windows))
        rows = slice(here.start * length, here.stop * length)
        chosen = observation.experts[rows].long()
        gate = observation.gates[rows]
        hot = torch.zeros(len(chosen), experts + 1).scatter_(1, chosen, 1.0)[:, :experts]
        gate = gate.masked_fill(chosen == experts, 0)
        by_window = chosen.clamp(max=experts - 1).view(-1, length, top_k)
        gates = gate.view(-1, length, top_k)
        onehot = hot.reshape(-1, length, experts)
        out["tokens"] += torch.bincount(chosen.flatten(), minlength=experts)[:experts]
        out["gate_sum"].scatter_add_(0, by_window.flatten(), gate.flatten())
        out["prefill_counts"][here] = onehot[:, :half].sum(1).to(torch.int32)
        out["decode_counts"][here] = onehot[:, half:].sum(1).to(torch.int32)
        out["prefill_gates"][here].scatter_add_(1, by_window[:, :half].flatten(1), gates[:, :half].flatten(1))
        for part in hot.split(_AT_ONCE):
            pairs += part.T @ part
        shared += int((onehot[:, 1:] * onehot[:, :-1]).sum(dtype=torch.float64))
    reuse = shared / (windows * (length - 1) * top_k) if length > 1 else 0.0
    return out | {"coactivation": pairs.long(), "reuse": torch.tensor(reuse, dtype=torch.float32)}
