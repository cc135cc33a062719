"""`hotness`: the hottest experts of each layer at high precision, following the workload (dynaexq, section 3.5). Pure.

Events say how many bytes each layer's experts may take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.allocation.ladder import Floats, Ladder
from moepack.runtime.allocation.ladder import Ints as Placements

from .contract import (
    Decoding,
    Entry,
    Event,
    Interval,
    Key,
    LiveOptions,
    LivePolicy,
    Needs,
    Setting,
    Wanted,
    device_ladders,
    in_turns,
    keys_of,
    read_options,
)
from .contract import Ladder as Ladders
from .heat import ExpertHeat
from .hotness_on_demand import HotnessOnDemand
from .placements import ABSENT, STORED, Placement, Where, find_version

LEAST = 2  # bits of the lowest version over `stored`: rare experts run at it, and one bit costs more than it spares
SPARE = 6  # base blocks of each size that stay free for demotions
PINNED = f"@{Where.PINNED.value}"  # the end of a placement's name
RATE = 200.0  # megabytes a second: copies then take a few per cent of one core's memory bandwidth


@dataclass(frozen=True, slots=True)
class HotnessOptions(LiveOptions):
    """Options of `hotness`."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "between": ("yes", "no"),
        "prior": ("calibration", "none"),
        "score": ("loss", "counts"),
        "prefetch": ("yes", "no"),
    }
    shares_by_loss = True

    # The best and the lowest version of the ladder; if empty, chosen for the least expected loss in the budget.
    # `lo` may be `stored` or `absent`; NAME@pinned is that version in host memory, below the same one on the device
    hi: str = ""
    lo: str = ""
    between: str = "yes"  # "yes": the versions between `hi` and `lo` are served too; "no": these two alone
    prior: str = "calibration"  # "calibration": experts that were busy in calibration start high; "none": all start low
    score: str = "loss"  # upgrades are ranked per byte: by traffic times loss saved a token ("loss"), or by traffic
    rate: float = RATE  # megabytes a second that promotions may copy; 0 sets no limit, the default with `lo=stored`
    interval: float = 1.0  # T_u, seconds between decisions
    alpha: float = 0.5  # the share of a score that is kept at each decision, from 0 up to but not including 1
    margin: float = 0.1  # a newcomer's score must exceed an incumbent's by this share of the incumbent's
    slack: int = 1  # an incumbent stays while its rank is less than this many places below the last that fits
    anchor: float = 0.5  # the lasting weight of the prior, as a multiple of the weight of the scores
    # With `lo=stored`, whether the next layer's predicted experts are fetched ahead
    prefetch: str = "no"

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        numbers = (self.interval, self.margin, self.slack, self.anchor)
        if not (0 <= self.alpha < 1 and all(x >= 0 for x in numbers)):
            raise ValueError("alpha must be in [0, 1); interval, margin, slack and anchor must be at least 0")
        if self._may_lack and self.prior == "none":
            raise ValueError("lo=absent needs prior=calibration: without it every expert would begin absent")

    def ladders(self, versions: Sequence[Version]) -> list[Ladders]:
        """Return the ladders of `device_ladders`.

        With `lo=NAME@pinned` there is one for each possible `hi`, down to that version on the device and pinned.
        With `lo=absent` there is one for each possible `hi`: with `between` all versions from there on, and absent.
        With `lo=stored` there is one: `hi`, by default the best of at most 4 bits; with `between` the versions below it
        of at least LEAST bits; and stored.
        """
        if self._may_lack:
            last = len(versions) if self.between == "yes" else 1
            highs = [find_version(self.hi, versions)] if self.hi else versions
            tails = [versions[versions.index(high) :][:last] for high in highs]
            return [(*map(Placement, tail), ABSENT) for tail in tails]
        if self.reads_host:
            return self._pinned_ladders(versions)
        if not self.on_demand:
            return device_ladders(versions, self.hi, self.lo, self.between == "yes")
        names = [v.name for v in versions]
        small = [v for v in versions if v.bits <= 4] or versions
        high = find_version(self.hi, versions) if self.hi else small[0]
        below = versions[names.index(high.name) + 1 :] if self.between == "yes" else []
        return [(Placement(high), *(Placement(v) for v in below if v.bits >= LEAST), STORED)]

    def _pinned_ladders(self, versions: Sequence[Version]) -> list[Ladders]:
        names = [v.name for v in versions]
        low = find_version(self.lo.removesuffix(PINNED), versions)
        last = names.index(low.name)
        tops = [names.index(find_version(self.hi, versions).name)] if self.hi else list(range(last + 1))
        if tops[0] > last:
            raise InputError(f"lo={self.lo} is above hi={self.hi}")
        end = len(versions) if self.between == "yes" else 1
        pinned = Placement(low, Where.PINNED)
        return [(*map(Placement, versions[top : last + 1][:end]), pinned) for top in tops]

    @property
    def decoding(self) -> Decoding:
        """See LiveOptions."""
        return Decoding("held" if self.on_demand else "none", fetches_lowest=True, moves=True)

    @property
    def on_demand(self) -> bool:
        """Whether `lo` is `stored`."""
        return self.lo == str(STORED)

    @property
    def reads_host(self) -> bool:
        """Whether `lo` is a version in pinned host memory, where the device's kernels read it."""
        return self.lo.endswith(PINNED)

    @property
    def _may_lack(self) -> bool:
        return self.lo == str(ABSENT)

    @property
    def _base_takes_memory(self) -> bool:
        return not (self.on_demand or self._may_lack or self.reads_host)

    @property
    def keeps_low(self) -> bool:
        """Whether the base takes no device memory."""
        return not self._base_takes_memory

    @property
    def spare_blocks(self) -> int:
        """See LiveOptions: the most demotions at one time."""
        return SPARE if self._base_takes_memory else 0

    def heat(self, setting: Setting) -> ExpertHeat:
        """Return the scores with which these options begin."""
        return ExpertHeat(setting.traffic, self.alpha, self.anchor, self.prior == "calibration")


