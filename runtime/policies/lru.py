"""`lru`: recently used experts at high precision, loaded when a layer asks for them: forward passes wait. Pure.

This is a baseline. Low versions stay in memory beside high ones, because experts come and go during a forward pass.
With `lo=absent` there are no low versions: an expert that a layer needs and lacks is loaded at the high version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moepack.pack.spec import Version

from .contract import (
    Decoding,
    Event,
    Interval,
    Ladder,
    LayerReached,
    LiveOptions,
    Needs,
    Setting,
    Wanted,
    device_ladders,
    live_entry,
)
from .heat import busiest
from .mixed_cache import MixedCache
from .placements import ABSENT, Placement, find_version
from .reducers import ranked


@dataclass(frozen=True, slots=True)
class RecentOptions(LiveOptions):
    """Options of `lru`, which uses two versions; with `lo=absent` it uses one, by default the most precise."""

    keeps_low = True
    spare_blocks = 0

    # The two versions; if empty, chosen for the least expected loss in the budget. `lo` may be `absent`
    hi: str = ""
    lo: str = ""

    @property
    def decoding(self) -> Decoding:
        """See LiveOptions."""
        return Decoding("recent")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return the ladders of `device_ladders`, or with `lo=absent` one ladder: a version, and absent."""
        if not self.on_demand:
            return device_ladders(versions, self.hi, self.lo, between=False)
        high = find_version(self.hi, versions) if self.hi else versions[0]
        return [(Placement(high), ABSENT)]

    @property
    def on_demand(self) -> bool:
        """Whether `lo` is `absent`."""
        return self.lo == str(ABSENT)


class Recent:
    """Recently used experts at high precision, loaded on demand, as caches for offloading do.

    All layers share one cache. Experts of one call never evict each other. If a layer asks for more experts than fit,
    those with the most tokens are loaded, and the others run at the base version.
    """

    needs = Needs(layers=True)

    def __init__(self, setting: Setting, options: RecentOptions | None = None) -> None:
        self._traffic = setting.traffic
        sizes = [[max(1, int(row[0] - row[-1])), 0] for row in setting.sizes]
        self._cache = MixedCache(sizes, most=setting.most)
        self._strict = setting.ladder[-1] == ABSENT
        self.worth = self._cache.last_used

    def decide(self, event: Event) -> Wanted | None:
        """Return the experts to load for a layer, and those evicted for them; before any token, the busiest experts."""
        room = sum(event.capacity)
        if isinstance(event, Interval):
            return self._cache.fill(dict.fromkeys(busiest([np.array(row) for row in self._traffic]), 0), room)
        if not isinstance(event, LayerReached):
            return None
        wants = dict.fromkeys(ranked(event.counts, event.counts), 0)
        return self._cache.serve(event.layer, wants, room, event.placed, event.coming, all_of_them=self._strict)


ENTRY = live_entry("lru", RecentOptions, Recent)
