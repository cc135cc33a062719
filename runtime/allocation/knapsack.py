"""The choice of a version for every expert under a budget in bytes. Pure: numbers in, decisions out, no torch.

Sizes are bytes of whole extents, with scales, zero points and padding. All tables list versions in the same order. The
same numbers give the same allocation every time. prefix_split.py has a budget in bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Table = Sequence[Sequence[float]]  # rows of numbers; the caller defines what a row means


class BudgetError(ValueError):
    """The budget is below `least`, the bytes of all experts at the smallest versions."""

    def __init__(self, least: float, budget: float) -> None:
        self.least = least
        super().__init__(f"the smallest versions take {least:.0f} bytes, the budget is {budget:.0f}")


def spent(table: Table, chosen: Sequence[int]) -> float:
    """Return the sum of `table[expert][chosen[expert]]`: the bytes of an allocation, or its loss."""
    return math.fsum(row[v] for row, v in zip(table, chosen, strict=True))


def greedy(sizes: Table, losses: Table, budget: float) -> list[int]:
    """Choose a version for every expert, within `budget` bytes, by the loss saved per byte.

    Every expert starts at its smallest version. Upgrades along the lower convex hull of (bytes, loss) are taken while
    they fit, those that save the most loss per byte first. The total loss exceeds the least possible loss by at most
    the saving of one upgrade (Dantzig's bound: the upgrades before the first misfit solve the linear relaxation).

    Args:
        sizes: sizes[expert][version], bytes.
        losses: losses[expert][version], expected loss, in the same unit for all experts.
        budget: bytes.

    Returns:
        For every expert, the index of its version.

    Raises:
        BudgetError: when the smallest versions exceed the budget.
    """
    chosen = []
    steps = []
    for e, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
        chain = hull(size, loss)
        chosen.append(chain[0])
        steps += [((loss[b] - loss[a]) / (size[b] - size[a]), e, b) for a, b in itertools.pairwise(chain)]
    total = _least(sizes, budget)
    blocked: set[int] = set()
    for _, e, version in sorted(steps, key=lambda s: s[0]):  # stable: an expert's own upgrades stay in order
        cost = sizes[e][version] - sizes[e][chosen[e]]
        if e in blocked or total + cost > budget:
            blocked.add(e)  # a later upgrade of this expert would need the upgrade that did not fit
            continue
        total += cost
        chosen[e] = version
    return chosen


def uniform(sizes: Table, budget: float) -> list[int]:
    """Choose one version for all experts, and the next more precise version for the experts for which it still fits.

    This baseline ignores losses. The experts with the more precise version are spread evenly: experts are taken in the
    order of their bit-reversed numbers. Arguments, result and errors are as in `greedy`; versions are given from the
    most to the least precise.
    """
    _least(sizes, budget)
    totals = [math.fsum(column) for column in zip(*sizes, strict=True)]
    fitting = [v for v, total in enumerate(totals) if total <= budget]
    if not fitting:  # layers of different shapes: each expert's smallest fits, but no single version does
        return [min(range(len(row)), key=lambda v: (row[v], v)) for row in sizes]
    base = fitting[0]
    chosen = [base] * len(sizes)
    total = totals[base]
    if base == 0:
        return chosen
    bits = max(1, (len(sizes) - 1).bit_length())
    for e in sorted(range(len(sizes)), key=lambda e: int(f"{e:0{bits}b}"[::-1], 2)):
        total += sizes[e][base - 1] - sizes[e][base]
        if total > budget:
            break
        chosen[e] = base - 1
    return chosen


def _least(sizes: Table, budget: float) -> float:
    least = math.fsum(min(row) for row in sizes)
    if least > budget:
        raise BudgetError(least, budget)
    return least


def hull(sizes: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Return the versions on the lower convex hull of (bytes, loss): from the smallest up, with falling loss."""
    out: list[int] = []
    for v in sorted(range(len(sizes)), key=lambda v: (sizes[v], losses[v])):
        if out and not losses[v] < losses[out[-1]]:
            continue
        while len(out) > 1:
            a = out[-2]
            b = out[-1]
            if (losses[a] - losses[b]) * (sizes[v] - sizes[b]) > (losses[b] - losses[v]) * (sizes[b] - sizes[a]):
                break
            out.pop()
        out.append(v)
    return out
