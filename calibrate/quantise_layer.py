"""One layer's experts at every width, and what each width costs on the tokens routed to them.

Second moments are made here, from the observed inputs, for a few experts at a time: a bound on their bytes holds
whatever the number of experts. The gate and up projections read the same inputs and share one matrix of moments; every
width of a projection is quantised from the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.pack.spec import Version
from moepack.quantize.grid import Quantised, dequantise
from moepack.quantize.methods import NEEDS_MOMENTS, fallbacks, method_for, quantise

from .experts import ExpertWeights, finish, hidden
from .forward import Observation

_HELD_OUT = 8  # one block of tokens in eight is held out where methods are compared
_BLOCK = 32  # tokens of a block
_FEW = 256  # tokens to compare methods on, or to measure an unrouted expert with, where its own are too few


@dataclass(frozen=True, slots=True)
class Settings:
    """How to quantise.

    Attributes:
        method: "gptq", "hqq" or "rtn".
        versions: the affine versions wanted.
        min_tokens: an expert with fewer tokens is starved: its method is chosen on held-out tokens. 0 means as many
            as its widest matrix has columns: below a quarter of that GPTQ was seen to lose to rounding to nearest.
        loss_tokens: the most tokens an expert's losses are measured on, evenly spaced among its own. An expert with
            fewer than 256 is measured on other tokens of the layer as well, up to 256.
        group_bytes: the most bytes of second moments and working copies in memory at once; one expert's at the least.
    """

    method: str
    versions: tuple[Version, ...]
    min_tokens: int = 0
    loss_tokens: int = 4096
    group_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Loss:
    """What a version costs an expert, on the calibration tokens routed to it.

    Attributes:
        mse: mean squared error of the expert's output against its BF16 output.
        relative: squared error over squared output.
        gated: mean of gate**2 times squared error: the error as the layer's output sees it.
    """

    mse: float
    relative: float
    gated: float


@dataclass(frozen=True, slots=True)
class ExpertVersion:
    """One expert at one width: its matrices at `index` of a batch, the method that made it, and its loss."""

    expert: int
    version: Version
    quantised: tuple[Quantised, Quantised]
    method: str
    loss: Loss
    index: int


@dataclass(frozen=True)
class _Tokens:
    """An expert's tokens: those it learns from, those it is compared on, those it is measured on, and their gates."""

    learn: Tensor
    compare: Tensor
    measure: Tensor
    gates: Tensor
    starved: bool


