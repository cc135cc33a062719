"""Cross-fitting: estimate the loss of quantised weights on tokens that they were not fitted to.

The tokens form FOLDS folds. For each fold, some rows of both matrices are quantised again from the moments of the other
folds, and their error on the fold is compared with the shipped rows' (`losses`). Methods that read moments
quantise rows independently, so a few evenly spaced rows represent all.

Cost: a row takes cols^2 products a width; a factor takes cols^3 / 3, once for all rows. With a 64th of the rows, four
folds take a sixteenth of a fit and four factors, each 3 % of a fit of Qwen3-30B-A3B's gate_up. Measured: quantising and
measuring an expert of 1,024 and 512 columns at four widths takes 1.2 times as long with 1,100 tokens; the four factors
are about half of the added time. With 17,000 tokens it takes 0.63 times as long, as nothing is fitted again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.spec import Version

from .grid import dequantise
from .losses import GROUPS, RowErrors
from .methods import FREE, quantise_all
from .moments import ExpertMoments

FOLDS = 4
LEAST_ROWS = 16
SHARE = 64  # one row in SHARE is sampled, at least LEAST_ROWS
_STACK = 1 << 26  # most bytes of moments in one call of the quantiser
_SINGLY = 4096  # above this number of columns, the quantiser works on single matrices anyway (`gptq.BATCH_BYTES`)


def cluster_of(tokens: Tensor, block: int, spare: int) -> Tensor:
    """Number the tokens' clusters of `block` neighbours, int64; the last of every `spare` clusters is not counted.

    A cluster's fold is its number modulo FOLDS. Its group is the number modulo GROUPS, so a group lies within one fold.
    """
    cluster = tokens // block
    return cluster - cluster // spare


def sample_size(rows: int) -> int:
    """The number of sampled rows of a matrix."""
    return min(rows, max(LEAST_ROWS, rows // SHARE))


def sample(rows: int) -> Tensor:
    """Indexes of the sampled rows, evenly spaced, int64."""
    return torch.linspace(0, rows - 1, sample_size(rows)).long()


def sampled(matrices: Tensor) -> Tensor:
    """The sampled rows of matrices [experts, rows, ...]."""
    return matrices[:, sample(matrices.shape[1]).to(matrices.device)]


def refit(
    method: str,
    weight: Tensor,
    moments: Sequence[ExpertMoments],
    versions: Sequence[Version],
    zeros: str = FREE,
    matrix: int = 0,
) -> dict[Version, Tensor]:
    """Fit sampled rows without each fold: their errors (value less weight), float32 [experts, folds, sampled, cols].

    `weight` is float32 [experts, rows, cols]; `moments` has an entry for each expert; `matrix` is as in
    `quantise_all`.
    """
    rows = sampled(weight)
    step = at_once(weight.shape[2], len(moments))
    of = [(i, f) for i in range(len(moments)) for f in range(FOLDS)]
    found: dict[Version, list[Tensor]] = {v: [] for v in versions}
    for start in range(0, len(of), step):
        some = of[start : start + step]
        repeated = rows[[i for i, _ in some]]
        means = [moments[i].mean(without=f) for i, f in some]
        of_folds = torch.stack(means) if len(means) > 1 else means[0][None]
        del means
        for version, made in quantise_all(method, repeated, of_folds, versions, zeros, matrix).items():
            found[version].append(dequantise(made, version.at(matrix)) - repeated)
        del of_folds
    return {v: torch.cat(parts).unflatten(0, (-1, FOLDS)) for v, parts in found.items()}


def at_once(cols: int, experts: int) -> int:
    """Number of moment matrices (one for each expert and fold) in a call; 1 where gptq takes matrices singly."""
    return 1 if cols > _SINGLY else FOLDS * min(experts, max(1, _STACK // (4 * FOLDS * cols * cols)))


def row_errors(
    inputs: Tensor, groups: Tensor, fold: Tensor, weight: Tensor, shipped: Tensor, fitted: Tensor
) -> RowErrors:
    """Measure the sampled rows' errors on tokens that the expert learnt from.

    `inputs` are the matrix's, float32 [tokens, cols], `groups` and `fold` int64 [tokens] on the CPU, `weight` float32
    [rows, cols], the sampled rows' quantised values `shipped` float32 [sampled, cols], and `fitted`, from `refit`,
    float32 [folds, sampled, cols].
    """
    rows = sample(len(weight)).to(weight.device)
    own = (inputs @ (shipped - weight[rows]).T).square()
    other = torch.empty_like(own)
    for f in range(FOLDS):
        here = torch.where(fold == f)[0].to(inputs.device)
        other[here] = (inputs[here] @ fitted[f].T).square()
    both = torch.stack([own, other]).double().cpu()
    by_group = torch.zeros(2, GROUPS, dtype=torch.float64).index_add_(1, groups, both.sum(2))
    return RowErrors(by_group, both.sum(1), len(weight) / len(rows))
