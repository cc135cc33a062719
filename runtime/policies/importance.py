"""`importance`: each layer's important experts at high precision, loaded on demand and ahead of time (dymoe). Pure.

No expert has a resident version. A pass waits for the experts that a layer needs and the cache lacks. Meanwhile the
predicted experts of the next layer are fetched. Events bring token importance and predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moepack.pack.errors import InputError
from moepack.pack.spec import Version

from .contract import (
    Event,
    Interval,
    Key,
    Ladder,
    LayerReached,
    LiveOptions,
    Needs,
    Setting,
    Wanted,
    live_entry,
)
from .heat import busiest
from .mixed_cache import MixedCache
from .placements import ABSENT, Placement, find_version
from .reducers import GATES, HEAVY, Floats, Ints, ranked

# placements (indices into the ladder); with `lo=absent` LOW is the base
HIGH = 0
LOW = 1
WORKSPACE = 1 << 18, 64 << 20  # least and most bytes to sum attention weights; the least is enough for 21,000 keys


@dataclass(frozen=True, slots=True)
class ImportanceOptions(LiveOptions):
    """Options of `importance`."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "by": ("importance", "counts", "random"),
        "prefetch": ("yes", "no"),
        "reuse": ("yes", "no"),
    }
    keeps_low = True
    spare_blocks = 0
    on_demand = True

    hi: str = ""  # the version of critical experts; by default the best of at most 4 bits
    lo: str = ""  # the version of the others, or `absent` to leave them out; by default the best of at most 2 bits
    r: float = 0.75  # the share of critical experts, averaged over layers, from 0.5 to 1
    heavy: float = 0.2  # the share of a prompt's tokens that are heavy hitters, at least one token
    # The score of an expert: "importance" (heavy hitters in a prompt, gate weights in decoding), "counts" (in a prompt,
    # tokens in place of heavy hitters), or "random" for comparison
    by: str = "importance"
    prefetch: str = "yes"  # whether the next layer's predicted experts are fetched ahead
    # "yes": an expert present at high precision also serves requests for low; "no": it is replaced by the low version,
    # so that results do not depend on earlier requests
    reuse: str = "yes"

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        if not 0.5 <= self.r <= 1:
            raise ValueError("r must be from 0.5 to 1")
        if not 0 < self.heavy <= 1:
            raise ValueError("heavy is above 0, up to 1")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return one ladder: the high version, the low version if there is one, and absent."""
        names = [v.name for v in versions]
        small = [v.name for v in versions if v.bits <= 4]
        high = find_version(self.hi or (small or names)[0], versions)
        below = names[names.index(high.name) + 1 :]
        smaller = [v.name for v in versions if v.bits <= 2 and v.name in below]
        lo = self.lo or (smaller or below or [str(ABSENT)])[0]
        if lo == str(ABSENT):
            return [(Placement(high), ABSENT)]
        low = find_version(lo, versions)
        if lo not in below:
            raise InputError(f"lo={lo} is not below hi={high.name}")
        return [(Placement(high), Placement(low), ABSENT)]

    @property
    def decoding(self) -> None:
        """See LiveOptions. None, because the experts that a pass leaves out or runs at `lo` cannot be predicted."""
        return None

    @property
    def workspace(self) -> tuple[int, int]:
        """The least and the most bytes for summing attention weights; 0 unless `by` is "importance"."""
        return WORKSPACE if self.by == "importance" else (0, 0)


def critical_count(share: float, experts: int) -> int:
    """Return the number of critical experts among `experts` that a layer needs (equation 5)."""
    return math.ceil(share * experts - 1e-9)  # so that 0.7 x 10 gives 7


def retention(layer: int, layers: int, r: float) -> float:
    """Return the share of a layer's experts that are critical, r(l) (equation 4). The mean over layers is `r`.

    Equation 4's lambda is 2 r - 1, because its cosine term has a mean of one half. With one layer the share is `r`.
    """
    if layers == 1:
        return r
    least = 2 * r - 1
    return (1 - least) * (math.cos(math.pi * layer / (layers - 1)) + 1) / 2 + least


class Importance:
    """Critical experts at high precision, the others at low precision or absent (dymoe, section 4).

    The paper does not define M of equation 5. Here M is the number of experts that the step needs in the layer. If M
    were all experts of the layer, t_l would exceed top_k in decoding, and every expert would be at high precision.
    """

    def __init__(self, setting: Setting, options: ImportanceOptions | None = None) -> None:
        self._options = options = options or ImportanceOptions()
        sums = {"importance": (GATES, HEAVY), "random": ()}.get(options.by, (GATES,))
        self.needs = Needs(
            layers=True,
            sums=sums,
            prediction=options.prefetch == "yes",
            importance=options.heavy if options.by == "importance" else 0.0,
        )
        layers = len(setting.experts)
        self._shares = [retention(layer, layers, options.r) for layer in range(layers)]
        self._base = setting.base
        self._low = min(LOW, setting.base)  # of a layer's experts that are not critical
        self._random = np.random.default_rng(0)
        self._cache = MixedCache(setting.sizes, options.reuse == "yes", setting.most)
        self._traffic = [np.array(row) for row in setting.traffic]
        self.worth = self._cache.last_used

    def decide(self, event: Event) -> Wanted | None:
        """Return the experts that the layer lacks, prefetches for the next layer, and the experts evicted for both.

        Before any token, return the experts that were busiest in calibration; those of each layer that its share makes
        critical are at high precision.
        """
        room = sum(event.capacity)
        if isinstance(event, Interval):
            return self._cache.fill(self._first(), room)
        if not isinstance(event, LayerReached):
            return None
        wants = self._designated(event.layer, self._ranked(event))
        changes = self._cache.serve(event.layer, wants, room, event.placed, event.coming)
        if event.predicted is not None:
            ahead = self._ahead(event.layer + 1, event.is_prompt, event.predicted, event.predicted_sums[GATES])
            changes |= self._cache.foresee(event.layer + 1, ahead, room, changes)
        return changes

    def _first(self) -> dict[Key, int]:
        at = [self._designated(p, np.argsort(-row, kind="stable").tolist()) for p, row in enumerate(self._traffic)]
        return {(p, e): at[p][e] for p, e in busiest(self._traffic) if at[p][e] != self._base}

    def _ranked(self, event: LayerReached) -> list[int]:
        if self._options.by == "random":
            chosen: list[int] = self._random.permutation(event.counts.nonzero()[0]).tolist()
            return chosen
        if not event.is_prompt:
            return ranked(event.counts, event.sums[GATES])
        if self._options.by == "importance":
            return ranked(event.counts, event.sums[HEAVY], event.counts)
        return ranked(event.counts, event.counts)

    def _designated(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        high = critical_count(self._shares[layer], len(experts))
        return {e: HIGH if i < high else self._low for i, e in enumerate(experts)}

    def _ahead(self, layer: int, is_prompt: bool, counts: Ints, gates: Floats) -> dict[int, int]:
        """Return the experts to prefetch: the most frequent in a prompt, all predicted in decoding (eq. 7 and 8)."""
        wants = self._designated(layer, ranked(counts, counts, gates) if is_prompt else ranked(counts, gates))
        return {e: v for e, v in wants.items() if v == HIGH or (v != self._base and not is_prompt)}


ENTRY = live_entry("importance", ImportanceOptions, Importance)