def quantise_layer(
    module: Any, weights: ExpertWeights, observation: Observation, settings: Settings, device: torch.device
) -> Iterator[list[ExpertVersion]]:
    """Quantise a layer's experts in order; yields, for each, one entry a version of `settings.versions`.

    Args:
        module: the layer's experts module, for its gate activation only.
        weights: its weights, from the checkpoint.
        observation: what the calibration tokens brought to it.
        settings: how.
        device: where to compute.
    """
    matrices = weights.layer.matrices
    # In float32: moments, and of each weight itself, its dequantised value and two temporaries.
    per_expert = 4 * sum(m.cols * m.cols + 4 * m.weights for m in matrices)
    step = max(1, min(weights.layer.experts, settings.group_bytes // per_expert))
    enough = settings.min_tokens or max(m.cols for m in matrices)
    for start in range(0, weights.layer.experts, step):
        group = range(start, min(start + step, weights.layer.experts))
        yield from _quantise_group(module, weights, observation, settings, device, group, enough)


def _quantise_group(
    module: Any,
    weights: ExpertWeights,
    observation: Observation,
    settings: Settings,
    device: torch.device,
    group: range,
    enough: int,
) -> Iterator[list[ExpertVersion]]:
    tokens = [_tokens_of(observation, e, enough, settings) for e in group]
    dense = [[weights.matrix(e, m).to(device, torch.float32) for m in range(2)] for e in group]
    biases = [[_float(weights.bias(e, m), device) for m in range(2)] for e in group]
    needs_moments = any(method_for(settings.method, v) in NEEDS_MOMENTS for v in settings.versions)
    moments: list[list[Tensor]] = [[], []]
    for t, w, b in zip(tokens, dense, biases, strict=True) if needs_moments else ():
        x = observation.inputs[t.learn].to(device, torch.float32)
        for m, inputs in enumerate((x, hidden(module, x, w[0], b[0]))):
            moments[m].append(second_moments(inputs))
    stacked = [torch.stack(m) if needs_moments else None for m in moments]
    batch = [torch.stack([w[m] for w in dense]) for m in range(2)]
    results: list[list[ExpertVersion]] = [[] for _ in group]
    for version in settings.versions:
        method = method_for(settings.method, version)
        made = [quantise(method, batch[m], stacked[m], version) for m in range(2)]
        names = [method] * len(group)
        starved = [i for i, t in enumerate(tokens) if t.starved] if method in NEEDS_MOMENTS else []
        if starved:
            made, names = _choose(module, observation, version, tokens, dense, biases, starved, made, names, settings)
        values = [dequantise(q, version) for q in made]
        for i, e in enumerate(group):
            x = observation.inputs[tokens[i].measure].to(device, torch.float32)
            quantised_weights = [values[0][i], values[1][i]]
            loss = _loss(module, x, tokens[i].gates.to(device), dense[i], quantised_weights, biases[i])
            results[i].append(ExpertVersion(e, version, (made[0], made[1]), names[i], loss, i))
    yield from results


def second_moments(inputs: Tensor) -> Tensor:
    """The mean of x x^T over inputs [tokens, cols], float32 [cols, cols]; the identity where there is no token."""
    if not len(inputs):
        return torch.eye(inputs.shape[1], device=inputs.device)
    return inputs.T @ inputs / len(inputs)


def _float(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, torch.float32)


def _tokens_of(observation: Observation, expert: int, enough: int, settings: Settings) -> _Tokens:
    token, slot = torch.where(observation.experts == expert)
    starved = len(token) < enough
    spread = torch.linspace(0, len(observation.inputs) - 1, min(_FEW, len(observation.inputs))).long()
    learn = compare = token
    if starved:
        # Experts with few tokens are compared on tokens that did not make their moments: held-out ones of their own,
        # and other tokens of the layer where those are too few to tell methods apart.
        held = token // _BLOCK % _HELD_OUT == _HELD_OUT - 1
        learn = token[~held]
        compare = torch.cat([token[held], spread[: max(0, _FEW - int(held.sum()))]])
    # A handful of tokens, learnt from, would show an error of nothing: such an expert is measured on others too.
    filler = spread[: max(0, _FEW - len(token))]
    gates = observation.gates[token, slot] if len(token) else observation.gates.mean().reshape(1)
    chosen = torch.linspace(0, len(token) - 1, min(settings.loss_tokens, len(token))).long()
    measure = torch.cat([token[chosen], filler])
    measured_gates = torch.cat([gates[chosen], gates.mean().expand(len(filler))])
    return _Tokens(learn, compare, measure, measured_gates, starved)


def _choose(
    module: Any,
    observation: Observation,
    version: Version,
    tokens: list[_Tokens],
    dense: list[list[Tensor]],
    biases: list[list[Tensor | None]],
    starved: list[int],
    made: list[Quantised],
    names: list[str],
    settings: Settings,
) -> tuple[list[Quantised], list[str]]:
    """For starved experts, replace the method by the fallback that does better on tokens it has not seen."""
    few = [torch.stack([dense[i][m] for i in starved]) for m in range(2)]
    names, made = list(names), list(made)
    best: dict[int, float] = {}
    for candidate in (names[starved[0]], *fallbacks(settings.method, version)):
        ours = candidate == method_for(settings.method, version)
        tried = made if ours else [quantise(candidate, w, None, version) for w in few]
        values = [dequantise(q, version) for q in tried]
        better = torch.zeros(len(dense), dtype=torch.bool, device=dense[0][0].device)
        for k, i in enumerate(starved):
            if ours and not len(tokens[i].learn):
                continue
            x = observation.inputs[tokens[i].compare].to(dense[i][0].device, torch.float32)
            at = i if ours else k
            pair = [values[0][at], values[1][at]]
            error = _loss(module, x, torch.ones(len(x), device=x.device), dense[i], pair, biases[i]).relative
            if i not in best or error < best[i]:
                best[i], names[i], better[i] = error, candidate, True
        if not ours:
            made = [q.select(better, _spread(t, starved, len(dense))) for q, t in zip(made, tried, strict=True)]
    return made, names


def _spread(few: Quantised, where: list[int], experts: int) -> Quantised:
    """A batch of the experts `where` as a batch of all; the others are left empty."""

    def widen(tensor: Tensor) -> Tensor:
        out = tensor.new_zeros(experts, *tensor.shape[1:])
        out[where] = tensor
        return out

    return Quantised(widen(few.codes), widen(few.scale), None if few.zero is None else widen(few.zero))


def _loss(
    module: Any,
    x: Tensor,
    gates: Tensor,
    dense: list[Tensor],
    quantised: list[Tensor],
    biases: list[Tensor | None],
) -> Loss:
    """The losses of one expert on x [tokens, hidden] with gate weights [tokens]."""
    outputs = [finish(module, hidden(module, x, pair[0], biases[0]), pair[1], biases[1]) for pair in (dense, quantised)]
    error = (outputs[0] - outputs[1]).square()
    total = outputs[0].square().sum()
    relative = error.sum() / total if total > 0 else error.sum()
    gated = (gates.square()[:, None] * error).mean()
    return Loss(float(error.mean()), float(relative), float(gated))
