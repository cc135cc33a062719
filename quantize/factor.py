"""Order the columns, damp the second moments and factor them.

Any moments can be factored, even with unused columns, all zeros, not positive definite or not finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Damping over the mean diagonal. 0.005 to 0.1 differ by less than 3 % at 4 to 2 bits; one bit needs 0.02 or more.
DAMP = 0.02
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Factored:
    """A batch of damped second moments H with mean diagonal 1, columns in the order of quantisation."""

    order: Tensor  # int64 [experts, cols], the matrix's column at each place
    damped: Tensor  # float32 [experts, cols, cols], H
    # Float32 [experts, cols, cols], unit upper triangular: M over its diagonal, for H = M M^T with M upper.
    feed: Tensor
    # Float32 [experts, cols], M's diagonal squared: the cost of a column's error after later columns have compensated
    # it.
    weight: Tensor


def factor(moments: Tensor, group_size: int) -> Factored:
    """Order, damp and factor mean second moments, float32 [experts, cols, cols].

    Within a group, columns are ordered by falling diagonal, so that the most columns can compensate the largest errors.
    Groups keep their places: the order is not stored and costs nothing at run time. Measured: 8 % less error on trained
    experts of 256 by 256, 20 % on generated ones; ordering the groups too changes nothing.

    The error of a row, (w - q) H (w - q)^T, is |(w - q) M|^2, and column j of (w - q) M is M_jj times column j of w - q
    plus what the columns before it feed forward (the form of LDLQ, Chee et al., 2023, which equals GPTQ's). So one
    Cholesky factor suffices, without an inverse.
    """
    moments = _unit(moments)
    order = _order(moments.diagonal(dim1=-2, dim2=-1), group_size)
    damped = torch.stack([m[o[:, None], o] for m, o in zip(moments, order, strict=True)])
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    undamped = diagonal.clone()
    amount = torch.full_like(damped[:, 0, 0], DAMP)
    diagonal += amount[:, None]
    lower, failed = _cholesky(damped.flip(-1, -2))
    while bool(failed.any()):  # not positive definite: ten times the damping
        amount = torch.where(failed, amount * 10, amount)
        diagonal.copy_(undamped + amount[:, None])
        lower, failed = _cholesky(damped.flip(-1, -2))
    upper = lower.flip(-1, -2)
    pivots = upper.diagonal(dim1=-2, dim2=-1).clone()
    return Factored(order, damped, upper.div_(pivots[:, None, :]), pivots.square())


def _cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the lower Cholesky factors of a batch in place; returns them, and which failed, bool [experts].

    Works by blocks: 2,048 columns take 36 ms on one core, but 97 by torch.linalg.cholesky_ex, of which LAPACK has 18.
    """
    cols = matrix.shape[-1]
    failed = torch.zeros(len(matrix), dtype=torch.bool, device=matrix.device)
    for a in range(0, cols, _BLOCK):
        b = min(a + _BLOCK, cols)
        corner, info = torch.linalg.cholesky_ex(matrix[:, a:b, a:b])
        failed |= info != 0
        matrix[:, a:b, a:b] = corner
        matrix[:, a:b, b:] = 0
        if b < cols:
            matrix[:, b:, a:b] = torch.linalg.solve_triangular(corner.mT, matrix[:, b:, a:b], upper=True, left=False)
        for c in range(b, cols, _BLOCK):
            d = min(c + _BLOCK, cols)
            matrix[:, c:, c:d].baddbmm_(matrix[:, c:, a:b], matrix[:, c:d, a:b].mT, alpha=-1)
    return matrix, failed


def _unit(moments: Tensor) -> Tensor:
    """Scale moments to mean diagonal 1; the identity replaces those that are zero or not finite."""
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)
    # The sum is finite only if all entries are (moments whose sum overflows float32 are as useless).
    good = (mean > torch.finfo(torch.float32).tiny) & torch.isfinite(mean) & torch.isfinite(moments.sum((1, 2)))
    scaled = moments / torch.where(good, mean, 1.0)[:, None, None]
    if not bool(good.all()):
        scaled[~good] = torch.eye(moments.shape[-1], device=moments.device)
    # Entries far beyond the mean diagonal are invalid; with these clamped, enough damping makes a matrix definite.
    return scaled.clamp_(-1e6, 1e6)


def _order(diagonal: Tensor, group_size: int) -> Tensor:
    cols = diagonal.shape[-1]
    padded = torch.nn.functional.pad(diagonal, (0, -cols % group_size), value=-torch.inf)
    place = padded.unflatten(-1, (-1, group_size)).argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(0, cols, group_size, device=diagonal.device)
    order: Tensor = (place + first[:, None]).flatten(1)[:, :cols]
    return order
