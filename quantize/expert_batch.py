"""An expert batch (some experts of a layer) at every width, and what each width costs: mathematics on given tensors.

Which tokens an expert gets, where its weights come from and how a family's experts compute is the caller's to say. The
gate and up projections read the same inputs and share one matrix of second moments; every width of a projection is
quantised from the same one. Moments are made here, for the experts of a batch: a bound on their bytes holds whatever
the number of a layer's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version

from .grid import Quantised, dequantise
from .losses import Loss, loss
from .methods import fallbacks, method_for, quantise, quantise_all
from .moments import NEGLIGIBLE, PRIOR, second_moments, shrink

Pair = tuple[Quantised, Quantised]
MOST = 16  # experts of a batch: what is lost when a build is killed, and a unit of work for a cluster


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
        batch_bytes: the most bytes of second moments and working copies in memory at once; one expert's at the least.
    """

    method: str
    versions: tuple[Version, ...]
    min_tokens: int = 0
    loss_tokens: int = 4096
    moments: str = "routed"
    batch_bytes: int = 1 << 29


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """One expert's tokens: int64 indexes of the layer's inputs.

    Attributes:
        learn: what its second moments are made of: all that were routed to it, or, where `starved`, those of them that
            are not held out.
        learn_gates: gate weights of `learn`, float32.
        compare: for a starved expert, what its methods are compared on; nothing of it is in `learn`.
        measure: what its losses are measured on.
        gates: gate weights of `measure`, float32.
        starved: fewer tokens than its methods need to be trusted.
    """

    learn: Tensor
    learn_gates: Tensor
    compare: Tensor
    measure: Tensor
    gates: Tensor
    starved: bool


