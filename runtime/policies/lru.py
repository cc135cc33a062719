"""`lru`: the experts used last at high precision, loaded when they are asked for: forward passes wait. Pure.

A baseline. Low versions are kept beside the high ones: experts come and go inside a forward pass. With `lo=absent`
there are none: an expert is loaded at the high version whenever it is needed and not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moepack.pack.spec import Version

from .contract import Changes, DeviceOptions, Entry, Event, Key, Ladder, LayerReached, Needs, Setting, read_options
from .mixed_cache import MixedCache
from .placements import ABSENT, Placement, on_device


@dataclass(frozen=True, slots=True)
class RecentOptions(DeviceOptions):
    """What follows `lru:`; it knows two versions, or one and absence.

    Attributes:
        lo: also `absent`; `hi` is then the most precise version unless it is named.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {**DeviceOptions.CHOICES, "between": ("no",)}

    between: str = "no"

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """As of `DeviceOptions`; or one version, and absence."""
        if self.lo != str(ABSENT):
            return DeviceOptions.ladders(self, versions)
        return [(on_device(self.hi, versions) if self.hi else Placement(versions[0]), ABSENT)]

    @property
    def keeps_low(self) -> bool:
        """Experts come and go inside a forward pass: the low version is there when they leave."""
        return True

    @property
    def spare_blocks(self) -> int:
        """A demotion needs none."""
        return 0

    @property
    def on_demand(self) -> bool:
        """With `lo=absent`."""
        return self.lo == str(ABSENT)


class Recent:
    """The experts used last at high precision, loaded when they are asked for: what caches for offloading do.

    The room of all layers is one cache. Experts of one layer's call never displace each other: where there are more of
    them than room, those with the most tokens are loaded and the others run at the base version.
    """

    needs = Needs(layers=True)

    def __init__(self, setting: Setting, options: RecentOptions | None = None) -> None:
        sizes = [[max(1, int(row[0] - row[-1])), 0] for row in setting.sizes]
        self._cache, self._strict = MixedCache(sizes, most=setting.most), setting.ladder[-1] == ABSENT

    def decide(self, event: Event) -> Changes | None:
        """What the cache lacks of what is needed now, and what leaves for it."""
        if not isinstance(event, LayerReached):
            return None
        needed = dict.fromkeys(sorted(event.counts.nonzero()[0].tolist(), key=lambda e: -event.counts[e]), 0)
        return self._cache.serve(
            event.layer, needed, sum(event.capacity), event.placed, event.coming, all_of_them=self._strict
        )

    def worth(self, key: Key) -> float:
        """What was used last goes last."""
        return float(self._cache.last_used(key))


ENTRY = Entry(
    name="lru",
    usage="lru[:KEY=VALUE,...]",
    parse=lambda text: read_options(RecentOptions, text),
    needs_budget=True,
    make=Recent,
)
