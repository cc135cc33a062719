"""Make some experts of a layer ready for the quantisers: their weights on the device, their tokens, their forward.

The tokens an expert learns from, is compared on and is measured on are chosen deterministically. Neighbouring tokens
resemble one another, so whole clusters are chosen: windows of text if there are enough, or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moepack.pack.isa import has_bf16
from moepack.pack.tables import FEW_TOKENS
from moepack.quantize.expert_batch import ExpertBatch, ExpertForward, ExpertTokens, Settings

from .experts import ExpertWeights, finish, hidden
from .forward import Observation
from .held import RowGather

if TYPE_CHECKING:
    from moepack.families.interface import ExpertsModule

HELD_OUT = 8  # one cluster in eight is held out for comparing methods
ASIDE = 16  # an expert with plenty of tokens is measured on one cluster in ASIDE, and learns from the others
PLENTY = 16  # tokens per column of the expert's widest matrix; fitted to a 16th fewer, its loss is 0.2 % higher
BLOCK = 32  # tokens of a block
WINDOWS = 16  # from this number of windows on, windows are the clusters
LAYER = 4096  # tokens that stand for the layer in an expert's second moments


def gather_batch(
    module: ExpertsModule,
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
    own = range(len(experts))

    def both(matrix: int) -> Tensor:
        return torch.stack([weights.matrix(e, matrix).to(device, torch.float32) for e in own])

    return ExpertBatch(
        experts,
        (both(0), both(1)),
        tuple((_float(weights.bias(e, 0), device), _float(weights.bias(e, 1), device)) for e in own),
        tuple(expert_tokens(observation, layer, e, widest, PLENTY * widest, settings.loss_tokens) for e in experts),
        RowGather(observation.inputs),
        layer.learn,
        ExpertForward(partial(hidden, module), partial(finish, module)),
        observation.inputs.dtype == torch.bfloat16 and has_bf16(device),
        layer.block,
        HELD_OUT,
    )


def _float(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, torch.float32)


@dataclass(frozen=True)
class LayerTokens:
    """Tokens that stand for a layer, the same for all its experts: int64 indexes."""

    learn: Tensor  # at most LAYER evenly spaced tokens, none of them held out
    compare: Tensor  # at most FEW_TOKENS evenly spaced tokens, all of them held out
    block: int  # tokens of a cluster

    @staticmethod
    def of(observation: Observation) -> LayerTokens:
        """Choose the tokens from an observation."""
        total = len(observation.inputs)
        block = max(1, min(BLOCK, total // (2 * HELD_OUT)))
        if total // max(1, observation.length) >= WINDOWS:
            block = observation.length
        tokens = torch.arange(total)
        held = _is_held_out(tokens, block)
        return LayerTokens(_spaced(tokens[~held], LAYER), _spaced(tokens[held], FEW_TOKENS), block)


def expert_tokens(
    observation: Observation, layer: LayerTokens, expert: int, enough: int, plenty: int, most: int
) -> ExpertTokens:
    """Choose an expert's tokens. With fewer than `enough` it is starved. It is measured on at most `most` of its own.

    A starved expert learns from its tokens that are not held out; methods are compared on those held out, filled up to
    FEW_TOKENS with the layer's. An expert with `plenty` is measured on one cluster in ASIDE and learns from the others.
    """
    token, slot = torch.where(observation.experts == expert)
    gates = observation.gates[token, slot]
    starved = len(token) < enough
    held = _is_held_out(token, layer.block)
    aside = token // layer.block % ASIDE == ASIDE - 1
    rich = not starved and len(token) >= plenty and bool(aside.any())
    unlearnt = torch.zeros_like(held)
    if starved:
        unlearnt = held
    elif rich:
        unlearnt = aside
    candidates = torch.where(unlearnt)[0] if rich else torch.arange(len(token))
    chosen = _spaced(candidates, most)
    others = layer.compare[~torch.isin(layer.compare, token)]
    own = token[held]
    return ExpertTokens(
        learn=token[~unlearnt],
        compare=torch.cat([own, layer.compare[: max(0, FEW_TOKENS - len(own))]]) if starved else own,
        measure=token[chosen],
        gates=gates[chosen],
        learnt=~unlearnt[chosen],
        others=others,
        gate_square=float(gates.square().mean() if len(token) else observation.gates.square().mean()),
        starved=starved,
        rich=rich,
    )


def _is_held_out(tokens: Tensor, block: int) -> Tensor:
    return tokens // block % HELD_OUT == HELD_OUT - 1


def _spaced(tokens: Tensor, most: int) -> Tensor:
    if len(tokens) <= most:
        return tokens
    return tokens[torch.linspace(0, len(tokens) - 1, most).long()]
