"""Which version every expert gets under a byte budget. Pure: numbers in, decisions out, no torch.

Decides nothing about what a loss is. Sizes are whole extents in bytes, with scales, zero points and padding; an
expert's versions stand in one order everywhere, which `uniform` takes to be from the most to the least precise. The
same numbers give the same allocation every time. `prefix_split`, whose budget is in bits, is in allocation_prefix.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence

Table = Sequence[Sequence[float]]  # rows of numbers: what stands in them, and in what order, who takes one says

_NODES = 20_000  # of HiGHS's search tree: a bound in work, not in time, so that the answer is the same everywhere


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
    order of loss saved a byte while they fit. This is within the loss that one upgrade saves of the best (Dantzig's
    bound: the upgrades before the first that does not fit are the optimum of the linear relaxation but for a part of
    that one).

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


def milp(sizes: Table, losses: Table, budget: float) -> list[int]:
    """The version for every expert with the least summed loss, bytes summing to at most `budget`.

    The multiple-choice knapsack as an integer programme, solved by HiGHS to within 1e-5 of what is lost above every
    expert's best version. Choices that cannot be part of anything better than what `greedy` found are left out of it.
    Should it end at its node limit, the better of what it found and `greedy`. 6,144 generated experts of five versions
    took 2 to 30 s on one core, greedy's loss being 0.004 to 0.014 % higher.

    Args:
        sizes: sizes[expert][version], bytes; whole numbers are summed exactly.
        losses: losses[expert][version], expected loss, in any one unit.
        budget: bytes.

    Returns:
        The version's index for every expert.

    Raises:
        BudgetError: when even the smallest versions pass the budget.
        ImportError: without SciPy.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.optimize import milp as solve
    from scipy.sparse import csr_array

    fallback = greedy(sizes, losses, budget)
    options = _open_choices(sizes, losses, budget, spent(losses, fallback))
    best = [min(row) for row in losses]
    excess = np.array([losses[e][v] - best[e] for e, v in options])
    if not excess.any():
        return fallback
    # HiGHS's tolerances are absolute: bytes go in units of their common divisor, losses to a total of a million.
    whole = all(float(s).is_integer() for row in sizes for s in row)
    unit = math.gcd(*(int(s) for row in sizes for s in row)) if whole else 1
    cost = excess * (1e6 / excess.sum())
    taken = np.array([sizes[e][v] / unit for e, v in options])
    limit = math.floor(budget / unit) if whole else budget
    n, m = len(sizes), len(options)
    one_each = csr_array((np.ones(m), (np.array([e for e, _ in options]), np.arange(m))), shape=(n, m))
    with _quiet_stdout():
        result = solve(
            cost,
            integrality=np.ones(m),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(csr_array(taken[None]), -np.inf, limit)],
            options={"mip_rel_gap": 1e-5, "node_limit": _NODES},
        )
    if result.x is None:
        return fallback
    chosen, most = list(fallback), [-1.0] * n
    for (e, v), x in zip(options, result.x.tolist(), strict=True):
        if x > most[e]:
            chosen[e], most[e] = v, x
    fits = spent(sizes, chosen) <= budget
    return chosen if fits and spent(losses, chosen) <= spent(losses, fallback) else fallback


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


def _open_choices(sizes: Table, losses: Table, budget: float, reached: float) -> list[tuple[int, int]]:
    """Pairs (expert, version) that an allocation with less loss than `reached` may contain.

    At a price a byte, what experts lose and pay at the least, less the price of the budget, bounds every allocation's
    loss from below. A version that by itself lifts this bound above `reached` is in no better one. The price is that of
    the first upgrade that does not fit, which gives the highest bound there is.
    """
    hulls = [hull(size, loss) for size, loss in zip(sizes, losses, strict=True)]
    left, price = budget - math.fsum(size[h[0]] for size, h in zip(sizes, hulls, strict=True)), 0.0
    at = [h[0] for h in hulls]
    for rate, e, version in _upgrades(sizes, losses, hulls):
        left -= sizes[e][version] - sizes[e][at[e]]
        at[e] = version
        if left < 0:
            price = rate
            break
    paid = [[x + price * s for s, x in zip(size, loss, strict=True)] for size, loss in zip(sizes, losses, strict=True)]
    floor = [min(row) for row in paid]
    slack = reached - (math.fsum(floor) - price * budget)
    slack += 1e-9 * (abs(reached) + math.fsum(map(abs, floor)))  # what rounding may hide
    return [
        (e, v)
        for e, (size, loss) in enumerate(zip(sizes, losses, strict=True))
        for v in _front(size, loss)
        if paid[e][v] - floor[e] <= slack
    ]


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what C code prints on stdout to stderr: HiGHS leaves debugging lines there, in the midst of JSON."""
    try:
        kept = os.dup(1)
    except OSError:  # no stdout to keep clean
        yield
        return
    try:
        sys.stdout.flush()
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


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