class Hotness:
    """The hottest experts of each layer at high precision (dynaexq, section 3.5), on a ladder of any length.

    Counts c are summed over an interval T_u. Then every expert's score S becomes alpha S + (1 - alpha) c. Each layer's
    bytes go to the upgrades that save the most per byte: S times the loss saved per token, divided by the bytes added
    (allocation/ladder.py). With two versions and equal gains these are the paper's top n. A newcomer replaces an
    incumbent only if both `margin` and `slack` allow it. An interval without tokens changes nothing.

    Three things go beyond the paper. There may be more than two versions. Loss counts as well as traffic, because a
    busy expert may lose little at a low version. Scores may start from calibration's traffic (the prior), as if it were
    an interval before the first, so that there is a choice before any token. The prior keeps `anchor` times the weight
    of the scores, so that after a shift in the workload the formerly busy experts do not crowd out all others.
    """

    def __init__(self, setting: Setting, options: HotnessOptions | None = None) -> None:
        self.options = options = options or HotnessOptions()
        self.needs = Needs(interval=min(0.1, options.interval / 4))
        self._setting = setting
        self._ladders = []
        for sizes, losses in zip(setting.sizes, setting.losses, strict=True):
            known = losses if options.score == "loss" else np.broadcast_to(losses.mean(0), losses.shape)
            self._ladders.append(Ladder(sizes, known, setting.base))
        self.heat = options.heat(setting)
        self.placements = [np.full(n, setting.base, np.int64) for n in setting.experts]
        self._values = self.heat.values()
        self._capacity: list[int] = []
        self._last: float | None = None

    def decide(self, event: Event) -> Wanted | None:
        """Add up counts; return new placements when an interval has passed or the capacity has changed, else `None`."""
        if not isinstance(event, Interval):
            return None
        self.heat.add(event.counts)
        if self._last is None:
            self._last = event.time
        due = event.time - self._last >= self.options.interval and self.heat.has_counts
        if not due and list(event.capacity) == self._capacity:
            return None
        if due:
            self._last = event.time
            self.heat.turn()
        self._capacity = list(event.capacity)
        self._values = self.heat.values()
        before = self.placements
        self.placements = list(in_turns(self._filled(event.capacity)))
        if all(np.array_equal(*pair) for pair in in_turns(zip(before, self.placements, strict=True))):
            return None
        return self.wanted()

    def _filled(self, capacity: Sequence[int]) -> Iterator[Placements]:
        options = self.options
        most = self._setting.most
        for p, (ladder, values, held) in enumerate(zip(self._ladders, self._values, self.placements, strict=True)):
            limit = None if most is None else most[p]
            yield ladder.fill(values, capacity[p], held, options.margin, options.slack, limit)

    def worth(self, key: Key) -> float:
        """Return the loss per byte that an expert's first upgrade saves, as of the last decision."""
        p, expert = key
        return float(self._values[p][expert] * self._ladders[p].first[expert])

    def wanted(self) -> Wanted:
        """Return the current placements above the base; experts that save the most loss per byte come first."""
        keys: list[Key] = []
        values: list[Floats] = []
        targets: list[int] = []
        for p, (placed, ladder) in in_turns(enumerate(zip(self.placements, self._ladders, strict=True))):
            chosen = np.flatnonzero(placed != self._setting.base)
            keys += [(p, e) for e in chosen.tolist()]
            targets += placed[chosen].tolist()
            values.append(self._values[p][chosen] * ladder.rate_to(chosen, placed[chosen]))
        order = np.argsort(-np.concatenate(values), kind="stable")
        wanted = {}
        for at in in_turns(range(0, len(order), 256)):
            wanted.update({keys[i]: targets[i] for i in order[at : at + 256].tolist()})
        return wanted


def _make(setting: Setting, options: HotnessOptions) -> LivePolicy:
    if not options.on_demand:
        return Hotness(setting, options)
    return HotnessOnDemand(
        setting,
        options.heat(setting),
        interval=options.interval,
        by_loss=options.score == "loss",
        margin=options.margin,
        slack=options.slack,
        prefetch=options.prefetch == "yes",
    )


def _parse(text: str) -> HotnessOptions:
    on_demand = f"lo={STORED}" in text.split(",")  # passes wait for its copies: by default they have no limit
    return read_options(HotnessOptions, f"rate=0,{text}" if on_demand else text)


ENTRY = Entry("hotness", "hotness[:KEY=VALUE,...]", _parse, needs_budget=True, make=_make, keys=keys_of(HotnessOptions))
