"""Cross-fitting: what a quantiser's weights cost on tokens that it did not learn from, without shipping other weights.

The tokens are cut into FOLDS folds. Some rows of both matrices are quantised once more for each, from the moments of
the other folds, and their error on the fold is held against that of the shipped rows. Rows do not see one another in
any of the methods that read moments, so a few of them, evenly spaced, show what all would. What follows from the two
errors is `losses`' business; which tokens and folds, the caller's.

Cost: a row costs cols^2 products a width, a factor cols^3 / 3 once for all rows: with a 64th of the rows and four folds
a sixteenth of a fit, and four factors, which are 3 % of a fit of Qwen3-30B-A3B's gate_up each. Measured, quantising and
measuring an expert of 1,024 and 512 columns at four widths takes 1.2 times as long as without with 1,100 tokens; about
half of what is left is the four factors. With 17,000 it takes 0.63 times as long: nothing is fitted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.spec import Version

from .grid import dequantise
from .losses import GROUPS
from .methods import quantise_all
from .moments import ExpertMoments

FOLDS = 4
LEAST_ROWS = 16
SHARE = 64  # one row in so many, but LEAST_ROWS at the least
_STACK = 1 << 26  # bytes of moments that are quantised from together


@dataclass(frozen=True, slots=True)
class RowErrors:
    """Squared errors of sampled rows on tokens learnt from, of the shipped ones and of those fitted without a fold.

    Attributes:
        groups: float64 [2, GROUPS], by group of tokens.
        rows: float64 [2, sampled], by row.
        share: rows that one of them stands for.
    """

    groups: Tensor
    rows: Tensor
    share: float


def fold_of(tokens: Tensor, block: int, spare: int) -> Tensor:
    """The folds of tokens, int64: clusters of `block` tokens in turn, leaving out one in `spare`, the last of each."""
    return _place(tokens, block, spare) % FOLDS


def group_of(tokens: Tensor, block: int, spare: int) -> Tensor:
    """The groups of tokens, int64; tokens of one group are of one fold."""
    return _place(tokens, block, spare) % GROUPS


def _place(tokens: Tensor, block: int, spare: int) -> Tensor:
    cluster = tokens // block
    return cluster - cluster // spare


def sample(rows: int) -> Tensor:
    """The rows that stand for all, int64."""
    return torch.linspace(0, rows - 1, min(rows, max(LEAST_ROWS, rows // SHARE))).long()


def refit(
    method: str, weight: Tensor, moments: Sequence[ExpertMoments], versions: Sequence[Version]
) -> dict[Version, Tensor]:
    """The sampled rows' errors, value less weight, fitted without each fold: float32 [experts, folds, sampled, cols].

    Args:
        method: the quantiser's name.
        weight: float32 [experts, rows, cols].
        moments: of each expert.
        versions: affine versions.
    """
    rows = weight[:, sample(weight.shape[1]).to(weight.device)]
    cols = weight.shape[2]
    step = max(1, _STACK // (4 * FOLDS * cols * cols))
    found: dict[Version, list[Tensor]] = {v: [] for v in versions}
    for start in range(0, len(rows), step):
        some = moments[start : start + step]
        of_folds = torch.stack([m.mean(without=f) for m in some for f in range(FOLDS)])
        repeated = rows[start : start + step].repeat_interleave(FOLDS, 0)
        for version, made in quantise_all(method, repeated, of_folds, versions).items():
            found[version].append((dequantise(made, version) - repeated).unflatten(0, (len(some), FOLDS)))
    return {v: torch.cat(parts) for v, parts in found.items()}


def row_errors(
    inputs: Tensor, groups: Tensor, fold: Tensor, weight: Tensor, shipped: Tensor, fitted: Tensor
) -> RowErrors:
    """What the sampled rows cost on tokens that were learnt from.

    Args:
        inputs: what the matrix reads, float32 [tokens, cols].
        groups, fold: int64 [tokens], on the CPU.
        weight, shipped: the matrix and its quantised values, float32 [rows, cols].
        fitted: errors of the rows fitted without each fold, float32 [folds, sampled, cols].
    """
    rows = sample(len(weight)).to(weight.device)
    own = (inputs @ (shipped[rows] - weight[rows]).T).square()
    other = torch.empty_like(own)
    for f in range(FOLDS):
        here = torch.where(fold == f)[0].to(inputs.device)
        other[here] = (inputs[here] @ fitted[f].T).square()
    both = torch.stack([own, other]).double().cpu()
    by_group = torch.zeros(2, GROUPS, dtype=torch.float64).index_add_(1, groups, both.sum(2))
    return RowErrors(by_group, both.sum(1), len(weight) / len(rows))
