"""`hotness`: the hottest experts of each layer at high precision, following the workload (dynaexq, section 3.5). Pure.

Decides nothing about copies, blocks or bytes: those come as how many experts a layer may have above the base version.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moepack.runtime.allocation.knapsack import Table

from .contract import Entry, Key, LiveOptions, LivePolicy, Observation, Setting, Wanted, in_turns, read_options

RATE = 200.0  # megabytes a second: copies then take a few per cent of one core's memory bandwidth


@dataclass(frozen=True, slots=True)
class HotnessOptions(LiveOptions):
    """What follows `hotness:`.

    Attributes:
        prior: "calibration": the experts that were busy in calibration are high from the start; "none": none is.
        score: "loss": experts are ranked by traffic times what the loss tables say a token saves; "counts": by traffic.
        keep: "yes": an expert that is promoted keeps its low version; "no": it gives it back.
        reserve: low blocks of each size that are kept for demotions without `keep`, from 1: so many can be under way in
            one step.
        rate: megabytes a second that promotions may copy; 0 for no limit.
        interval: T_u, seconds between decisions.
        alpha: the share of a score that is kept at each decision, from 0 up to but not including 1.
        margin: by what share of an incumbent's score a newcomer's must exceed it.
        slack: an incumbent stays while its rank is less than this many places below the last that fits.
        anchor: what the prior weighs beside the scores for as long as the policy runs, in multiples of them.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **LiveOptions.CHOICES, "prior": ("calibration", "none"), "score": ("loss", "counts"), "keep": ("yes", "no")
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
        numbers = (self.rate, self.interval, self.margin, self.slack, self.anchor)
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

    @property
    def bytes_per_second(self) -> float | None:
        """As `rate` says."""
        return self.rate * 1e6 or None


class Hotness:
    """The hottest experts of each layer at high precision (dynaexq, section 3.5).

    Counters are added up over an interval T_u; then S <- alpha S + (1 - alpha) c for every expert, and each layer's
    top n are wanted, n being the layer's room. A newcomer takes an incumbent's place only when the margin and the rank
    slack both allow it. An interval without any token changes nothing.

    Two things are beyond the paper. Scores may start from what calibration saw, as if an interval of such traffic had
    gone before the first, so that there is a choice before any token; and that prior goes on to weigh `anchor` times as
    much as the scores do, so that after a shift experts of the workload before do not crowd out those of all others.
    And experts may be ranked by score times what a token at the high version saves in loss: an expert can be busy and
    yet lose little at the low one.
    """

    blocking = False

    def __init__(
        self,
        experts: Sequence[int],
        version: int,
        options: HotnessOptions | None = None,
        prior: Table | None = None,
        gains: Table | None = None,
    ) -> None:
        """Args:
        experts: [layers].
        version: the number of the high one.
        options: settings.
        prior: [layers][experts], tokens of an earlier workload; only their shares in a layer matter.
        gains: [layers][experts], what a token saves at the high version; without it, as much everywhere.
        """
        self.version, self.options = version, options or HotnessOptions()
        self.patience = min(0.1, self.options.interval / 4)
        self.scores = [list(row) for row in prior] if prior else [[0.0] * n for n in experts]
        self._gains = [list(row) for row in gains] if gains else [[1.0] * n for n in experts]
        self._prior = [[n / sum(row) for n in row] for row in prior] if prior else None
        self._is_prior = [prior is not None] * len(experts)
        self.sets: list[list[int]] = [[] for _ in experts]
        self._worth = self._values()
        self._counts = [[0] * n for n in experts]
        self._room: list[int] = []
        self._last: float | None = None

    def observe(self, seen: Observation) -> Wanted | None:
        """Count, and decide when an interval has gone by, or at once where the room has changed."""
        for mine, new in in_turns(zip(self._counts, seen.counts, strict=True)):
            for e, n in enumerate(new):
                mine[e] += n
        if self._last is None:
            self._last = seen.time
        due = seen.time - self._last >= self.options.interval and any(map(any, self._counts))
        if not due and list(seen.room) == self._room:
            return None
        if due:
            self._last = seen.time
            self._score()
        self._room = list(seen.room)
        before = [set(s) for s in self.sets]
        self._worth = self._values()
        self.sets = [
            top_with_hysteresis(values, current, room, self.options.margin, self.options.slack)
            for values, current, room in in_turns(zip(self._worth, self.sets, seen.room, strict=True))
        ]
        if not due and before == [set(s) for s in self.sets]:
            return None
        return self.wanted()

    def _score(self) -> None:
        alpha = self.options.alpha
        for p, (scores, counts) in in_turns(enumerate(zip(self.scores, self._counts, strict=True))):
            scale = 1.0
            if self._is_prior[p] and any(counts):
                self._is_prior[p] = False
                scale = sum(counts) / sum(scores)
            for e, n in enumerate(counts):
                scores[e] = alpha * scale * scores[e] + (1 - alpha) * n
                counts[e] = 0

    def _values(self) -> list[list[float]]:
        out = []
        for p, (row, gains) in in_turns(enumerate(zip(self.scores, self._gains, strict=True))):
            if self._prior:
                anchor = self.options.anchor * sum(row)
                row = [s + anchor * q for s, q in zip(row, self._prior[p], strict=True)]
            out.append([s * g for s, g in zip(row, gains, strict=True)])
        return out

    def worth(self, key: Key) -> float:
        """An expert's score times what a token saves, as of the last decision."""
        return self._worth[key[0]][key[1]]

    def wanted(self) -> Wanted:
        """The sets as they are, those worth most of all layers first."""
        values = self._worth
        layers = [sorted((-values[p][e], (p, e)) for e in chosen) for p, chosen in in_turns(enumerate(self.sets))]
        return dict.fromkeys((key for _, key in in_turns(heapq.merge(*layers), every=64)), self.version)


def top_with_hysteresis(
    scores: Sequence[float], current: Sequence[int], room: int, margin: float, slack: int
) -> list[int]:
    """At most `room` experts by score, keeping those of `current` that no newcomer clearly beats; the best first.

    Args:
        scores: [experts].
        current: the incumbents.
        room: how many fit.
        margin: a newcomer's score must exceed (1 + margin) times an incumbent's.
        slack: an incumbent ranked better than room + slack is not challenged.
    """
    held = set(current)
    order = sorted(range(len(scores)), key=lambda e: (-scores[e], e not in held, e))
    rank = {e: i for i, e in enumerate(order)}
    chosen = [e for e in order if e in held][:room]
    taken = set(chosen)
    outside = [e for e in order if e not in taken and scores[e] > 0]
    while outside and len(chosen) < room:
        chosen.append(outside.pop(0))
    challenged = sorted((e for e in chosen if e in held), key=lambda e: -rank[e])
    for incumbent in challenged:
        if not outside or rank[incumbent] < room + slack:
            break
        if scores[outside[0]] <= (1 + margin) * scores[incumbent]:
            break
        chosen[chosen.index(incumbent)] = outside.pop(0)
    return sorted(chosen, key=lambda e: rank[e])


def _make(setting: Setting, options: HotnessOptions) -> LivePolicy:
    prior = setting.traffic if options.prior == "calibration" else None
    gains = setting.gains if options.score == "loss" else None
    return Hotness(setting.experts, setting.high, options, prior, gains)


ENTRY = Entry(
    name="hotness",
    usage="hotness[:KEY=VALUE,...]",
    parse=lambda text: read_options(HotnessOptions, text),
    needs_budget=True,
    make=_make,
)
