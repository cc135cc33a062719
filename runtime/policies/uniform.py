"""`uniform`: one version for all experts, and the next better version for as many experts as a budget still holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.runtime.allocation.knapsack import uniform

from .contract import Entry, Versions

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle


def _parse(argument: str) -> None:
    if argument:
        raise InputError("uniform takes nothing after a colon")


def uniform_map(bundle: Bundle, room: int) -> Versions:
    """Make the map of versions that fits `room` bytes.

    Raises:
        BudgetError: when the smallest versions do not fit.
    """
    sizes = [
        [v.resident_size(layer.matrices) for v in bundle.versions]
        for layer in bundle.layers
        for _ in range(layer.experts)
    ]
    chosen = iter(uniform(sizes, room))
    return tuple(tuple(bundle.versions[next(chosen)].name for _ in range(x.experts)) for x in bundle.layers)


ENTRY = Entry(
    "uniform", "uniform", _parse, needs_budget=True, versions=lambda bundle, _, room: uniform_map(bundle, room or 0)
)
