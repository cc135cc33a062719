"""The loss of an expert's quantised matrices: the output's error against BF16 on tokens they were not fitted to.

Fitted weights have less error on the tokens they were fitted to: with 1,024 columns of correlated inputs the true loss
is 2.4, 1.4 and 1.1 times as large, at 256, 1,024 and 4,096 tokens. If an expert must learn from all its tokens, the
loss on them is multiplied by a factor rho from cross-fitting (`crossfit`). Let s be the error, on a fold, of weights
fitted to all tokens, and h that of weights fitted to the other folds, both summed over folds. Then

    rho = 1 + a (h / s - 1),   a = 2 / (1 + r),

where r is the shipped weights' evidence over that of the refitted ones. With evidence m in tokens, the loss is to
first order L (1 + c/m) on new tokens and L (1 - c/m) on those learnt from (Akaike's argument), so h = L (1 + r c/m),
s = L (1 - c/m), and the wanted t = L (1 + c/m): t - s = (h - s) * 2 / (1 + r). tests/quantize/test_losses.py
holds how near t is to the truth.

Each of an expert's two matrices has its own rho. Their errors x and y, as shares of the output's square, combine to a
loss of x + y - x y (measured: at one bit, where it matters, the last term is 1.2 x y on both kinds of tokens). The
sampled rows of down give y, the loss gives x, and rho x and rho y give the corrected loss. A jackknife over groups of
tokens gives standard errors; groups are whole windows of text if there are enough (tokens of a text are alike).
`doubt` adds the variance that the jackknife does not cover.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Version of the loss estimate (this module, `crossfit`, `pooling`, the choice of tokens). Increase it whenever numbers
# change, so that a work directory does not mix two estimates. 1 was the uncorrected loss; 2 summed products whole and
# always learnt from float32 activations; 3 did not bound the variance of a ratio.
ESTIMATE = 4
GROUPS = 64
MOST = 0.8  # the largest share of the output's square at which two matrices' errors combine as above
MODEL = 0.07  # assumed relative error of rho - 1, which is a first-order correction


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of an expert's version."""

    mse: float  # mean squared error of the expert's output against its BF16 output
    relative: float  # squared error over squared output
    gated: float  # mean of gate**2 times squared error: the error as the layer's output sees it


@dataclass(frozen=True, slots=True)
class Measured:
    """A loss with its variance, before pooling over a layer's experts (`pooling`)."""

    loss: Loss  # the estimate; zeros without tokens
    variance: Loss  # the jackknife variance of each part; zeros with fewer than two groups
    groups: int  # number of groups of tokens
    doubt: float  # further variance, relative to the loss squared


@dataclass(frozen=True, slots=True)
class RowErrors:
    """Squared errors of sampled rows on tokens learnt from: of the shipped rows, and of those fitted without a fold."""

    groups: Tensor  # float64 [2, GROUPS], by group of tokens
    rows: Tensor  # float64 [2, sampled], by row
    share: float  # the number of rows that a sampled row represents


@dataclass(frozen=True, slots=True)
class Correction:
    """Cross-fitting's errors of an expert's two matrices at one version."""

    matrices: tuple[RowErrors, RowErrors]
    gain: tuple[float, float]  # the factor a of each matrix


def loss(exact: Tensor, got: Tensor, gates: Tensor) -> Loss:
    """The uncorrected losses of outputs [tokens, hidden] against exact ones, with gate weights [tokens]."""
    error = (exact - got).square()
    total = exact.square().sum()
    relative = error.sum() / total if total > 0 else error.sum()
    gated = (gates.square()[:, None] * error).mean()
    return Loss(float(error.mean()), float(relative), float(gated))


