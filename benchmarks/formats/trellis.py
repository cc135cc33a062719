"""Trellis-coded quantisation down a block of 16 rows: an idea that no bundle holds, as plain torch.

Codes of b bits stand for 2^(b+1) levels. The lowest bit of a level is the lowest bit of the code one row above; the
next is that of the own code, exclusive or that of the code two rows above (row 0 follows on row 15): Ungerboeck's code
of four states, without feedback. A decoder turns vectors of 16 rows by one and by two lanes. The best codes are found
exactly, by Viterbi's algorithm from each state.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, STATES = 16, 4  # a state is the two lowest bits of codes above, the nearer one first


def _steps() -> tuple[Tensor, Tensor]:
    """By state: the two states before it, and the level's lowest two bits on the way from them. int64 [states, 2]."""
    before, low = torch.empty(STATES, 2, dtype=torch.long), torch.empty(STATES, 2, dtype=torch.long)
    for state in range(STATES):
        for k, oldest in enumerate((0, 1)):
            own, above = state & 1, state >> 1  # this row's bit, that of the row above; `oldest` is two rows above
            before[state, k] = above | oldest << 1
            low[state, k] = (own ^ oldest) << 1 | above
    return before, low


BEFORE, LOW = _steps()


def nearest(target: Tensor, weight: Tensor, top: int) -> Tensor:
    """The levels that a block's codes can stand for with the least squared error, weighted.

    Args:
        target: float32 [..., rows], rows a multiple of 16, in units of a level.
        weight: the same shape.
        top: the greatest level.
    """
    wanted = target.reshape(-1, ROWS).T  # [rows, n]
    kinds = torch.arange(4.0)[:, None]
    level = ((wanted[:, None] - kinds) / 4).round_().clamp_(0, (top - 3) // 4).mul_(4).add_(kinds)  # [rows, 4, n]
    cost = (wanted[:, None] - level).square_().mul_(weight.reshape(-1, ROWS).T[:, None])
    count = wanted.shape[1]
    best = torch.full((STATES, STATES, count), torch.inf)  # by the state before row 0, and now
    best[range(STATES), range(STATES)] = 0
    second = torch.empty(ROWS, *best.shape, dtype=torch.bool)
    for r in range(ROWS):
        ways = [best.index_select(1, BEFORE[:, k]).add_(cost[r].index_select(0, LOW[:, k])) for k in range(2)]
        torch.lt(ways[1], ways[0], out=second[r])
        best = torch.minimum(*ways)
    first = best.diagonal(dim1=0, dim2=1).argmin(1)  # where a block ends it began
    at, state, out = torch.arange(count), first, torch.empty_like(wanted)
    for r in range(ROWS - 1, -1, -1):
        way = second[r, first, state, at].long()
        out[r] = level[r, LOW[state, way], at]
        state = BEFORE[state, way]
    return out.T.reshape(target.shape)
