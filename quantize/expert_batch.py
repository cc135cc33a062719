"""An expert batch (some experts of a layer) at every width, and what each width costs: mathematics on given tensors.

Which tokens an expert gets, where its weights come from and how a family's experts compute is the caller's to say. The
gate and up projections read the same inputs and share one matrix of second moments; every width of a projection is
quantised from the same one. Moments are made here, for the experts of a batch: a bound on their bytes holds whatever
the number of a layer's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version, version_names

from .crossfit import FOLDS, fold_of, group_of, refit, row_errors
from .grid import Quantised, dequantise
from .losses import Correction, Measured, loss, measure
from .methods import fallbacks, method_for, quantise, quantise_all
from .moments import NEGLIGIBLE, PRIOR, ExpertMoments, FoldSums

Pair = tuple[Quantised, Quantised]
PART = 4096  # tokens whose inputs and activations are in memory at once, in float32
MOST = 16  # experts of a batch: what is lost when a build is killed, and a unit of work for a cluster


@dataclass(frozen=True, slots=True)
class Settings:
    """How to quantise.

    Attributes:
        method: its name (moepack.quantize.methods).
        versions: the affine versions wanted.
        min_tokens: an expert with fewer tokens is starved: its method is chosen on held-out tokens. 0 means as many
            as its widest matrix has columns.
        loss_tokens: the most tokens an expert's losses are measured on, evenly spaced among its own.
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
        learn: what its second moments are made of: all that were routed to it, but where `starved` for those that are
            held out, and where `rich` for those that it is measured on.
        learn_gates: gate weights of `learn`, float32.
        compare: for a starved expert, what its methods are compared on; nothing of it is in `learn`.
        measure: what its losses are measured on: its own.
        gates: gate weights of `measure`, float32.
        learnt: which of `measure` it learns from, bool.
        others: tokens of the layer that it neither learns from nor was sent, which it is measured on as well.
        gate_square: mean square of its gate weights, or the layer's where it has none: what `others` count with.
        starved: fewer tokens than its methods need to be trusted.
        rich: so many that what it is measured on need not be learnt from.
    """

    learn: Tensor
    learn_gates: Tensor
    compare: Tensor
    measure: Tensor
    gates: Tensor
    learnt: Tensor
    others: Tensor
    gate_square: float
    starved: bool
    rich: bool


@dataclass(frozen=True, slots=True)
class ExpertForward:
    """How a family's experts compute, apart from their weights. x is [tokens, cols], a weight [rows, cols].

    Attributes:
        act: (x, weight, bias) to what the down projection reads: the gated activation of the first projection.
        out: (act, weight, bias) to the expert's output.
    """

    act: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    out: Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Inputs(Protocol):
    """Rows by their indexes."""

    def __getitem__(self, tokens: Tensor, /) -> Tensor:
        """The rows at int64 [rows], of their own memory."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Experts that are quantised together.

    Attributes:
        experts: which of the layer's they are.
        weights: both matrices of all of them, float32 [experts, rows, cols], on the device that computes.
        biases: by expert, of both matrices, float32 [rows] or None.
        tokens: by expert.
        inputs: [tokens, hidden], what reached the layer's experts, on any device, or what gives rows of it.
        common: int64 indexes of `inputs` that stand for the layer; none is compared on.
        forward: how the experts compute.
        in_bf16: whether what the down projection learns from is computed in BF16, as the model itself does.
        block: tokens of a cluster (`crossfit.fold_of`).
        spare: one cluster in so many is never in `common`.
    """

    experts: range
    weights: tuple[Tensor, Tensor]
    biases: tuple[tuple[Tensor | None, Tensor | None], ...]
    tokens: tuple[ExpertTokens, ...]
    inputs: Inputs
    common: Tensor
    forward: ExpertForward
    in_bf16: bool
    block: int
    spare: int

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

    def learnt_act(self, expert: int, x: Tensor) -> Tensor:
        """The same to learn from."""
        if not self.in_bf16:
            return self.act(expert, x)
        bias = self.biases[expert][0]
        weight = self.weights[0][expert].bfloat16()
        return self.forward.act(x.bfloat16(), weight, None if bias is None else bias.bfloat16()).float()

    def output(self, expert: int, matrices: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
        """An expert's output [tokens, hidden] with these matrices for its own."""
        first, second = self.biases[expert]
        act = self.forward.act(self.gather(tokens), matrices[0], first)
        return self.forward.out(act, matrices[1], second)


