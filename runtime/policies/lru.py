"""`lru`: recently used experts at high precision, loaded when a layer asks for them: forward passes wait. Pure.

This is a baseline. Low versions stay in memory beside high ones, because experts come and go during a forward pass.
With `lo=absent` there are no low versions: an expert that a layer needs and lacks is loaded at the high version.
With `lo=NAME@pinned` no pass waits: the device reads what it lacks in host memory, and used experts come afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moepack.pack.spec import Version

from .contract import (
    Decoding,
    DeviceOptions,
    Event,
    Interval,
    Ladder,
    LayerReached,
    Needs,
    Setting,
    Wanted,
    live_entry,
)
from .heat import busiest
from .mixed_cache import INTERVAL, NEWCOMERS, MixedCache
from .placements import ABSENT, Placement, Where, find_version
from .reducers import ranked


@dataclass(frozen=True, slots=True)
class RecentOptions(DeviceOptions):
    """Options of `lru`, which uses two versions; with `lo=absent` it uses one, by default the most precise."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **DeviceOptions.CHOICES,
        "between": ("no",),
        "prefetch": ("yes", "no"),
    }
    keeps_low = True
    spare_blocks = 0

    between: str = "no"
    prefetch: str = "no"  # whether the next layer's predicted experts are fetched ahead

    def __post_init__(self) -> None:
        DeviceOptions.__post_init__(self)
        if self.reads_host and self.prefetch == "yes":
            raise ValueError(f"prefetch=yes needs passes that wait, and no pass waits under lo={self.lo}")

    @property
    def decoding(self) -> Decoding:
        """See LiveOptions."""
        return Decoding("recent")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return the ladders of `DeviceOptions`, or with `lo=absent` one ladder: a version, and absent."""
        if not self.on_demand:
            return DeviceOptions.ladders(self, versions)
        return [(Placement(find_version(self.hi, versions) if self.hi else versions[0]), ABSENT)]

    @property
    def on_demand(self) -> bool:
        """Whether `lo` is `absent`."""
        return self.lo == str(ABSENT)


class Recent:
    """Recently used experts at high precision, loaded on demand, as caches for offloading do.

    All layers share one cache. Experts of one call never evict each other. If a layer asks for more experts than fit,
    those with the most tokens are loaded, and the others run at the base version.

    Over pinned host memory no pass waits: what passes have used is loaded afterwards, at every interval.
    """

    def __init__(self, setting: Setting, options: RecentOptions | None = None) -> None:
        self._beside = setting.ladder[-1].where is Where.PINNED  # whether experts come beside passes
        prediction = options is not None and options.prefetch == "yes"
        self.needs = Needs(INTERVAL, layers=not self._beside, prediction=prediction)
        # the room at the last decision
        self._traffic = setting.traffic
        self._room = -1
        sizes = [[max(1, int(row[0] - row[-1])), 0] for row in setting.sizes]
        self._cache = MixedCache(sizes, most=setting.most)
        self._strict = setting.ladder[-1] == ABSENT
        self.worth = self._cache.last_used

    def decide(self, event: Event) -> Wanted | None:
        """Return the experts to load for a layer, and those evicted for them; before any token, the busiest experts.

        Over pinned host memory return all experts that are to be on the device, at every interval.
        """
        room = sum(event.capacity)
        if isinstance(event, Interval) and self._room < 0:
            self._room = room
            return self._cache.fill(dict.fromkeys(busiest([np.array(row) for row in self._traffic]), 0), room)
        if isinstance(event, Interval) and self._beside:
            return self._used(event, room)
        if not isinstance(event, LayerReached):
            return None
        wants = dict.fromkeys(ranked(event.counts, event.counts), 0)
        changes = self._cache.serve(event.layer, wants, room, event.placed, event.coming, all_of_them=self._strict)
        if event.predicted is not None:
            ahead = dict.fromkeys(ranked(event.predicted, event.predicted), 0)
            changes |= self._cache.foresee(event.layer + 1, ahead, room, changes)
        return changes

    def _used(self, event: Interval, room: int) -> Wanted | None:
        """Put what passes have used since the last interval into the cache, and return all of it, the latest first."""
        used = [
            (-row[e], rank, (p, e)) for p, row in enumerate(event.counts) for rank, e in enumerate(ranked(row, row))
        ]
        if room == self._room and not used:
            return None
        self._room = room
        self._cache.use({key: 0 for *_, key in sorted(used)}, room, NEWCOMERS)  # of equal counts no layer goes first
        return dict(reversed(self._cache.held.items()))


ENTRY = live_entry("lru", RecentOptions, Recent)
