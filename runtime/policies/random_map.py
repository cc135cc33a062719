"""`random`: the versions of `uniform`, dealt to the experts of each layer at random. A baseline."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError

from .contract import Entry, Versions
from .maps import uniform_map

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle


def _parse(argument: str) -> int:
    key, _, value = argument.partition("=")
    if argument and (key != "seed" or not value.isdecimal()):
        raise InputError("random takes seed=NUMBER alone")
    return int(value or 0)


def random_map(bundle: Bundle, seed: int, room: int | None) -> Versions:
    """Draw a map that fits `room` bytes; the same seed always draws the same map.

    Raises:
        BudgetError: when the smallest versions do not fit.
    """
    draw = random.Random(seed)
    return tuple(tuple(draw.sample(row, len(row))) for row in uniform_map(bundle, room or 0))


ENTRY = Entry("random", "random[:seed=N]", _parse, needs_budget=True, versions=random_map)
