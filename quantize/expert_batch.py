"""Quantise an expert batch (some experts of a layer) at every width, and measure the loss of each width.

The caller gives each expert's tokens, its weights and its forward functions. The gate and up projections read the same
inputs and share their second moments, which serve all widths. Moments are computed for one batch at a time, so their
bytes do not grow with a layer's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moepack.pack.spec import ExpertLayer, Version, encoding_of, version_names

from .crossfit import FOLDS, cluster_of, refit, row_errors, sampled
from .gptq import LANES
from .grid import Quantised, dequantise, join
from .losses import GROUPS, Correction, Measured, loss, measure
from .methods import FREE, fallbacks, method_for, quantise, quantise_all
from .moments import NEGLIGIBLE, PRIOR, ExpertMoments, FoldSums, shrink

Pair = tuple[Quantised, Quantised]
# An expert's sampled rows at a width, fitted without each fold: the errors of both matrices (value less weight, float32
# [folds, sampled, cols]), and the factor a of each (`losses`).
Refitted = tuple[tuple[Tensor, Tensor], tuple[float, float]]
PART = 4096  # tokens whose inputs and activations are in memory at once, in float32
# Damping of the prediction of inputs in `refit_down`, as a share of their mean second moment: always, and times columns
# over tokens. Without the latter an expert of two tokens a column gained nothing; its table said a fifth too little.
RIDGE = 0.05
SPARSE = 4.0
MOST = 16  # experts of a batch: the work that a killed build loses, and the unit of work of a cluster


@dataclass(frozen=True, slots=True)
class Settings:
    """How to quantise."""

    method: str  # the method's name (moepack.quantize.methods)
    versions: tuple[Version, ...]  # the affine versions
    loss_tokens: int = 4096  # the most tokens an expert's losses are measured on, evenly spaced among its own
    # The most bytes of second moments and working copies in memory at once, at least one expert's.
    batch_bytes: int = 1 << 29
    zeros: str = FREE  # which zero points, one of `methods.ZEROS`
    refine: bool = False  # whether down is quantised again on what the quantised first matrix makes (`refit_down`)


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """One expert's tokens: int64 indexes of the layer's inputs."""

    # Tokens of the expert's second moments: all that were routed to it, without the held-out ones if `starved`, and
    # without the clusters of `measure` if `rich`.
    learn: Tensor
    compare: Tensor  # for a starved expert, the tokens its methods are compared on; none is in `learn`
    measure: Tensor  # the expert's own tokens, on which its losses are measured
    gates: Tensor  # gate weights of `measure`, float32
    learnt: Tensor  # which of `measure` are in `learn`, bool
    others: Tensor  # further tokens of the layer to measure the expert on; none was routed to it
    gate_square: float  # mean square of the expert's gate weights, or the layer's if it has none: weight of `others`
    starved: bool  # whether the expert has too few tokens for its method
    rich: bool  # whether the expert has enough tokens for `measure` and `learn` to be disjoint


@dataclass(frozen=True, slots=True)
class ExpertForward:
    """The functions of a family's experts. x is [tokens, cols], a weight [rows, cols]."""

    # (x, weight, bias) -> the down projection's input, the gated activation of the first projection.
    act: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    out: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (act, weight, bias) -> the expert's output


