"""Second moments of the inputs of an expert's matrices, shrunk toward the layer's if the expert has few tokens.

An estimate from n tokens of a d-dimensional input has rank n and misleads GPTQ unless n is several times d. Tokens of
the whole layer, sent through the same expert, give a moment matrix of full rank with some bias. It is mixed in as if
from K more tokens, where d is the columns of the matrix:

    M = (n * M_expert + K * M_layer) / (n + K),   K = d / 2.

"Moments" are E[x x^T] throughout: half of GPTQ's Hessian of the squared error with respect to a row's weights.

The rule is the posterior mean of a covariance under a prior worth K observations (inverse Wishart; Haff, 1980). K was
measured on trained experts with 256 and 128 columns, quantised by gptqmodel, as output error on held-out tokens: from
d/4 to d this is flat for all n from 3 to 1000 and all widths. With K = d/2 the 2-bit error is 0.070 at n = 3 (unshrunk
0.149, rounding 0.162), 0.067 at 128 (0.090) and 0.058 at 1000 (0.059).

Products are summed by fold, so that the moments without a fold, which cross-fitting needs (`crossfit`), take no further
product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PRIOR = 0.5  # K over the columns of the matrix
# A product is made in strips of STRIP rows or more, each from the diagonal on, at most STRIPS of them: 4,096 tokens of
# 2,048 columns take 0.61 of the whole product's time on one core, in two strips 0.69.
STRIP = 256
STRIPS = 16
NEGLIGIBLE = 8  # from this times K tokens on, the layer's part changes errors by less than 1 %: not computed


def second_moments(inputs: Tensor) -> Tensor:
    """The mean of x x^T over inputs [tokens, cols], float32 [cols, cols]; zero without tokens."""
    sums = FoldSums.empty(inputs.shape[1], 1, inputs.device)
    sums.add(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    return sums.mean()[0]


def shrink(own: Tensor, tokens: int, layer: Tensor, prior: float) -> Tensor:
    """Mix an expert's moments, made from `tokens` tokens, with the layer's, worth `prior` tokens."""
    return (tokens * own).add_(prior * layer).div_(tokens + prior)


@dataclass(frozen=True, slots=True)
class FoldSums:
    """Sums of x x^T by fold."""

    products: Tensor  # float32 [folds, cols, cols]; on and above the diagonal only
    counts: Tensor  # int64 [folds], tokens, on the CPU

    @staticmethod
    def empty(cols: int, folds: int, device: torch.device) -> FoldSums:
        """Sums over no tokens: zeros."""
        counts = torch.zeros(folds, dtype=torch.int64)
        return FoldSums(torch.zeros(folds, cols, cols, device=device), counts)

    def add(self, inputs: Tensor, fold: Tensor) -> None:
        """Add inputs float32 [tokens, cols] to their folds, int64 [tokens]."""
        for f in range(len(self.counts)):
            here = torch.where(fold == f)[0]
            if len(here):
                x = inputs if len(here) == len(inputs) else inputs[here.to(inputs.device)]
                _add_product(self.products[f], x)
                self.counts[f] += len(here)

    def mean(self, without: int | None = None) -> tuple[Tensor, int]:
        """The mean [cols, cols] over all folds or all but one, and the number of its tokens; zero without tokens."""
        kept = [f for f in range(len(self.counts)) if f != without and self.counts[f]]
        if not kept:
            return torch.zeros_like(self.products[0]), 0
        total = self.products[kept[0]].clone()
        for f in kept[1:]:
            total += self.products[f]
        tokens = int(self.counts[kept].sum())
        return _mirror(total.div_(tokens)), tokens


def _add_product(into: Tensor, x: Tensor) -> None:
    """Add the upper triangle of x^T x [cols, cols], in strips of rows."""
    cols = len(into)
    rows = max(STRIP, -(-cols // STRIPS)) if into.device.type == "cpu" else cols
    for a in range(0, cols, rows):
        into[a : a + rows, a:].addmm_(x[:, a : a + rows].T, x[:, a:])


def _mirror(square: Tensor) -> Tensor:
    """Copy the upper triangle to the lower one, in place."""
    cols = len(square)
    for a in range(0, cols, STRIP):
        b = min(a + STRIP, cols)
        corner = square[a:b, a:b].triu()
        square[a:b, a:b] = corner + corner.triu(1).T
        square[b:, a:b] = square[a:b, b:].T
    return square


@dataclass(frozen=True, slots=True)
class ExpertMoments:
    """Moments of the inputs of one matrix of one expert."""

    own: FoldSums  # over the tokens that the expert learns from
    layer: FoldSums | None  # over the layer's tokens; None if the expert has enough of its own
    prior: float  # tokens that the layer's moments count as

    def mean(self, without: int | None = None) -> Tensor:
        """The shrunk moments of all tokens, or of those outside a fold."""
        own, tokens = self.own.mean(without)
        return own if self.layer is None else shrink(own, tokens, self.layer.mean(without)[0], self.prior)

    def fewer(self, without: int) -> float:
        """Ratio of all tokens to those outside a fold; both counts include `prior`."""
        prior = 0.0 if self.layer is None else self.prior
        every = int(self.own.counts.sum())
        return (every + prior) / max(1.0, every - int(self.own.counts[without]) + prior)
