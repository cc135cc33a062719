"""`lru`: the experts used last at high precision, loaded when they are asked for: forward passes wait. Pure.

A baseline. Low versions are kept beside the high ones: experts come and go inside a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .contract import DeviceOptions, Entry, Event, Key, LayerReached, Needs, Setting, Wanted, read_options


@dataclass(frozen=True, slots=True)
class RecentOptions(DeviceOptions):
    """What follows `lru:`; it knows two versions."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {**DeviceOptions.CHOICES, "between": ("no",)}

    between: str = "no"

    @property
    def keeps_low(self) -> bool:
        """Experts come and go inside a forward pass: the low version is there when they leave."""
        return True

    @property
    def spare_blocks(self) -> int:
        """A demotion needs none."""
        return 0


class Recent:
    """The experts used last at high precision, loaded when they are asked for: what caches for offloading do.

    The room of all layers is one cache. Experts of one layer's call never displace each other: where there are more of
    them than room, those with the most tokens are loaded and the others run at the base version.
    """

    needs = Needs(layers=True)

    def __init__(self, setting: Setting, options: RecentOptions | None = None) -> None:
        self._setting = setting
        self._used: dict[Key, None] = {}  # the least recent first

    def decide(self, event: Event) -> Wanted | None:
        """What the cache holds once those that are needed now are in it."""
        if not isinstance(event, LayerReached):
            return None
        room = sum(self._rooms(event.capacity))
        needed = [((event.layer, e), int(n)) for e, n in enumerate(event.counts) if n]
        needed.sort(key=lambda item: -item[1])
        for key, _ in reversed(needed[:room]):
            self._used.pop(key, None)
            self._used[key] = None
        while len(self._used) > room:
            del self._used[next(iter(self._used))]
        return dict.fromkeys(reversed(self._used), 0)

    def _rooms(self, capacity: Sequence[int]) -> list[int]:
        """How many experts of each layer fit at the high version."""
        each = [max(1, int(row[0] - row[-1])) for row in self._setting.sizes]
        return [min(n, room // size) for n, room, size in zip(self._setting.experts, capacity, each, strict=True)]

    def worth(self, key: Key) -> float:
        """Nothing is left to be chosen: what is not in the cache goes at once."""
        return 0.0


ENTRY = Entry(
    name="lru",
    usage="lru[:KEY=VALUE,...]",
    parse=lambda text: read_options(RecentOptions, text),
    needs_budget=True,
    make=Recent,
)
