"""`importance`: each layer's important experts at high precision, loaded on demand and ahead of time (dymoe). Pure.

No expert has a resident version. A pass waits for the experts that a layer needs and the cache lacks. Meanwhile the
predicted experts of the next layer are fetched. Events bring token importance and predictions.

With `lo=NAME@pinned` no pass waits: all experts are in pinned host memory at both versions, and the device itself
chooses the critical ones of each layer (experts/critical.py). The cache gets what passes have used afterwards.
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
    PINNED,
    Event,
    Interval,
    Key,
    Ladder,
    LayerReached,
    LiveOptions,
    Needs,
    Setting,
    Wanted,
    critical_count,
    in_turns,
    live_entry,
)
from .heat import busiest
from .mixed_cache import INTERVAL, NEWCOMERS, MixedCache
from .placements import ABSENT, Placement, Where, find_version
from .reducers import COUNTS, GATES, HEAVY, Floats, Ints, Reducer, ranked

# placements (indices into the ladder); with `lo=absent` LOW is the base
HIGH = 0
LOW = 1
WORKSPACE = 1 << 18, 64 << 20  # least and most bytes to sum attention weights; the least is enough for 21,000 keys


@dataclass(frozen=True, slots=True)
class ImportanceOptions(LiveOptions):
    """Options of `importance`."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **LiveOptions.CHOICES, "by": ("importance", "counts", "random"), "prefetch": ("yes", "no"),
        "reuse": ("yes", "no"), "renormalise": ("yes", "no"),
    }  # fmt: skip
    keeps_low = True
    spare_blocks = 0

    hi: str = ""  # the version of critical experts; by default the best of at most 4 bits
    # The version of the others, or `absent` to leave them out; by default `w2`, or the best below `hi`. NAME@pinned:
    # that version, of all experts, is in pinned host memory, and `hi` too
    lo: str = ""
    r: float = 0.75  # the share of critical experts, averaged over layers, from 0.5 to 1
    heavy: float = 0.2  # the share of a prompt's tokens that are heavy hitters, at least one token
    # The score of an expert: "importance" (heavy hitters in a prompt, gate weights in decoding), "counts" (in a prompt,
    # tokens in place of heavy hitters), or "random" for comparison
    by: str = "importance"
    prefetch: str = ""  # whether the next layer's predicted experts are fetched ahead; by default if passes wait
    # "yes": an expert present at high precision also serves requests for low; "no": it is replaced by the low version,
    # so that results do not depend on earlier requests
    reuse: str = "yes"
    renormalise: str = "no"  # with `lo=absent`, whether gate weights of present experts are scaled up to the full sum
    seed: int = 0  # the seed of `by=random`

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        if not 0.5 <= self.r <= 1:
            raise ValueError("r must be from 0.5 to 1")
        if not 0 < self.heavy <= 1:
            raise ValueError("heavy is above 0, up to 1")
        if self.seed < 0:
            raise ValueError("seed must be at least 0")
        for name, value in _OF_WAITING.items() if self.reads_host else ():
            if getattr(self, name) == value:
                raise ValueError(f"{name}={value} needs passes that wait, and no pass waits under lo={self.lo}")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return one ladder: the high version, the low version if there is one, and absent, or else the low in `lo`."""
        names = [v.name for v in versions]
        small = [v.name for v in versions if v.bits + v.by_matrix <= 4]
        high = find_version(self.hi or (small or names)[0], versions)
        below = names[names.index(high.name) + 1 :]
        if self.lo == PINNED:
            raise InputError(f"lo={self.lo} names no version")
        lo = self.lo.removesuffix(PINNED) or ("w2" if "w2" in below else (below or [str(ABSENT)])[0])
        if lo == str(ABSENT) and not self.reads_host:
            return [(Placement(high), ABSENT)]
        low = find_version(lo, versions)
        if lo not in below:
            raise InputError(f"lo={self.lo or lo} is not below hi={high.name}")
        return [(Placement(high), Placement(low), Placement(low, Where.PINNED) if self.reads_host else ABSENT)]

    @property
    def reads_host(self) -> bool:
        """Whether both versions of every expert are in pinned host memory, where the device's kernels read them."""
        return self.lo.endswith(PINNED)

    @property
    def on_demand(self) -> bool:
        """Whether experts are absent until a layer wants them."""
        return not self.reads_host

    @property
    def foresees(self) -> bool:
        """Whether the next layer's predicted experts are fetched ahead."""
        return self.prefetch != "no" and not self.reads_host

    @property
    def decoding(self) -> None:
        """See LiveOptions: which experts a pass leaves out, or runs at `lo`, is not predicted."""
        return None

    def critical(self, layers: int) -> tuple[float, ...]:
        """Return r(l) of every layer if passes choose the critical experts themselves; else nothing."""
        return tuple(retention(layer, layers, self.r) for layer in range(layers)) if self.reads_host else ()

    def critical_by(self, is_prompt: bool) -> tuple[Reducer, ...]:
        """Return the scores of equations 2 and 3: gates in decoding; in a prompt heavy hitters, then tokens."""
        if not is_prompt:
            return (GATES,)
        return (HEAVY, COUNTS) if self.by == "importance" else (COUNTS,)

    @property
    def workspace(self) -> tuple[int, int]:
        """The least and the most bytes for summing attention weights; 0 unless `by` is "importance"."""
        return WORKSPACE if self.by == "importance" else (0, 0)

    @property
    def makes_up_for_absent(self) -> bool:
        """Whether `renormalise` is "yes"."""
        return self.renormalise == "yes"