def measure(
    exact: Tensor, got: Tensor, gates: Tensor, groups: Tensor, learnt: Tensor, correction: Correction | None
) -> Measured:
    """Estimate the loss on tokens like these, and its variance.

    `exact` and `got` are outputs [tokens, hidden], `gates` gate weights [tokens], `groups` int64 [tokens] below GROUPS.
    The correction, if any, applies to the tokens in `learnt`, bool [tokens].
    """
    hidden = exact.shape[1]
    error = (exact - got).square().sum(1).cpu()
    output = exact.square().sum(1).cpu()
    weight = gates.square().cpu()
    inside = learnt.to(error.dtype)
    parts = [torch.ones_like(error), error * inside, error * (1 - inside)]
    parts += [error * weight * inside, error * weight * (1 - inside), output, output * inside]
    sums = torch.zeros(7, GROUPS, dtype=torch.float64).index_add_(1, groups, torch.stack(parts).double())
    own = other = torch.zeros(2, GROUPS, dtype=torch.float64)  # by matrix
    if correction is not None:
        own, other = torch.stack([m.groups for m in correction.matrices], dim=1)
    used = sums[0] > 0
    count = int(used.sum())
    if not count:
        return Measured(Loss(0, 0, 0), Loss(0, 0, 0), 0, 0)
    # Columns: the whole, then all but one group. [7, 1 + groups] and [2, 1 + groups].
    tokens, fitted, rest, fitted_gated, rest_gated, outputs, fitted_outputs = _and_without_each(sums[:, used])
    own = _and_without_each(own[:, used])
    other = _and_without_each(other[:, used])
    rho, shares = _factors(fitted, fitted_outputs, own, other, correction)
    errors = rest + rho * fitted
    found = torch.stack(
        [
            errors / (tokens * hidden),
            torch.where(outputs > 0, errors / outputs.clamp(min=1e-300), errors),
            (rest_gated + rho * fitted_gated) / (tokens * hidden),
        ]
    )
    variance = torch.zeros(3, dtype=torch.float64)
    if count > 1:
        each = found[:, 1:]
        variance = (each - each.mean(1, keepdim=True)).square().sum(1) * (count - 1) / count
    doubt = 0.0
    if correction is not None and float(errors[0]) > 0:
        moved = float(fitted[0] / errors[0])
        rows = sum(
            (float(s) * a) ** 2 * _ratio_variance(m.rows)
            for s, a, m in zip(shares, correction.gain, correction.matrices, strict=True)
        )
        doubt = moved**2 * (rows + (MODEL * (float(rho[0]) - 1)) ** 2)
    return Measured(Loss(*found[:, 0].tolist()), Loss(*variance.tolist()), count, doubt)


def _and_without_each(sums: Tensor) -> Tensor:
    """The total over groups of [n, groups], then the totals without each group: [n, 1 + groups]."""
    total = sums.sum(1, keepdim=True)
    return torch.cat([total, (total - sums).clamp(min=0)], 1)


def _factors(
    fitted: Tensor, outputs: Tensor, own: Tensor, other: Tensor, correction: Correction | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The loss's correction factor in every column, and each matrix's share of the loss in the first column."""
    if correction is None:
        return torch.ones_like(fitted), (torch.zeros(()), torch.zeros(()))
    ratio = torch.where(own > 0, other / own.clamp(min=1e-300), torch.ones_like(own))
    gain = torch.tensor(correction.gain, dtype=torch.float64)[:, None]
    rho = 1 + gain * (ratio - 1)
    down = torch.where(fitted > 0, own[1] * correction.matrices[1].share / fitted.clamp(min=1e-300), 0.5).clamp(0, 1)
    whole = torch.where(outputs > 0, fitted / outputs.clamp(min=1e-300), 1.0)
    second = down * whole
    first = (whole - second) / (1 - second).clamp(min=1e-3)
    both = rho[0] * first + rho[1] * second - rho[0] * first * rho[1] * second
    # Beyond this loss the version is worse than omitting the expert, and x y no longer measures the overlap.
    usable = (whole > 0) & (rho * torch.stack([first, second]) < MOST).all(0)
    linear = (1 - down) * rho[0] + down * rho[1]
    return torch.where(usable, both / whole.clamp(min=1e-300), linear), (1 - down[0], down[0])


def _ratio_variance(rows: Tensor) -> float:
    """The sampling variance of sum(other) / sum(own); `rows` holds own and other, [2, rows]."""
    own, other = rows
    count = len(own)
    total = float(own.sum())
    if count < 2 or total <= 0:
        return 0.0
    residual = other - float(other.sum()) / total * own
    return float(residual.square().sum()) * count / (count - 1) / total**2