@dataclass(frozen=True, slots=True)
class ExpertVersion:
    """One expert at one width: its matrices at `index` of a batch, the method that made it, and what it costs.

    Attributes:
        own: measured on the expert's own tokens; `pooling` makes a layer's losses of both.
        others: measured on other tokens of the layer.
    """

    expert: int
    version: Version
    quantised: Pair
    method: str
    own: Measured
    others: Measured
    index: int


@dataclass(frozen=True, slots=True)
class Refitted:
    """One expert's sampled rows at one width, fitted without each fold.

    Attributes:
        errors: of both matrices, value less weight, float32 [folds, sampled, cols].
        gain: how much of what cross-fitting finds is to be believed, for each matrix (`losses`).
    """

    errors: tuple[Tensor, Tensor]
    gain: tuple[float, float]


def expert_batches(layer: ExpertLayer, settings: Settings) -> list[range]:
    """The experts that are quantised together: as many as `batch_bytes` holds, MOST at the most.

    Part of what determines the bytes (a batch's products round as a batch's), so it follows from the settings alone,
    not from the machine.
    """
    step = max(1, min(MOST, settings.batch_bytes // expert_memory(layer, settings)))
    return [range(start, min(start + step, layer.experts)) for start in range(0, layer.experts, step)]


def expert_memory(layer: ExpertLayer, settings: Settings) -> int:
    """Bytes one expert of a batch takes: moments whole and by fold, weights in float32, and every width's codes.

    Of all widths that there are, whichever are wanted: so that a version comes out the same beside others and alone.
    """
    widths = len(version_names()) - 1
    return sum(4 * (1 + FOLDS) * m.cols * m.cols + (4 * 3 + widths) * m.weights for m in layer.matrices)


def quantise_batch(batch: ExpertBatch, settings: Settings) -> Iterator[list[ExpertVersion]]:
    """Quantise a batch at every width and measure; yields, for each expert, one entry a version of the settings."""
    makers = {v: method_for(settings.method, v) for v in settings.versions}
    reading = [v for v, maker in makers.items() if maker.needs_moments]
    moments: tuple[list[ExpertMoments], list[ExpertMoments]] = (
        batch_moments(batch, settings.moments) if reading else ([], [])
    )
    some = [i for i, t in enumerate(batch.tokens) if reading and _crossfits(t)]
    gains = [[_gain(m[i]) for m in moments] for i in some]
    fitted, made = {}, {}
    for m in (1, 0):  # down, whose moments are the larger, first; a matrix's are let go of before it is quantised
        weight, each = batch.weights[m], moments[m]
        if some:
            fitted[m] = refit(settings.method, weight[some], [each[i] for i in some], reading)
        means = [x.mean() for x in each]
        stacked = None if not reading else torch.stack(means) if len(means) > 1 else means[0][None]
        moments[m].clear()
        del means, each
        made[m] = quantise_all(settings.method, weight, stacked, settings.versions)
        del stacked
    refitted = {
        (i, v): Refitted((fitted[0][v][k], fitted[1][v][k]), (gains[k][0], gains[k][1]))
        for k, i in enumerate(some)
        for v in reading
    }
    chosen = {}
    for version, maker in makers.items():
        chosen[version] = replace_starved(
            batch, settings.method, maker.name, (made[0][version], made[1][version]), version
        )
    for i, e in enumerate(batch.experts):
        known = {v: refitted.get((i, v)) for v, maker in makers.items() if chosen[v][1][i] == maker.name}
        found = _measure(batch, i, {v: pair for v, (pair, _) in chosen.items()}, known)
        yield [ExpertVersion(e, v, pair, names[i], *found[v], i) for v, (pair, names) in chosen.items()]


def batch_moments(batch: ExpertBatch, kind: str) -> tuple[list[ExpertMoments], list[ExpertMoments]]:
    """Second moments of what both matrices read, by expert.

    Args:
        batch: the experts.
        kind: "routed", "gated" or "all"; see `Settings`.
    """
    priors = [PRIOR * w.shape[-1] for w in batch.weights]
    every = kind == "all"
    # One fold does where nothing is fitted again.
    folds = [FOLDS if _crossfits(t) else 1 for t in batch.tokens]
    layers = {n: _sums(batch, None, batch.common, None, n, first=True)[0] for n in set(folds)}
    parts: tuple[list[ExpertMoments], list[ExpertMoments]] = ([], [])
    for i, (tokens, n) in enumerate(zip(batch.tokens, folds, strict=True)):
        gates = tokens.learn_gates if kind == "gated" else None
        near = [len(tokens.learn) < NEGLIGIBLE * prior for prior in priors]
        common = _sums(batch, i, batch.common, None, n, first=False)[0] if every or near[1] else None
        around = [layers[n], common]
        own = around if every else _sums(batch, i, tokens.learn, gates, n, first=True)
        for m in range(2):
            mine, layer = own[m], around[m]
            assert mine is not None
            parts[m].append(ExpertMoments(mine, None if every or not near[m] else layer, priors[m]))
    return parts


def _sums(
    batch: ExpertBatch, expert: int | None, tokens: Tensor, gates: Tensor | None, folds: int, first: bool
) -> list[FoldSums]:
    """Sums over tokens, a part of them in memory at a time: of the inputs where `first`, of an expert's activations."""
    cols = [w.shape[-1] for w in batch.weights]
    wanted = ([0] if first else []) + ([1] if expert is not None else [])
    sums = {m: FoldSums.empty(cols[m], folds, batch.device) for m in wanted}
    for start in range(0, len(tokens), PART):
        part = tokens[start : start + PART]
        fold = fold_of(part, batch.block, batch.spare) if folds > 1 else torch.zeros_like(part)
        gate = None if gates is None else gates[start : start + PART].to(batch.device)
        x = batch.gather(part)
        if 0 in sums:
            sums[0].add(x, fold, gate)
        if expert is not None:
            sums[1].add(batch.learnt_act(expert, x), fold, gate)
    return [sums[m] for m in wanted]


def _crossfits(tokens: ExpertTokens) -> bool:
    """Whether what an expert lost on the tokens it learnt from has to be corrected."""
    return not tokens.rich and bool(tokens.learnt.any())


def _gain(moments: ExpertMoments) -> float:
    """How much of what cross-fitting finds is to be believed (`losses`)."""
    fewer = sum(moments.fewer(f) for f in range(FOLDS)) / FOLDS
    return 2 / (1 + fewer)


def _measure(
    batch: ExpertBatch, expert: int, made: dict[Version, Pair], refitted: dict[Version, Refitted | None]
) -> dict[Version, tuple[Measured, Measured]]:
    """An expert's losses at every version, on its own tokens and on others of the layer."""
    tokens, n = batch.tokens[expert], len(batch.tokens[expert].measure)
    groups = [group_of(t, batch.block, batch.spare) for t in (tokens.measure, tokens.others)]
    x = batch.gather(torch.cat([tokens.measure, tokens.others]))
    act, original, bias = batch.act(expert, x), batch.own(expert), batch.biases[expert]
    exact = batch.forward.out(act, original[1], bias[1])
    reads = fold = group = None
    if any(refitted.values()):
        at = torch.where(tokens.learnt)[0].to(x.device)
        reads = x[at], act[at]
        fold, group = fold_of(tokens.measure[tokens.learnt], batch.block, batch.spare), groups[0][tokens.learnt]
    rest = torch.full((len(tokens.others),), tokens.gate_square**0.5)
    unlearnt = torch.zeros(len(tokens.others), dtype=torch.bool)
    out = {}
    for version, pair in made.items():
        shipped = tuple(dequantise(q.one(expert), version)[0] for q in pair)
        got = batch.forward.out(batch.forward.act(x, shipped[0], bias[0]), shipped[1], bias[1])
        correction, again = None, refitted.get(version)
        if again is not None:
            assert reads is not None and fold is not None and group is not None
            found = [row_errors(reads[m], group, fold, original[m], shipped[m], again.errors[m]) for m in range(2)]
            correction = Correction(
                torch.stack([f.groups[0] for f in found]), torch.stack([f.groups[1] for f in found]),
                (found[0].rows, found[1].rows), found[1].share, again.gain,
            )  # fmt: skip
        own = measure(exact[:n], got[:n], tokens.gates, groups[0], tokens.learnt, correction)
        out[version] = own, measure(exact[n:], got[n:], rest, groups[1], unlearnt, None)
    return out


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