# Options that need the host's answer in every layer, or an expert to leave before one does
_OF_WAITING = {"prefetch": "yes", "reuse": "no", "by": "random", "renormalise": "yes"}


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
        self._beside = setting.ladder[-1].where is Where.PINNED
        self.needs = Needs(
            INTERVAL,
            layers=not self._beside,
            sums=(GATES, HEAVY) if options.by == "importance" else (GATES,),
            prediction=options.foresees,
            importance=options.heavy if options.by == "importance" else 0.0,
        )
        layers = len(setting.experts)
        self._shares = [retention(layer, layers, options.r) for layer in range(layers)]
        # the room at the last decision
        self._base = setting.base
        self._room = -1
        self._low = [min(LOW, setting.base)] * layers  # of each layer's experts that are not critical
        if self._beside and setting.most is not None:  # where no block of their size is at LOW, all fit at HIGH
            sizes = [row[LOW] for row in setting.sizes]
            blocks = {size for size, row in zip(sizes, setting.most, strict=True) if row[LOW]}
            self._low = [LOW if size in blocks else HIGH for size in sizes]
        self._random = np.random.default_rng(options.seed)
        self._cache = MixedCache(setting.sizes, options.reuse == "yes", setting.most)
        self._traffic = [np.array(row) for row in setting.traffic]
        self.worth = self._cache.last_used

    def decide(self, event: Event) -> Wanted | None:
        """Return the experts that the layer lacks, prefetches for the next layer, and the experts evicted for both.

        Before any token, return the experts that were busiest in calibration; those of each layer that its share makes
        critical are at high precision. Over pinned memory return all experts that are to be on the device, at every
        interval.
        """
        room = sum(event.capacity)
        if isinstance(event, Interval) and self._room < 0:
            self._room = room
            return self._cache.fill(self._first(), room)
        if isinstance(event, Interval) and self._beside:
            return self._used(event, room)
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

    def _used(self, event: Interval, room: int) -> Wanted | None:
        """Put what passes have used since the last interval into the cache, and return all of it, the latest first.

        At most NEWCOMERS experts come, or move up. What is at high precision stays there: it serves for low too.
        """
        rows = [
            (-gates[e], (p, e), v)
            for p, (counts, gates) in in_turns(enumerate(zip(event.counts, event.sums[GATES], strict=True)))
            for e, v in self._designated(p, ranked(counts, gates)).items()
        ]
        if room == self._room and not rows:
            return None
        self._room = room
        held = self._cache.held
        left = NEWCOMERS
        wants: dict[Key, int] = {}
        for _, key, version in sorted(rows):
            have = held.get(key, self._base)
            left -= version < have
            if version < have and left >= 0:
                wants[key] = version
            elif have < self._base:
                wants[key] = have
        self._cache.use(wants, room, NEWCOMERS)
        return dict(reversed(held.items()))

    def _ranked(self, event: LayerReached) -> list[int]:
        """Return the experts that the step needs, the most important first (equations 2 and 3)."""
        if self._options.by == "random":
            chosen: list[int] = self._random.permutation(event.counts.nonzero()[0]).tolist()
            return chosen
        told: dict[Reducer, Ints | Floats] = {COUNTS: event.counts, **event.sums}
        return ranked(event.counts, *(told[score] for score in self._options.critical_by(event.is_prompt)))

    def _designated(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        high = critical_count(self._shares[layer], len(experts))
        return {e: HIGH if i < high else self._low[layer] for i, e in enumerate(experts)}

    def _ahead(self, layer: int, is_prompt: bool, counts: Ints, gates: Floats) -> dict[int, int]:
        """Return the experts to prefetch: the most frequent in a prompt, all predicted in decoding (eq. 7 and 8)."""
        wants = self._designated(layer, ranked(counts, counts, gates) if is_prompt else ranked(counts, gates))
        return {e: v for e, v in wants.items() if v == HIGH or (v != self._base and not is_prompt)}


ENTRY = live_entry("importance", ImportanceOptions, Importance)
