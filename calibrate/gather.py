"""Some experts of a layer made ready for the quantisers: their weights on the device, their tokens, their forward.

What is then made of them is `moepack.quantize.expert_batch`'s.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moepack.pack.isa import has_bf16
from moepack.quantize.expert_batch import ExpertBatch, ExpertForward, Settings

from .experts import ExpertWeights, finish, hidden
from .forward import Observation
from .held import RowGather
from .tokens import HELD_OUT, PLENTY, LayerTokens, expert_tokens


def gather_batch(
    module: Any,
    weights: ExpertWeights,
    experts: range,
    observation: Observation,
    settings: Settings,
    device: torch.device,
) -> ExpertBatch:
    """Gather an expert batch on `device`.

    `experts` are the indexes of `weights`' experts in the layer; `module` is the layer's experts module, used for its
    activation only.
    """
    layer = LayerTokens.of(observation)
    widest = max(m.cols for m in weights.layer.matrices)
    enough = settings.min_tokens or widest
    own = range(len(experts))

    def both(matrix: int) -> Tensor:
        return torch.stack([weights.matrix(e, matrix).to(device, torch.float32) for e in own])

    return ExpertBatch(
        experts,
        (both(0), both(1)),
        tuple((_float(weights.bias(e, 0), device), _float(weights.bias(e, 1), device)) for e in own),
        tuple(expert_tokens(observation, layer, e, enough, PLENTY * widest, settings.loss_tokens) for e in experts),
        RowGather(observation.inputs),
        layer.learn,
        ExpertForward(partial(hidden, module), partial(finish, module)),
        observation.inputs.dtype == torch.bfloat16 and has_bf16(device),
        layer.block,
        HELD_OUT,
    )


def _float(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, torch.float32)
