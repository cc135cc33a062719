"""`hotness`: the hottest experts of each layer at high precision, following the workload (dynaexq, section 3.5). Pure.

Decides nothing about copies or blocks: each layer's bytes come with the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moepack.runtime.allocation.ladder import Floats, Ladder
from moepack.runtime.allocation.ladder import Ints as Placements

from .contract import (
    DeviceOptions,
    Entry,
    Event,
    Interval,
    Key,
    LiveOptions,
    Needs,
    Setting,
    Wanted,
    in_turns,
    read_options,
)

RATE = 200.0  # megabytes a second: copies then take a few per cent of one core's memory bandwidth


@dataclass(frozen=True, slots=True)
class HotnessOptions(DeviceOptions):
    """What follows `hotness:`.

    Attributes:
        prior: "calibration": the experts that were busy in calibration are high from the start; "none": none is.
        score: "loss": upgrades are ranked by traffic times what the loss tables say a token saves; "counts": by traffic
            and size alone.
        keep: "yes": an expert that is promoted keeps its base version; "no": it gives it back.
        reserve: base blocks of each size that are kept for demotions without `keep`, from 1: so many can be under way
            in one step.
        rate: megabytes a second that promotions may copy; 0 for no limit.
        interval: T_u, seconds between decisions.
        alpha: the share of a score that is kept at each decision, from 0 up to but not including 1.
        margin: by what share of an incumbent's score a newcomer's must exceed it.
        slack: an incumbent stays while its rank is less than this many places below the last that fits.
        anchor: what the prior weighs beside the scores for as long as the policy runs, in multiples of them.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **DeviceOptions.CHOICES, "prior": ("calibration", "none"), "score": ("loss", "counts"), "keep": ("yes", "no")
    }  # fmt: skip

    prior: str = "calibration"
    score: str = "loss"
    keep: str = "no"
    reserve: int = 6
    rate: float = RATE
    interval: float = 1.0
    alpha: float = 0.5
    margin: float = 0.1
    slack: int = 1
    anchor: float = 0.5

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        numbers = (self.interval, self.margin, self.slack, self.anchor)
        if not (0 <= self.alpha < 1 and all(x >= 0 for x in numbers)):
            raise ValueError("alpha is from 0 to below 1, other numbers are from 0")
        if self.reserve < 1:
            raise ValueError("reserve is from 1: a demotion needs a block")

    @property
    def keeps_low(self) -> bool:
        """As `keep` says."""
        return self.keep == "yes"

    @property
    def spare_blocks(self) -> int:
        """As `reserve` says."""
        return self.reserve


class Hotness:
    """The hottest experts of each layer at high precision (dynaexq, section 3.5), on a ladder of any length.

    Counters are added up over an interval T_u; then S <- alpha S + (1 - alpha) c for every expert, and each layer's
    bytes go to the upgrades that save most a byte: S times what a token then saves in loss, over what it takes
    (allocation/ladder.py). With two versions of equal gains these are the paper's top n. A newcomer takes an
    incumbent's place only when the margin and the rank slack both allow it. An interval without any token changes
    nothing.

    Three things are beyond the paper: more than two versions; loss beside traffic, as an expert can be busy and yet
    lose little at a low version; and a prior. Scores may start from what calibration saw, as if an interval of such
    traffic had gone before the first, so that there is a choice before any token; and that prior goes on to weigh
    `anchor` times as much as the scores do, so that after a shift experts of the workload before do not crowd out those
    of all others.
    """

    def __init__(self, setting: Setting, options: HotnessOptions | None = None) -> None:
        """With the settings and the losses of a plan."""
        self.options = options = options or HotnessOptions()
        self.needs = Needs(interval=min(0.1, options.interval / 4))
        self._setting, self._ladders = setting, []
        for sizes, losses in zip(setting.sizes, setting.losses, strict=True):
            known = losses if options.score == "loss" else np.broadcast_to(losses.mean(0), losses.shape)
            self._ladders.append(Ladder(sizes, known, setting.base))
        has_prior = options.prior == "calibration"
        traffic = [np.array(row, np.float64) for row in setting.traffic]
        self._prior = [row / row.sum() for row in traffic]
        self._anchor = options.anchor if has_prior else 0.0
        self.scores = [row.copy() if has_prior else np.zeros(len(row)) for row in traffic]
        self._is_prior = [has_prior] * len(traffic)
        self.placements = [np.full(n, setting.base, np.int64) for n in setting.experts]
        self._values = self._weigh()
        self._counts = [np.zeros(n, np.int64) for n in setting.experts]
        self._capacity: list[int] = []
        self._last: float | None = None

    def decide(self, event: Event) -> Wanted | None:
        """Count, and decide when an interval has gone by, or at once where the capacity has changed."""
        if not isinstance(event, Interval):
            return None
        for mine, new in in_turns(zip(self._counts, event.counts, strict=True), every=16):
            mine += new
        if self._last is None:
            self._last = event.time
        due = event.time - self._last >= self.options.interval and any(row.any() for row in self._counts)
        if not due and list(event.capacity) == self._capacity:
            return None
        if due:
            self._last = event.time
            self._score()
        self._capacity = list(event.capacity)
        self._values = self._weigh()
        before, self.placements = self.placements, list(in_turns(self._filled(event.capacity)))
        if all(np.array_equal(*pair) for pair in in_turns(zip(before, self.placements, strict=True), every=16)):
            return None
        return self.wanted()

    def _filled(self, capacity: Sequence[int]) -> Iterator[Placements]:
        options, most = self.options, self._setting.most
        for p, (ladder, values, held) in enumerate(zip(self._ladders, self._values, self.placements, strict=True)):
            limit = None if most is None else most[p]
            yield ladder.fill(values, capacity[p], held, options.margin, options.slack, limit)

    def _score(self) -> None:
        alpha = self.options.alpha
        for p, (scores, counts) in in_turns(enumerate(zip(self.scores, self._counts, strict=True)), every=8):
            scale = 1.0
            if self._is_prior[p] and counts.any():
                self._is_prior[p] = False
                scale = counts.sum() / scores.sum()
            self.scores[p] = alpha * scale * scores + (1 - alpha) * counts
            counts[:] = 0

    def _weigh(self) -> list[Floats]:
        """Scores with the prior beside them."""
        rows = in_turns(zip(self.scores, self._prior, strict=True), every=8)
        return [s + self._anchor * s.sum() * q for s, q in rows]

    def worth(self, key: Key) -> float:
        """What an expert's first upgrade saves a byte, as of the last decision."""
        p, expert = key
        return float(self._values[p][expert] * self._ladders[p].first[expert])

    def wanted(self) -> Wanted:
        """The placements as they are, those worth most a byte of all layers first."""
        keys: list[Key] = []
        values: list[Floats] = []
        targets: list[int] = []
        for p, (placed, ladder) in in_turns(enumerate(zip(self.placements, self._ladders, strict=True))):
            chosen = np.flatnonzero(placed != self._setting.base)
            keys += [(p, e) for e in chosen.tolist()]
            targets += placed[chosen].tolist()
            values.append(self._values[p][chosen] * ladder.rate_to(chosen, placed[chosen]))
        order, wanted = np.argsort(-np.concatenate(values), kind="stable"), {}
        for at in in_turns(range(0, len(order), 256)):
            wanted.update({keys[i]: targets[i] for i in order[at : at + 256].tolist()})
        return wanted


ENTRY = Entry(
    name="hotness",
    usage="hotness[:KEY=VALUE,...]",
    parse=lambda text: read_options(HotnessOptions, text),
    needs_budget=True,
    make=Hotness,
)