@dataclass(frozen=True, slots=True)
class ExpertForward:
    """How a family's experts compute, apart from their weights. x is [tokens, cols], a weight [rows, cols].

    Attributes:
        act: (x, weight, bias) to what the down projection reads: the gated activation of the first projection.
        out: (act, weight, bias) to the expert's output.
    """

    act: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    out: Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Experts that are quantised together.

    Attributes:
        experts: which of the layer's they are.
        weights: both matrices of all of them, float32 [experts, rows, cols], on the device that computes.
        biases: by expert, of both matrices, float32 [rows] or None.
        tokens: by expert.
        inputs: [tokens, hidden], what reached the layer's experts, on any device.
        common: int64 indexes of `inputs` that stand for the layer; none is compared on.
        forward: how the experts compute.
    """

    experts: range
    weights: tuple[Tensor, Tensor]
    biases: tuple[tuple[Tensor | None, Tensor | None], ...]
    tokens: tuple[ExpertTokens, ...]
    inputs: Tensor
    common: Tensor
    forward: ExpertForward

    @property
    def device(self) -> torch.device:
        """Where to compute."""
        return self.weights[0].device

    def gather(self, tokens: Tensor) -> Tensor:
        """The inputs of these tokens, float32 on the device."""
        return self.inputs[tokens].to(self.device, torch.float32)

    def own(self, expert: int) -> tuple[Tensor, Tensor]:
        """The matrices of the expert at a position of the batch."""
        return self.weights[0][expert], self.weights[1][expert]

    def act(self, expert: int, x: Tensor) -> Tensor:
        """What an expert's down projection reads."""
        return self.forward.act(x, self.weights[0][expert], self.biases[expert][0])

    def output(self, expert: int, matrices: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
        """An expert's output [tokens, hidden] with these matrices for its own."""
        first, second = self.biases[expert]
        act = self.forward.act(self.gather(tokens), matrices[0], first)
        return self.forward.out(act, matrices[1], second)


@dataclass(frozen=True, slots=True)
class ExpertVersion:
    """One expert at one width: its matrices at `index` of a batch, the method that made it, and its loss."""

    expert: int
    version: Version
    quantised: Pair
    method: str
    loss: Loss
    index: int


def expert_batches(layer: ExpertLayer, settings: Settings) -> list[range]:
    """The experts that are quantised together: as many as `batch_bytes` holds, MOST at the most.

    Part of what determines the bytes (a batch's products round as a batch's), so it follows from the settings alone,
    not from the machine.
    """
    step = max(1, min(MOST, settings.batch_bytes // expert_memory(layer, settings)))
    return [range(start, min(start + step, layer.experts)) for start in range(0, layer.experts, step)]


def expert_memory(layer: ExpertLayer, settings: Settings) -> int:
    """Bytes one expert of a batch takes in memory: moments and weights in float32, and every width's codes."""
    widths = len(settings.versions)
    return sum(4 * m.cols * m.cols + (4 * 3 + widths) * m.weights for m in layer.matrices)


def quantise_batch(batch: ExpertBatch, settings: Settings) -> Iterator[list[ExpertVersion]]:
    """Quantise a batch at every width and measure; yields, for each expert, one entry a version of the settings."""
    makers = {v: method_for(settings.method, v) for v in settings.versions}
    needed = any(m.needs_moments for m in makers.values())
    moments = batch_moments(batch, settings.moments) if needed else (None, None)
    exact = [batch.output(i, batch.own(i), t.measure) for i, t in enumerate(batch.tokens)]
    results: list[list[ExpertVersion]] = [[] for _ in batch.experts]
    both = [quantise_all(settings.method, w, m, settings.versions) for w, m in zip(batch.weights, moments, strict=True)]
    for version, maker in makers.items():
        made, names = replace_starved(batch, settings.method, maker.name, (both[0][version], both[1][version]), version)
        values = [dequantise(q, version) for q in made]
        for i, (e, tokens) in enumerate(zip(batch.experts, batch.tokens, strict=True)):
            got = batch.output(i, (values[0][i], values[1][i]), tokens.measure)
            cost = loss(exact[i], got, tokens.gates.to(batch.device))
            results[i].append(ExpertVersion(e, version, made, names[i], cost, i))
    yield from results


def batch_moments(batch: ExpertBatch, kind: str) -> tuple[Tensor, Tensor]:
    """Mean second moments of what both matrices read, each float32 [experts, cols, cols].

    Args:
        batch: the experts.
        kind: "routed", "gated" or "all"; see `Settings`.
    """
    prior = PRIOR * batch.weights[0].shape[-1]
    common = batch.gather(batch.common)
    of_layer = second_moments(common)
    parts: list[list[Tensor]] = [[], []]
    for i, tokens in enumerate(batch.tokens):
        x, gates = batch.gather(tokens.learn), None
        if kind == "all":
            x = common
        elif kind == "gated":
            gates = tokens.learn_gates.to(batch.device)
        own = [second_moments(x, gates), second_moments(batch.act(i, x), gates)]
        if len(x) < NEGLIGIBLE * prior:
            around = [of_layer, second_moments(batch.act(i, common))]
            own = [shrink(a, len(x), b, prior) for a, b in zip(own, around, strict=True)]
        for m in range(2):
            parts[m].append(own[m])
    return torch.stack(parts[0]), torch.stack(parts[1])


def replace_starved(
    batch: ExpertBatch, wanted: str, maker: str, made: Pair, version: Version
) -> tuple[Pair, list[str]]:
    """For starved experts, take a fallback where it does better on tokens that were not learnt from.

    Args:
        batch: the experts.
        wanted: the method that the settings name.
        maker: the one that made this version in its stead.
        made: what it made.
        version: the version.

    Returns:
        The batch, and by expert the method that made it.
    """
    starved = [i for i, t in enumerate(batch.tokens) if t.starved]
    names = [maker] * len(batch.tokens)
    candidates = fallbacks(wanted, version)
    if not starved or not candidates:
        return made, names
    exact = {i: batch.output(i, batch.own(i), batch.tokens[i].compare) for i in starved}
    best = _errors(batch, made, exact, {i: i for i in starved}, version)
    first: dict[int, float] = {}
    for candidate in candidates:
        tries = [i for i in starved if best[i] > candidate.worth * first.get(i, 0.0)]
        if not tries:
            continue
        few = [matrices[tries] for matrices in batch.weights]
        tried = quantise(candidate.name, few[0], None, version), quantise(candidate.name, few[1], None, version)
        errors = _errors(batch, tried, {i: exact[i] for i in tries}, {i: k for k, i in enumerate(tries)}, version)
        first = first or errors
        better = torch.zeros(len(names), dtype=torch.bool, device=batch.device)
        for i in tries:
            if errors[i] < best[i]:
                best[i], names[i], better[i] = errors[i], candidate.name, True
        made = (
            made[0].select(better, _spread(tried[0], tries, len(names))),
            made[1].select(better, _spread(tried[1], tries, len(names))),
        )
    return made, names


def _errors(
    batch: ExpertBatch, made: Pair, exact: dict[int, Tensor], at: dict[int, int], version: Version
) -> dict[int, float]:
    """Relative error of each expert of `exact`, found at position at[expert] of what was made."""
    values = [dequantise(q, version) for q in made]
    out = {}
    for i, want in exact.items():
        got = batch.output(i, (values[0][at[i]], values[1][at[i]]), batch.tokens[i].compare)
        out[i] = loss(want, got, torch.ones(len(want), device=batch.device)).relative
    return out


def _spread(few: Quantised, where: list[int], experts: int) -> Quantised:
    """A batch of the experts `where` as a batch of all; the others are left empty."""

    def widen(tensor: Tensor) -> Tensor:
        out = tensor.new_zeros(experts, *tensor.shape[1:])
        out[where] = tensor
        return out

    return Quantised(widen(few.codes), widen(few.scale), None if few.zero is None else widen(few.zero))
