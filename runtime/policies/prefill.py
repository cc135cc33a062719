"""`prefill`: a sequence's prompt determines the placement for its decoding (context-aware-cxl-ndp, section 4). Pure.

Algorithm 1: each layer's most important experts are on the device at high precision; the host runs the others, at
widths (bits) that fall with importance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.allocation.prefix_split import WIDTHS, prefill_importance, prefix_split

from .contract import (
    DecodingBegan,
    Event,
    Interval,
    Key,
    Ladder,
    LiveOptions,
    Needs,
    PrefillEnded,
    SequenceEnded,
    Setting,
    Wanted,
    in_turns,
    live_entry,
)
from .placements import Placement, Where, find_version
from .reducers import GATES, Floats

Importance = list[Floats]  # [layers][experts]; a layer's sum is 1, or 0 if nothing was counted


@dataclass(frozen=True, slots=True)
class PrefillOptions(LiveOptions):
    """Options of `prefill`."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"selector": ("yes", "no")}

    hi: str = ""  # the version on the device; by default the most precise
    k: int = -1  # K, experts of each layer on the device, at most what the budget holds; -1: all that it holds
    bits: float = 3.0  # the average width of a layer's experts on the host
    # "yes": widths fall with importance, chosen for the least loss by the loss tables; "no": all experts have `bits`
    # (the paper's table 3, "w/o Expert Bitwidth Selector")
    selector: str = "yes"
    alpha: float = 0.5  # the weight of token counts beside gate weights in the importance, from 0 to 1

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        if not 0 <= self.alpha <= 1:
            raise ValueError("alpha must be from 0 to 1")
        if self.k < -1:
            raise ValueError("k must be at least 0, or -1 for as many as the budget holds")

    def check_experts(self, most: int) -> None:
        """See LiveOptions."""
        if self.k > most:
            raise InputError(f"k={self.k}: a layer has {most} experts; -1 is for as many as the budget holds")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return one ladder: the version on the device, then the versions of 4 to 1 bits on the host."""
        high = find_version(self.hi, versions) if self.hi else versions[0]
        on_host = {v.bits: v for v in versions if v.bits in WIDTHS and v.bits <= high.bits}
        widths = sorted(on_host, reverse=True)
        here = ", ".join(map(str, widths))
        if not widths:
            raise InputError(f"has no version of 4 to 1 bits under {high.name}: the host executes those")
        if not widths[-1] <= self.bits <= widths[0]:
            raise InputError(f"bits={self.bits:g}: an average is from {widths[-1]} to {widths[0]}, the widths here")
        if self.selector == "no" and self.bits not in widths:
            raise InputError(f"bits={self.bits:g} with selector=no: one of the widths here, {here}")
        return [(Placement(high), *(Placement(on_host[w], Where.HOST) for w in widths))]


@dataclass(slots=True)
class _Sequence:
    """A live sequence: sums over its prompts, and the experts' importance, set once decoding has begun."""

    counts: list[Floats]
    gates: list[Floats]
    importance: Importance = field(default_factory=list)


