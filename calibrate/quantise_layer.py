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

from moepack.pack.spec import ExpertLayer, Version
from moepack.quantize.grid import Quantised, dequantise
from moepack.quantize.methods import fallbacks, method_for, quantise, quantise_all

from .experts import ExpertWeights, hidden
from .forward import Observation
from .losses import Loss, loss, output
from .moments import NEGLIGIBLE, PRIOR, second_moments, shrink
from .tokens import ExpertTokens, LayerTokens

Pair = tuple[Quantised, Quantised]
GROUP = 16  # experts of a group at the most: what is lost when a build is killed, and a unit of work for a cluster


@dataclass(frozen=True, slots=True)
class Settings:
    """How to quantise.

    Attributes:
        method: its name (moepack.quantize.methods).
        versions: the affine versions wanted.
        min_tokens: an expert with fewer tokens is starved: its method is chosen on held-out tokens. 0 means as many
            as its widest matrix has columns.
        loss_tokens: the most tokens an expert's losses are measured on, evenly spaced among its own. An expert with
            fewer than 256 is measured on other tokens of the layer as well, up to 256: on a handful that it learnt
            from, its error would come out near zero.
        moments: what an expert's second moments are made of: "routed", the tokens routed to it; "gated", the same,
            weighted by their gates (MoEQuant); "all", every token of the layer.
        group_bytes: the most bytes of second moments and working copies in memory at once; one expert's at the least.
    """

    method: str
    versions: tuple[Version, ...]
    min_tokens: int = 0
    loss_tokens: int = 4096
    moments: str = "routed"
    group_bytes: int = 1 << 29


@dataclass(frozen=True, slots=True)
class ExpertVersion:
    """One expert at one width: its matrices at `index` of a batch, the method that made it, and its loss."""

    expert: int
    version: Version
    quantised: Pair
    method: str
    loss: Loss
    index: int


