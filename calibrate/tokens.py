"""Which tokens an expert learns from, is compared on and is measured on. Indexes only; deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.quantize.expert_batch import ExpertTokens

from .forward import Observation

HELD_OUT = 8  # one block of tokens in eight is held out where methods are compared
BLOCK = 32  # tokens of a block: neighbours resemble one another, so blocks and not tokens are held out
FEW = 256  # tokens that suffice to tell methods apart, or to measure an error
LAYER = 4096  # tokens that stand for the layer in an expert's second moments


@dataclass(frozen=True)
class LayerTokens:
    """A layer's tokens apart from any expert: int64 indexes.

    Attributes:
        learn: at most LAYER evenly spaced tokens, none of them held out.
        compare: at most FEW evenly spaced tokens, all of them held out.
        any: at most FEW evenly spaced tokens.
        block: tokens of a block.
    """

    learn: Tensor
    compare: Tensor
    any: Tensor
    block: int

    @staticmethod
    def of(observation: Observation) -> LayerTokens:
        """Pick them from an observation."""
        total = len(observation.inputs)
        block = max(1, min(BLOCK, total // (2 * HELD_OUT)))
        tokens = torch.arange(total)
        held = is_held_out(tokens, block)
        return LayerTokens(_spaced(tokens[~held], LAYER), _spaced(tokens[held], FEW), _spaced(tokens, FEW), block)


def expert_tokens(observation: Observation, layer: LayerTokens, expert: int, enough: int, most: int) -> ExpertTokens:
    """Pick an expert's tokens: with `enough` it is not starved, at most `most` of its own are measured.

    A starved expert learns from those of its tokens that are not held out, and is compared on the others, then on the
    layer's up to FEW. One with fewer than FEW tokens is measured on others' as well; their gate weights are the mean of
    its own, or the layer's where it has none.
    """
    token, slot = torch.where(observation.experts == expert)
    starved = len(token) < enough
    held = is_held_out(token, layer.block)
    own = token[held]
    chosen = _spaced(torch.arange(len(token)), most)
    others = layer.any[: max(0, FEW - len(token))]
    gates = observation.gates[token, slot]
    mean = gates.mean() if len(token) else observation.gates.mean()
    return ExpertTokens(
        token[~held] if starved else token,
        gates[~held] if starved else gates,
        torch.cat([own, layer.compare[: max(0, FEW - len(own))]]) if starved else own,
        torch.cat([token[chosen], others]),
        torch.cat([gates[chosen], mean.expand(len(others))]),
        starved,
    )


def is_held_out(tokens: Tensor, block: int) -> Tensor:
    """Which tokens are held out, bool."""
    return tokens // block % HELD_OUT == HELD_OUT - 1


def _spaced(tokens: Tensor, most: int) -> Tensor:
    """At most `most` of them, evenly spaced."""
    if len(tokens) <= most:
        return tokens
    return tokens[torch.linspace(0, len(tokens) - 1, most).long()]
