"""Which tokens an expert learns from, is compared on and is measured on. Indexes only; deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class ExpertTokens:
    """One expert's tokens: int64 indexes.

    Attributes:
        count: tokens routed to it.
        learn: what its second moments are made of: all of them, or, where `starved`, those that are not held out.
        learn_gates: gate weights of `learn`, float32.
        compare: for a starved expert, what its methods are compared on: its own held-out tokens, then the layer's.
        measure: what its losses are measured on: its own, evenly spaced, then others where it has fewer than FEW.
        gates: gate weights of `measure`, float32; for others' tokens the mean of its own, or the layer's.
        starved: fewer tokens than its methods need to be trusted.
    """

    count: int
    learn: Tensor
    learn_gates: Tensor
    compare: Tensor
    measure: Tensor
    gates: Tensor
    starved: bool

    @staticmethod
    def of(observation: Observation, layer: LayerTokens, expert: int, enough: int, most: int) -> ExpertTokens:
        """Pick them: `enough` tokens are not starved, `most` are measured."""
        token, slot = torch.where(observation.experts == expert)
        starved = len(token) < enough
        held = is_held_out(token, layer.block)
        own = token[held]
        chosen = _spaced(torch.arange(len(token)), most)
        others = layer.any[: max(0, FEW - len(token))]
        gates = observation.gates[token, slot]
        mean = gates.mean() if len(token) else observation.gates.mean()
        return ExpertTokens(
            len(token),
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