def expert_groups(layer: ExpertLayer, settings: Settings) -> list[range]:
    """The experts that are quantised together: as many as `group_bytes` holds, GROUP at the most.

    Part of what determines the bytes (a batch's products round as a batch's), so it follows from the settings alone,
    not from the machine.
    """
    step = max(1, min(GROUP, settings.group_bytes // group_memory(layer, settings)))
    return [range(start, min(start + step, layer.experts)) for start in range(0, layer.experts, step)]


def group_memory(layer: ExpertLayer, settings: Settings) -> int:
    """Bytes one expert of a group takes in memory: moments and weights in float32, and every width's codes."""
    widths = len(settings.versions)
    return sum(4 * m.cols * m.cols + (4 * 3 + widths) * m.weights for m in layer.matrices)


def quantise_group(
    module: Any,
    weights: ExpertWeights,
    experts: range,
    observation: Observation,
    settings: Settings,
    device: torch.device,
) -> Iterator[list[ExpertVersion]]:
    """Quantise some experts of a layer in order; yields, for each, one entry a version of `settings.versions`.

    Args:
        module: the layer's experts module, for its gate activation only.
        weights: the weights of these experts, from the checkpoint.
        experts: which of the layer's they are.
        observation: what the calibration tokens brought to the layer.
        settings: how.
        device: where to compute.
    """
    layer = LayerTokens.of(observation)
    yield from _Group(module, weights, observation, layer, settings, device, experts).run()


def quantise_layer(
    module: Any, weights: ExpertWeights, observation: Observation, settings: Settings, device: torch.device
) -> Iterator[list[ExpertVersion]]:
    """Quantise all of a layer's experts in order, a group at a time; see `quantise_group`."""
    for experts in expert_groups(weights.layer, settings):
        yield from quantise_group(module, weights.select(experts), experts, observation, settings, device)


class _Group:
    """A few experts of a layer, with all that quantising them needs on the device."""

    def __init__(
        self,
        module: Any,
        weights: ExpertWeights,
        observation: Observation,
        layer: LayerTokens,
        settings: Settings,
        device: torch.device,
        experts: range,
    ) -> None:
        self._module, self._observation, self._layer, self._settings = module, observation, layer, settings
        self._device, self._experts = device, experts
        self._hidden_size = weights.layer.matrices[0].cols
        enough = settings.min_tokens or max(m.cols for m in weights.layer.matrices)
        self._tokens = [ExpertTokens.of(observation, layer, e, enough, settings.loss_tokens) for e in experts]
        own = range(len(experts))
        self._batch = [torch.stack([weights.matrix(e, m).to(device, torch.float32) for e in own]) for m in range(2)]
        self._biases = [[_float(weights.bias(e, m), device) for m in range(2)] for e in own]

    def run(self) -> Iterator[list[ExpertVersion]]:
        """Quantise at every width and measure."""
        methods = {v: method_for(self._settings.method, v) for v in self._settings.versions}
        moments = self._moments() if any(m.needs_moments for m in methods.values()) else (None, None)
        exact = [self._output(i, self._weights(i), t.measure) for i, t in enumerate(self._tokens)]
        results: list[list[ExpertVersion]] = [[] for _ in self._experts]
        both = [
            quantise_all(self._settings.method, w, m, tuple(methods)) for w, m in zip(self._batch, moments, strict=True)
        ]
        for version, method in methods.items():
            made: Pair = (both[0][version], both[1][version])
            made, names = self._replace_starved(method.name, made, version)
            values = [dequantise(q, version) for q in made]
            for i, (e, tokens) in enumerate(zip(self._experts, self._tokens, strict=True)):
                got = self._output(i, [values[0][i], values[1][i]], tokens.measure)
                cost = loss(exact[i], got, tokens.gates.to(self._device))
                results[i].append(ExpertVersion(e, version, made, names[i], cost, i))
        yield from results

    def _weights(self, index: int) -> list[Tensor]:
        return [self._batch[0][index], self._batch[1][index]]

    def _inputs(self, tokens: Tensor) -> Tensor:
        return self._observation.inputs[tokens].to(self._device, torch.float32)

    def _output(self, index: int, weights: list[Tensor], tokens: Tensor) -> Tensor:
        return output(self._module, self._inputs(tokens), weights, self._biases[index])

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean second moments of what both matrices read, each float32 [experts, cols, cols]."""
        prior = PRIOR * self._hidden_size
        common = self._inputs(self._layer.learn)
        of_layer = second_moments(common)
        parts: list[list[Tensor]] = [[], []]
        for i, tokens in enumerate(self._tokens):
            x, gates = self._inputs(tokens.learn), None
            if self._settings.moments == "all":
                x = common
            elif self._settings.moments == "gated":
                gates = tokens.learn_gates.to(self._device)
            own = [second_moments(x, gates), second_moments(self._hidden(i, x), gates)]
            if len(x) < NEGLIGIBLE * prior:
                around = [of_layer, second_moments(self._hidden(i, common))]
                own = [shrink(a, len(x), b, prior) for a, b in zip(own, around, strict=True)]
            for m in range(2):
                parts[m].append(own[m])
        return torch.stack(parts[0]), torch.stack(parts[1])

    def _hidden(self, index: int, x: Tensor) -> Tensor:
        return hidden(self._module, x, self._batch[0][index], self._biases[index][0])

    def _replace_starved(self, method: str, made: Pair, version: Version) -> tuple[Pair, list[str]]:
        """For starved experts, take a fallback where it does better on tokens that were not learnt from."""
        starved = [i for i, t in enumerate(self._tokens) if t.starved]
        names = [method] * len(self._tokens)
        tried_as_well = fallbacks(self._settings.method, version)
        if not starved or not tried_as_well:
            return made, names
        exact = {i: self._output(i, self._weights(i), self._tokens[i].compare) for i in starved}
        best = self._errors(made, exact, {i: i for i in starved}, version)
        first: dict[int, float] = {}
        for candidate in tried_as_well:
            tries = [i for i in starved if best[i] > candidate.worth * first.get(i, 0.0)]
            if not tries:
                continue
            few = [batch[tries] for batch in self._batch]
            tried = quantise(candidate.name, few[0], None, version), quantise(candidate.name, few[1], None, version)
            wanted = {i: exact[i] for i in tries}
            errors = self._errors(tried, wanted, {i: k for k, i in enumerate(tries)}, version)
            first = first or errors
            better = torch.zeros(len(names), dtype=torch.bool, device=self._device)
            for i in tries:
                if errors[i] < best[i]:
                    best[i], names[i], better[i] = errors[i], candidate.name, True
            made = (
                made[0].select(better, _spread(tried[0], tries, len(names))),
                made[1].select(better, _spread(tried[1], tries, len(names))),
            )
        return made, names

    def _errors(self, made: Pair, exact: dict[int, Tensor], at: dict[int, int], version: Version) -> dict[int, float]:
        """Relative error of each expert of `exact`, found at position at[expert] of the batch."""
        values = [dequantise(q, version) for q in made]
        out = {}
        for i, want in exact.items():
            got = self._output(i, [values[0][at[i]], values[1][at[i]]], self._tokens[i].compare)
            out[i] = loss(want, got, torch.ones(len(want), device=self._device)).relative
        return out


def _float(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, torch.float32)


def _spread(few: Quantised, where: list[int], experts: int) -> Quantised:
    """A batch of the experts `where` as a batch of all; the others are left empty."""

    def widen(tensor: Tensor) -> Tensor:
        out = tensor.new_zeros(experts, *tensor.shape[1:])
        out[where] = tensor
        return out

    return Quantised(widen(few.codes), widen(few.scale), None if few.zero is None else widen(few.zero))