class Rows(Protocol):
    """Rows that are read by their indexes."""

    def __getitem__(self, index: Tensor, /) -> Tensor:
        """The rows at `index`, int64 [rows]."""


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Experts that are quantised together."""

    experts: range  # their indexes in the layer
    weights: tuple[Tensor, Tensor]  # both matrices of all experts, float32 [experts, rows, cols], on the compute device
    # Each expert's biases of both matrices, float32 [rows] or None.
    biases: tuple[tuple[Tensor | None, Tensor | None], ...]
    tokens: tuple[ExpertTokens, ...]  # each expert's tokens
    inputs: Rows  # the inputs of the layer's experts, [tokens, hidden] on any device, indexed by int64 [rows]
    common: Tensor  # int64 indexes of `inputs` that stand for the layer; methods are not compared on them
    forward: ExpertForward  # the experts' functions
    in_bf16: bool  # whether the down projection learns from activations in BF16, as in the model
    block: int  # tokens of a cluster (`crossfit.cluster_of`)
    spare: int  # the last of every `spare` clusters is never in `common`

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self.weights[0].device

    def gather(self, tokens: Tensor) -> Tensor:
        """The inputs of these tokens, float32 on the device."""
        rows: Tensor = self.inputs[tokens]
        return rows.to(self.device, torch.float32)

    def own(self, expert: int) -> tuple[Tensor, Tensor]:
        """Both matrices of the expert at position `expert` of the batch."""
        return self.weights[0][expert], self.weights[1][expert]

    def act(self, expert: int, x: Tensor) -> Tensor:
        """The input of an expert's down projection."""
        return self.forward.act(x, self.weights[0][expert], self.biases[expert][0])

    def learnt_act(self, expert: int, x: Tensor) -> Tensor:
        """The input of an expert's down projection to learn from: in BF16 if `in_bf16`, else as `act`."""
        if not self.in_bf16:
            return self.act(expert, x)
        bias = self.biases[expert][0]
        weight = self.weights[0][expert].bfloat16()
        return self.forward.act(x.bfloat16(), weight, None if bias is None else bias.bfloat16()).float()

    def output(self, expert: int, matrices: tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
        """An expert's output [tokens, hidden] with these matrices in place of its own."""
        first, second = self.biases[expert]
        act = self.forward.act(self.gather(tokens), matrices[0], first)
        return self.forward.out(act, matrices[1], second)


@dataclass(frozen=True, slots=True)
class ExpertVersion:
    """One expert at one width: its matrices at `index` of a batch, the method that made it, and its losses."""

    expert: int
    version: Version
    quantised: Pair
    method: str
    own: Measured  # loss on the expert's own tokens; `pooling` combines both
    others: Measured  # loss on other tokens of the layer
    index: int


def expert_batches(layer: ExpertLayer, settings: Settings) -> list[range]:
    """Split a layer into batches that fit `batch_bytes`, of at most MOST experts.

    Batches affect how products round, and so a bundle's bytes. So they depend on the settings, not on the machine or
    the chosen versions. An expert counts with its moments, whole and by fold, its weights in float32, and its codes at
    all widths that dense matrices may have: widths that came later leave batches, and so bytes, as they were.
    """
    widths = sum(not encoding_of(name).holds for name in version_names(dense=True))
    each = sum(4 * (1 + FOLDS) * m.cols * m.cols + (4 * 3 + widths) * m.weights for m in layer.matrices)
    step = max(1, min(MOST, settings.batch_bytes // each))
    return [range(start, min(start + step, layer.experts)) for start in range(0, layer.experts, step)]


def quantise_batch(batch: ExpertBatch, settings: Settings) -> Iterator[list[ExpertVersion]]:
    """Quantise a batch at every width and measure it; yields each expert's entries, one for each version."""
    makers = {v: method_for(settings.method, v) for v in settings.versions}
    reading = [v for v, maker in makers.items() if maker.needs_moments]
    moments: tuple[list[ExpertMoments], list[ExpertMoments]] = batch_moments(batch) if reading else ([], [])
    some = [i for i, t in enumerate(batch.tokens) if reading and _crossfits(t)]
    gains = [[_gain(m[i]) for m in moments] for i in some]
    fitted = {}
    made = {}
    # Sampled rows of down, fitted to the same moments as cross-fitting's: `refine` fits down to others.
    compared: dict[Version, Quantised] = {}
    for m in (1, 0):  # down first, as its moments are larger; a matrix's moments are freed before it is quantised
        weight = batch.weights[m]
        each = moments[m]
        if some:
            fitted[m] = refit(settings.method, weight[some], [each[i] for i in some], reading, settings.zeros, m)
        means = [x.mean() for x in each]
        stacked = None
        if reading:
            stacked = torch.stack(means) if len(means) > 1 else means[0][None]
        moments[m].clear()
        del means, each
        versions = settings.versions
        if settings.refine and m == 1:
            versions = tuple(v for v in settings.versions if v not in reading)
            if some:
                compared = quantise_all(settings.method, sampled(weight), stacked, reading, settings.zeros, m)
        made[m] = quantise_all(settings.method, weight, stacked, versions, settings.zeros, m)
        del stacked
    if settings.refine:
        made[1] |= refit_down(batch, settings, {v: made[0][v] for v in reading})
    elif some:
        compared = {v: made[1][v].map(sampled) for v in reading}
    refitted = {
        (i, v): ((fitted[0][v][k], fitted[1][v][k]), (gains[k][0], gains[k][1]))
        for k, i in enumerate(some)
        for v in reading
    }
    chosen = {
        version: replace_starved(batch, settings, maker.name, (made[0][version], made[1][version]), version)
        for version, maker in makers.items()
    }
    for i, e in enumerate(batch.experts):
        known = {v: refitted.get((i, v)) for v, maker in makers.items() if chosen[v][1][i] == maker.name}
        found = _measure(batch, i, {v: pair for v, (pair, _) in chosen.items()}, known, compared)
        yield [ExpertVersion(e, v, pair, names[i], *found[v], i) for v, (pair, names) in chosen.items()]


def batch_moments(batch: ExpertBatch) -> tuple[list[ExpertMoments], list[ExpertMoments]]:
    """Compute second moments of both matrices' inputs, for each expert, over the tokens that were routed to it."""
    priors = [PRIOR * w.shape[-1] for w in batch.weights]
    # Without cross-fitting one fold suffices.
    folds = [FOLDS if _crossfits(t) else 1 for t in batch.tokens]
    layers = {n: _sums(batch, None, batch.common, n, first=True)[0] for n in set(folds)}
    parts: tuple[list[ExpertMoments], list[ExpertMoments]] = ([], [])
    for i, (tokens, n) in enumerate(zip(batch.tokens, folds, strict=True)):
        near = [len(tokens.learn) < NEGLIGIBLE * prior for prior in priors]
        around = [
            layers[n] if near[0] else None,
            _sums(batch, i, batch.common, n, first=False)[0] if near[1] else None,
        ]
        own = _sums(batch, i, tokens.learn, n, first=True)
        for part, mine, layer, prior in zip(parts, own, around, priors, strict=True):
            part.append(ExpertMoments(mine, layer, prior))
    return parts


def _sums(batch: ExpertBatch, expert: int | None, tokens: Tensor, folds: int, first: bool) -> list[FoldSums]:
    """Sum moments over tokens: of the inputs if `first`, then of an expert's activations if one is given."""
    cols = [w.shape[-1] for w in batch.weights]
    wanted = ([0] if first else []) + ([1] if expert is not None else [])
    sums = {m: FoldSums.empty(cols[m], folds, batch.device) for m in wanted}
    for start in range(0, len(tokens), PART):
        part = tokens[start : start + PART]
        fold = cluster_of(part, batch.block, batch.spare) % folds
        x = batch.gather(part)
        if 0 in sums:
            sums[0].add(x, fold)
        if expert is not None:
            sums[1].add(batch.learnt_act(expert, x), fold)
    return [sums[m] for m in wanted]


def _crossfits(tokens: ExpertTokens) -> bool:
    """Whether an expert is measured on tokens it learnt from, which cross-fitting corrects."""
    return not tokens.rich and bool(tokens.learnt.any())


def _gain(moments: ExpertMoments) -> float:
    """The factor a in the formula of `losses`."""
    return 2 / (1 + sum(moments.fewer(f) for f in range(FOLDS)) / FOLDS)


def refit_down(batch: ExpertBatch, settings: Settings, first: Mapping[Version, Quantised]) -> dict[Version, Quantised]:
    """Quantise every expert's down again, on what its quantised first matrix makes, towards the exact expert's output.

    Let a be the input that the exact first matrix gives to down, and q the one that the quantised gives. The best
    linear guess of a is (1 + M) q with M = E[(a - q) q^T] E[q q^T]^-1, so down's codes are fitted to W (1 + M), by the
    moments of q. What the first matrix's errors do to the output is so undone as far as q tells.

    `first` has the first matrices at each version. Experts of many rows are fitted one by one, which bounds memory.
    """
    down = batch.weights[1]
    made: dict[Version, list[Quantised]] = {version: [] for version in first}
    together = max(1, LANES // down.shape[1])
    for start in range(0, len(batch.experts), together):
        experts = range(start, min(start + together, len(batch.experts)))
        every = [_moments_of(batch, i, first) for i in experts]
        for version, parts in made.items():
            moments = []
            wanted = []
            for i, of_expert in zip(experts, every, strict=True):
                product, missing = of_expert.pop(version)
                damping = RIDGE + SPARSE * len(product) / max(1, len(batch.tokens[i].learn))
                ridge = (damping * product.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny)
                shift = torch.linalg.solve(product + ridge * torch.eye(len(product), device=batch.device), missing)
                moments.append(product)
                wanted.append(down[i] + down[i] @ shift.T)
            fitted = quantise(settings.method, torch.stack(wanted), torch.stack(moments), version, settings.zeros, 1)
            parts.append(fitted)
    return {version: join(parts) for version, parts in made.items()}


def _moments_of(
    batch: ExpertBatch, expert: int, first: Mapping[Version, Quantised]
) -> dict[Version, tuple[Tensor, Tensor]]:
    """E[q q^T] and E[q (a - q)^T] of `refit_down` at each version, over the tokens of `batch_moments`.

    Both are float32 [cols, cols]. The exact inputs a are made once for all versions.
    """
    tokens = batch.tokens[expert]
    bias = batch.biases[expert][0]
    cols = batch.weights[1].shape[-1]
    values = {version: dequantise(q.one(expert), version.at(0))[0] for version, q in first.items()}

    def means(at: Tensor) -> dict[Version, tuple[Tensor, Tensor]]:
        products = {version: FoldSums.empty(cols, 1, batch.device) for version in first}
        missing = {version: torch.zeros(cols, cols, device=batch.device) for version in first}
        for start in range(0, len(at), PART):
            part = at[start : start + PART]
            x = batch.gather(part)
            exact = batch.act(expert, x)
            for version, value in values.items():
                q = batch.forward.act(x, value, bias)
                products[version].add(q, torch.zeros(len(part), dtype=torch.int64))
                missing[version].addmm_(q.T, exact - q)
        count = max(1, len(at))
        return {version: (products.pop(version).mean()[0], missing[version].div_(count)) for version in first}

    own = means(tokens.learn)
    prior = PRIOR * cols
    learnt = len(tokens.learn)
    if learnt >= NEGLIGIBLE * prior:
        return own
    around = means(batch.common)
    made = {}
    for version in first:
        of_expert = own.pop(version)
        of_layer = around.pop(version)
        made[version] = (
            shrink(of_expert[0], learnt, of_layer[0], prior),
            shrink(of_expert[1], learnt, of_layer[1], prior),
        )
        del of_expert, of_layer
    return made


def _measure(
    batch: ExpertBatch,
    expert: int,
    made: dict[Version, Pair],
    refitted: dict[Version, Refitted | None],
    compared: Mapping[Version, Quantised],
) -> dict[Version, tuple[Measured, Measured]]:
    """Measure an expert's losses at every version, on its own tokens and on others of the layer.

    `compared` has down's sampled rows, fitted to the same moments as cross-fitting's (`refine` fits down to others).
    """
    tokens = batch.tokens[expert]
    n = len(batch.tokens[expert].measure)
    clusters, around = (cluster_of(t, batch.block, batch.spare) for t in (tokens.measure, tokens.others))
    groups = clusters % GROUPS
    x = batch.gather(torch.cat([tokens.measure, tokens.others]))
    act = batch.act(expert, x)
    original = batch.own(expert)
    bias = batch.biases[expert]
    exact = batch.forward.out(act, original[1], bias[1])
    reads = fold = group = None
    if any(refitted.values()):
        at = torch.where(tokens.learnt)[0].to(x.device)
        reads = x[at], act[at]
        fold = clusters[tokens.learnt] % FOLDS
        group = groups[tokens.learnt]
    rest = torch.full((len(tokens.others),), tokens.gate_square**0.5)
    unlearnt = torch.zeros(len(tokens.others), dtype=torch.bool)
    out = {}
    for version, pair in made.items():
        shipped = tuple(dequantise(q.one(expert), version.at(m))[0] for m, q in enumerate(pair))
        got = batch.forward.out(batch.forward.act(x, shipped[0], bias[0]), shipped[1], bias[1])
        correction = None
        again = refitted.get(version)
        if again is not None:
            assert reads is not None and fold is not None and group is not None
            errors, gain = again
            rows = sampled(shipped[0][None])[0], dequantise(compared[version].one(expert), version.at(1))[0]
            found = [row_errors(reads[m], group, fold, original[m], rows[m], errors[m]) for m in range(2)]
            correction = Correction((found[0], found[1]), gain)
        own = measure(exact[:n], got[:n], tokens.gates, groups, tokens.learnt, correction)
        out[version] = own, measure(exact[n:], got[n:], rest, around % GROUPS, unlearnt, None)
    return out


def replace_starved(
    batch: ExpertBatch, settings: Settings, maker: str, made: Pair, version: Version
) -> tuple[Pair, list[str]]:
    """Replace a starved expert in `made` by a fallback method's result if that has less error on held-out tokens.

    The settings name the wanted method; `maker` made this version. Returns the matrices, and each expert's method.
    """
    starved = [i for i, t in enumerate(batch.tokens) if t.starved]
    names = [maker] * len(batch.tokens)
    candidates = fallbacks(settings.method, version)
    if not starved or not candidates:
        return made, names
    exact = {i: batch.output(i, batch.own(i), batch.tokens[i].compare) for i in starved}
    best = _errors(batch, made, exact, {i: i for i in starved}, version)
    first: dict[int, float] = {}
    for candidate in candidates:
        tries = [i for i in starved if best[i] > candidate.worth * first.get(i, 0.0)]
        if not tries:
            continue
        gate_up, down = (
            quantise(candidate.name, weight[tries], None, version, settings.zeros, m)
            for m, weight in enumerate(batch.weights)
        )
        tried = gate_up, down
        errors = _errors(batch, tried, {i: exact[i] for i in tries}, {i: k for k, i in enumerate(tries)}, version)
        first = first or errors
        better = {i: k for k, i in enumerate(tries) if errors[i] < best[i]}
        for i in better:
            best[i], names[i] = errors[i], candidate.name
        made = made[0].replaced(better, tried[0]), made[1].replaced(better, tried[1])
    return made, names


def _errors(
    batch: ExpertBatch, made: Pair, exact: dict[int, Tensor], at: dict[int, int], version: Version
) -> dict[int, float]:
    """Relative error of each expert in `exact`; at[expert] is the position of its matrices in `made`."""
    values = [dequantise(q, version.at(m)) for m, q in enumerate(made)]
    out = {}
    for i, want in exact.items():
        got = batch.output(i, (values[0][at[i]], values[1][at[i]]), batch.tokens[i].compare)
        out[i] = loss(want, got, torch.ones(len(want), device=batch.device)).relative
    return out