class Prefill:
    """Placement by the prompt, once a sequence (context-aware-cxl-ndp, section 4 and algorithm 1).

    P and W of a sequence are the counts and gate sums of all steps that read its prompt. In each layer, experts have
    the importance S = alpha P / sum P + (1 - alpha) W / sum W. When decoding begins, each layer's top K go to the
    device, and the rest get widths by `prefix_split`, at the average width `bits`. Nothing changes until another
    sequence begins to decode.

    Choices on which the paper is silent:

    - Sequences that decode at the same time share the placement. S is the mean of their importances, with equal weights
      for sequences, and for tokens within a batch behind one cache.
    - Before any sequence, S is calibration's traffic. A sequence that ends without decoding (a pass without a cache)
      places experts for later ones, unless another sequence decodes.
    - Experts of equal S are ordered by calibration's traffic, because a short prompt leaves most of them at 0.
    - A smaller capacity (a KV cache grows) lowers K at once. A larger capacity is used when the next sequence decodes.
    """

    needs = Needs(prompts=True, sums=(GATES,), exact=True)

    def __init__(self, setting: Setting, options: PrefillOptions | None = None) -> None:
        self.options = options or PrefillOptions()
        self._setting = setting
        bits = [0 if p.version is None else p.version.bits for p in setting.ladder]
        self._widths = bits[:0:-1]  # of the host's placements, ascending
        self._number = {width: len(bits) - 1 - i for i, width in enumerate(self._widths)}
        self._traffic = [np.array(row, np.float64) for row in setting.traffic]
        self._prior: Importance = [row / row.sum() for row in self._traffic]
        self._sequences: dict[int, _Sequence] = {}
        self._placed: Importance = []
        self._high: list[int] = []  # K of each layer in the last answer

    def decide(self, event: Event) -> Wanted | None:
        """Return new placements when a sequence begins to decode or ends without it, and when fewer experts fit."""
        if isinstance(event, PrefillEnded):
            self._add(event)
        elif isinstance(event, DecodingBegan):
            if (mine := self._sequences.get(event.sequence)) is not None:
                mine.importance = self._importance(mine)
                return self._want(self._merged(), event.capacity)
        elif isinstance(event, SequenceEnded):
            return self._end(event)
        elif isinstance(event, Interval):
            if not self._placed:
                return self._want(self._prior, event.capacity)
            fits = self._fitting(event.capacity)
            if any(now < before for now, before in zip(fits, self._high, strict=True)):
                return self._want(self._placed, event.capacity)
        return None

    def _add(self, event: PrefillEnded) -> None:
        mine = self._sequences.get(event.sequence)
        if mine is None:
            counts, gates = ([np.zeros(n) for n in self._setting.experts] for _ in range(2))
            mine = self._sequences[event.sequence] = _Sequence(counts, gates)
        for total, tokens in zip(mine.counts, event.counts, strict=True):
            total += tokens
        for total, weights in zip(mine.gates, event.sums[GATES], strict=True):
            total += weights

    def _importance(self, mine: _Sequence) -> Importance:
        rows = zip(mine.counts, mine.gates, strict=True)
        return [np.array(prefill_importance(p.tolist(), w.tolist(), self.options.alpha)) for p, w in in_turns(rows)]

    def _end(self, event: SequenceEnded) -> Wanted | None:
        mine = self._sequences.pop(event.sequence, None)
        if mine is None:
            return None
        decoded = bool(mine.importance)
        self._prior = mine.importance or self._importance(mine)
        return None if decoded or self._decoding() else self._want(self._prior, event.capacity)

    def _decoding(self) -> list[Importance]:
        return [s.importance for s in self._sequences.values() if s.importance]

    def _merged(self) -> Importance:
        return [np.mean(np.stack(layer), axis=0) for layer in zip(*self._decoding(), strict=True)]

    def _fitting(self, capacity: Sequence[int]) -> list[int]:
        setting = self._setting
        k = self.options.k
        out = []
        for p, (n, sizes, room) in enumerate(zip(setting.experts, setting.sizes, capacity, strict=True)):
            fits = max(0, room) // max(1, sizes[0])
            fits = fits if setting.most is None else min(fits, setting.most[p][0])
            out.append(min(n, fits if k < 0 else min(k, fits)))
        return out

    def _want(self, importance: Importance, capacity: Sequence[int]) -> Wanted:
        self._placed = importance
        self._high = self._fitting(capacity)
        rows: list[tuple[bool, float, Key, int]] = []
        for p, (s, k) in in_turns(enumerate(zip(importance, self._high, strict=True))):
            order = np.lexsort((-self._traffic[p], -s))
            placed = (*((e, 0) for e in order[:k].tolist()), *self._split(p, s, order[k:]))
            rows += [(to > 0, -float(s[e]), (p, e), to) for e, to in placed]
        return {key: to for *_, key, to in sorted(rows)}

    def _split(self, position: int, s: Floats, experts: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        bits = self.options.bits
        losses = self._setting.losses[position][experts, :0:-1]
        if self.options.selector == "no" or not len(experts):
            widths = [int(bits)] * len(experts)
        else:
            widths = prefix_split(s[experts].tolist(), losses, bits, self._widths)
        return zip(experts.tolist(), (self._number[w] for w in widths), strict=True)

    def worth(self, key: Key) -> float:
        """Return an expert's importance, as of the last decision."""
        return float(self._placed[key[0]][key[1]]) if self._placed else 0.0


ENTRY = live_entry("prefill", PrefillOptions, Prefill)
