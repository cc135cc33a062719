"""Which version every expert gets under a byte budget. Pure: numbers in, decisions out, no torch.

Sizes are whole extents in bytes, with scales, zero points and padding; an expert's versions stand in one order
everywhere, from the most to the least precise for `uniform`. The same numbers give the same allocation every time.
`prefix_split`, whose budget is in bits, is in prefix_split.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Table = Sequence[Sequence[float]]  # rows of numbers; the caller defines what a row means


class BudgetError(ValueError):
    """A budget that even the smallest versions pass.

    Attributes:
        least: bytes that the smallest versions take: the least budget that would do.
    """

    def __init__(self, least: float, budget: float) -> None:
        self.least = least
        super().__init__(f"the smallest versions take {least:.0f} bytes, the budget is {budget:.0f}")


def spent(table: Table, chosen: Sequence[int]) -> float:
    """The sum of `table[expert][chosen[expert]]`: an allocation's bytes, or its loss."""
    return math.fsum(row[v] for row, v in zip(table, chosen, strict=True))


def greedy(sizes: Table, losses: Table, budget: float) -> list[int]:
    """A version for every expert, bytes summing to at most `budget`, by the best loss saved a byte.

    Every expert starts at its smallest version; upgrades along the lower convex hull of (bytes, loss) are taken in the
    order of loss saved a byte while they fit. The loss exceeds the least possible one by at most what one upgrade
    saves (Dantzig's bound: the upgrades before the first that does not fit solve the linear relaxation).

    Args:
        sizes: sizes[expert][version], bytes.
        losses: losses[expert][version], expected loss, in any one unit.
        budget: bytes.

    Returns:
        The version's index for every expert.

    Raises:
        BudgetError: when even the smallest versions pass the budget.
    """
    hulls = [hull(size, loss) for size, loss in zip(sizes, losses, strict=True)]
    chosen = [h[0] for h in hulls]
    total = _least(sizes, budget)
    blocked: set[int] = set()
    for _, e, version in _upgrades(sizes, losses, hulls):
        cost = sizes[e][version] - sizes[e][chosen[e]]
        if e in blocked or total + cost > budget:
            blocked.add(e)  # a later upgrade of this expert would build on the one that did not fit
            continue
        total += cost
        chosen[e] = version
    return chosen


def uniform(sizes: Table, budget: float) -> list[int]:
    """One version for all experts, and the next more precise one for as many as still fit.

    Blind to losses: what an allocator has to beat. The experts that get the wider version are spread evenly: by the
    bits of their number, reversed.

    Args:
        sizes: sizes[expert][version], bytes; versions from the most to the least precise.
        budget: bytes.

    Returns:
        The version's index for every expert.

    Raises:
        BudgetError: when even the smallest versions pass the budget.
    """
    _least(sizes, budget)
    totals = [math.fsum(column) for column in zip(*sizes, strict=True)]
    fitting = [v for v, total in enumerate(totals) if total <= budget]
    if not fitting:  # no one version fits all, though each expert's smallest would: layers of different shapes
        return [min(range(len(row)), key=lambda v: (row[v], v)) for row in sizes]
    base = fitting[0]
    chosen, total = [base] * len(sizes), totals[base]
    if base == 0:
        return chosen
    bits = max(1, (len(sizes) - 1).bit_length())
    for e in sorted(range(len(sizes)), key=lambda e: int(f"{e:0{bits}b}"[::-1], 2)):
        total += sizes[e][base - 1] - sizes[e][base]
        if total > budget:
            break
        chosen[e] = base - 1
    return chosen


def _upgrades(sizes: Table, losses: Table, hulls: Sequence[Sequence[int]]) -> list[tuple[float, int, int]]:
    """All (loss saved a byte, expert, version) along the hulls, best first; an expert's own stay in order."""
    steps = []
    for e, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
        for a, b in itertools.pairwise(hulls[e]):
            steps.append(((loss[a] - loss[b]) / (size[b] - size[a]), e, b))
    return sorted(steps, key=lambda s: -s[0])


def _least(sizes: Table, budget: float) -> float:
    least = math.fsum(min(row) for row in sizes)
    if least > budget:
        raise BudgetError(least, budget)
    return least


def _front(sizes: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Versions that no other one matches in both size and loss, from the smallest up."""
    front: list[int] = []
    for v in sorted(range(len(sizes)), key=lambda v: (sizes[v], losses[v])):
        if not front or losses[v] < losses[front[-1]]:
            front.append(v)
    return front


def hull(sizes: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Versions on the lower convex hull, from the smallest up, each with less loss than the one before."""
    out: list[int] = []
    for v in _front(sizes, losses):
        while len(out) > 1:
            a, b = out[-2], out[-1]
            if (losses[a] - losses[b]) * (sizes[v] - sizes[b]) > (losses[b] - losses[v]) * (sizes[b] - sizes[a]):
                break
            out.pop()
        out.append(v)
    return out
