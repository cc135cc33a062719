"""Prefix-structured widths for the experts of one layer (context-aware-cxl-ndp, sections 4.1 and 4.2). Pure.

The paper's budget counts code bits, in one layer; allocation.py has what counts bytes, over all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

WIDTHS = (1, 2, 3, 4)  # the columns of the loss table


def prefix_split(importance: Sequence[float], losses: Sequence[Sequence[float]], average_bits: float) -> list[int]:
    """Widths of one layer's experts that fall with their importance (context-aware-cxl-ndp, section 4.2).

    With the experts in descending order of importance, the first n4 get 4 bits, the next n3 get 3, the next n2 get 2
    and the rest 1. Starting from one bit, R = E (average_bits - 1) increments are spent: 3 n4 + 2 n3 + n2 = R. All
    (n4, n3) are tried; n2 and n1 follow; prefix sums of the gains L(1) - L(b) give each one's total gain at once.

    The budget counts code bits, as the paper does, not bytes. Where R is no integer it is rounded down. Experts of one
    importance keep their order; of splits of one gain the first is taken, n4 and then n3 rising.

    Args:
        importance: [experts], such as `prefill_importance` gives.
        losses: losses[expert] at 1, 2, 3 and 4 bits (WIDTHS).
        average_bits: from 1 to 4.

    Returns:
        The width of every expert, in the order given.

    Raises:
        ValueError: when the average is outside 1 to 4.
    """
    if not 1 <= average_bits <= 4:
        raise ValueError(f"an average of {average_bits} bits is not from 1 to 4")
    count = len(importance)
    order = sorted(range(count), key=lambda e: -importance[e])
    increments = math.floor(count * (average_bits - 1) + 1e-9)
    gains = [
        [0.0, *itertools.accumulate(losses[e][0] - losses[e][column] for e in order)] for column in range(len(WIDTHS))
    ]
    best, split = -math.inf, (0, 0, 0)
    for n4 in range(min(count, increments // 3) + 1):
        for n3 in range(min(count - n4, (increments - 3 * n4) // 2) + 1):
            n2 = increments - 3 * n4 - 2 * n3
            if n4 + n3 + n2 > count:
                continue
            a, b, c = n4, n4 + n3, n4 + n3 + n2
            gain = gains[3][a] + (gains[2][b] - gains[2][a]) + (gains[1][c] - gains[1][b])
            if gain > best:
                best, split = gain, (a, b, c)
    widths = [1] * count
    for place, e in enumerate(order):
        widths[e] = 4 - sum(place >= end for end in split)
    return widths


def prefill_importance(counts: Sequence[float], scores: Sequence[float], alpha: float = 0.5) -> list[float]:
    """How much each expert of a layer matters (context-aware-cxl-ndp, section 4.1): alpha P + (1 - alpha) W.

    Args:
        counts: [experts], tokens routed to each.
        scores: [experts], sums of their routing weights.
        alpha: the share of the counts; 0.5 in the paper's experiments.

    Returns:
        [experts]; counts and scores are each taken as shares of the layer's sum.
    """
    of_counts, of_scores = sum(counts) or 1.0, sum(scores) or 1.0
    return [alpha * p / of_counts + (1 - alpha) * w / of_scores for p, w in zip(counts, scores, strict=True)]
