"""Widths in bits for the experts of one layer that fall with importance (context-aware-cxl-ndp, 4.1 and 4.2). Pure.

The paper's budget counts code bits in one layer; knapsack.py counts bytes over all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WIDTHS = (1, 2, 3, 4)  # the widths of the paper


def prefix_split(
    importance: Sequence[float],
    losses: Sequence[Sequence[float]] | npt.NDArray[np.float64],
    average_bits: float,
    widths: Sequence[int],
) -> list[int]:
    """Choose widths for one layer's experts that fall with their importance (context-aware-cxl-ndp, section 4.2).

    Experts are sorted by importance, the highest first. The first n4 get 4 bits, the next n3 get 3, the next n2 get 2
    and the other n1 get 1. For E experts at one bit, R = E (average_bits - 1) further bits can be spent: 3 n4 + 2 n3 +
    n2 = R. All (n4, n3) are tried; n2 and n1 follow. Prefix sums of the gains L(1) - L(b) give each split's total gain.

    Beyond the paper, any widths are allowed; further bits count from the least width. If gaps between the widths make
    R unreachable, the largest sum below R is spent. A fractional R is rounded down. Experts of equal importance keep
    their order. Of splits with equal gain the first is taken, with n4 and then n3 rising.

    Args:
        importance: [experts], for example from `prefill_importance`.
        losses: losses[expert][width], in the order of `widths`.
        average_bits: the average width of codes, from the least width to the greatest.
        widths: the widths to choose from, ascending.

    Returns:
        The width of every expert, in the order of `importance`.

    Raises:
        ValueError: when the average is outside the widths.
    """
    if not widths[0] <= average_bits <= widths[-1]:
        raise ValueError(f"an average of {average_bits} bits is not from {widths[0]} to {widths[-1]}")
    count = len(importance)
    least = widths[0]
    order = np.argsort(-np.array(importance, np.float64), kind="stable")
    table = np.array(losses, np.float64).reshape(count, len(widths))[order]
    gains = np.zeros((count + 1, len(widths)))  # [k][width], gain of the first k experts over the least width
    gains[1:] = np.cumsum(table[:, :1] - table, axis=0)
    increments = math.floor(count * (average_bits - least) + 1e-9)
    steps = [w - least for w in widths]
    ends = _best(gains, steps, count, increments)
    out = np.full(count, least)
    for width, begin, end in zip(widths[:0:-1], [0, *ends], ends, strict=False):
        out[order[begin:end]] = width
    return out.tolist()


def _best(gains: npt.NDArray[np.float64], steps: Sequence[int], count: int, increments: int) -> list[int]:
    """Return where each width's experts end in the order of importance, the greatest width first, without the least."""
    if len(steps) == 1:
        return []
    tried = [range(min(count, increments // step) + 1) for step in steps[:1:-1]]  # for all but the two least widths
    grid = np.meshgrid(*(np.arange(len(r)) for r in tried), indexing="ij")
    counts = [n.ravel() for n in grid]
    spent = sum((n * s for n, s in zip(counts, steps[:1:-1], strict=True)), start=np.zeros(1, np.int64))
    taken = sum(counts, start=np.zeros(1, np.int64))
    last = (increments - spent) // steps[1]
    fits = (spent <= increments) & (taken + last <= count)
    if not fits.any():  # gaps between widths: no expert has the least width, and further bits are left over
        last = np.minimum(last, count - taken)
        fits = (spent <= increments) & (taken <= count)
    all_spent = np.where(fits, spent + last * steps[1], -1)
    fits &= all_spent == all_spent.max()
    counts = [np.broadcast_to(n, fits.shape) for n in (*counts, last)]
    ends = np.cumsum(np.stack([n[fits] for n in counts]), axis=0)
    gain = np.zeros(ends.shape[1])
    begin = np.zeros(ends.shape[1], np.int64)
    for column, end in zip(range(len(steps) - 1, 0, -1), ends, strict=True):
        gain = gain + (gains[end, column] - gains[begin, column])
        begin = end
    found: list[int] = ends[:, int(gain.argmax())].tolist()
    return found


def prefill_importance(counts: Sequence[float], scores: Sequence[float], alpha: float = 0.5) -> list[float]:
    """Return each expert's importance in a layer (context-aware-cxl-ndp, section 4.1): alpha P + (1 - alpha) W.

    P is an expert's share of the layer's `counts` (tokens), W its share of `scores` (sums of gate weights), [experts].
    `alpha` is 0.5 in the paper's experiments.
    """
    of_counts = sum(counts) or 1.0
    of_scores = sum(scores) or 1.0
    return [alpha * p / of_counts + (1 - alpha) * w / of_scores for p, w in zip(counts, scores, strict=True)]
