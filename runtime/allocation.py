"""Which version every expert gets under a byte budget. Pure: numbers in, decisions out, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Table = Sequence[Sequence[float]]


def greedy(sizes: Table, losses: Table, budget: float) -> list[int]:
    """A version for every expert, bytes summing to at most `budget`, by the best loss saved a byte.

    Every expert starts at its smallest version; upgrades along the lower convex hull of (bytes, loss) are taken in the
    order of loss saved a byte while they fit. For a budget that falls between two upgrades this is within one upgrade
    of the best (Dantzig's bound for the linear relaxation).

    Args:
        sizes: sizes[expert][version], bytes.
        losses: losses[expert][version], expected loss, in any one unit.
        budget: bytes.

    Returns:
        The version's index for every expert.

    Raises:
        ValueError: when even the smallest versions pass the budget.
    """
    chosen = [min(range(len(row)), key=lambda v: row[v]) for row in sizes]
    spent = sum(row[v] for row, v in zip(sizes, chosen, strict=True))
    if spent > budget:
        raise ValueError(f"the smallest versions take {spent:.0f} bytes, the budget is {budget:.0f}")
    steps: list[tuple[float, int, int]] = []
    for e, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
        for a, b in itertools.pairwise(_hull(size, loss)):
            steps.append(((loss[a] - loss[b]) / (size[b] - size[a]), e, b))
    blocked: set[int] = set()
    for _, e, version in sorted(steps, key=lambda s: -s[0]):  # stable: an expert's upgrades stay in order
        cost = sizes[e][version] - sizes[e][chosen[e]]
        if e in blocked or spent + cost > budget:
            blocked.add(e)  # a later upgrade of this expert would build on the one that did not fit
            continue
        spent += cost
        chosen[e] = version
    return chosen


def _hull(sizes: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Versions on the lower convex hull, from the smallest up, each with less loss than the one before."""
    hull: list[int] = []
    for v in sorted(range(len(sizes)), key=lambda v: (sizes[v], losses[v])):
        if hull and (losses[v] >= losses[hull[-1]] or sizes[v] == sizes[hull[-1]]):
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (losses[a] - losses[b]) * (sizes[v] - sizes[b]) > (losses[b] - losses[v]) * (sizes[b] - sizes[a]):
                break
            hull.pop()
        hull.append(v)
    return hull
