"""What a policy is told of passes: sequences and finished steps, in the order in which they were.

Counts of a step may arrive late from a device; what happens to its sequence next is told after them. Decides nothing.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.runtime.experts.counters import Counters
from moepack.runtime.policies.contract import (
    DecodingBegan,
    Event,
    Interval,
    Needs,
    PrefillEnded,
    SequenceBegan,
    SequenceEnded,
)
from moepack.runtime.step import Prompt, Step

from .sequences import Sequences

UNDELIVERED = 64  # steps whose counts wait to be heard: of more, those of the oldest are forgotten


class RoutingStatistics:
    """One model's. Steps come from any thread; `deliver` and `interval` are called by one at a time.

    Attributes:
        sequences: which pass belongs to which.
    """

    def __init__(
        self,
        experts: Sequence[int],
        placements: int,
        needs: Needs,
        device: torch.device,
    ) -> None:
        """Nothing was heard so far.

        Args:
            experts: [layers].
            placements: of the ladder.
            needs: what the policy is told.
            device: where passes count.
        """
        self.sequences = Sequences()
        self._experts, self._placements, self._needs, self._device = tuple(experts), placements, needs, device
        self._order = itertools.count()
        self._told: deque[tuple[int, Callable[[Sequence[int]], Event]]] = deque()  # made with the capacity as of then
        self._ended: deque[tuple[int, Step]] = deque(maxlen=UNDELIVERED)
        self._spare: list[Counters] = []
        self._clear()

    def _clear(self) -> None:
        self._counts: list[npt.NDArray[np.int64]] = [np.zeros(n, np.int64) for n in self._experts]
        self._gates: list[npt.NDArray[np.float64]] = [np.zeros(n) for n in self._experts if self._needs.gates]
        self._steps, self._computed = 0, 0.0
        self._loaded = [[0] * self._placements for _ in self._experts]

    def counters(self, prompt: Prompt, mask: Tensor | None) -> Counters:
        """For a step that begins; `ended` takes them back. Prompts that it packs with other sequences have their own.

        Args:
            prompt: what it reads.
            mask: int64 [tokens], 0 for padding.
        """
        counters = self._take()
        counters.mask = mask
        if self._needs.prompts and prompt.tokens and prompt.parts:
            start, counters.tokens = 0, prompt.length
            for one in prompt.parts:
                if one.tokens:
                    counters.within.append((slice(start, start + one.length), self._take()))
                start += one.length
        return counters

    def _take(self) -> Counters:
        try:
            return self._spare.pop()
        except IndexError:
            return Counters(self._experts, self._needs.gates, self._device)

    def begins(self, prompt: Prompt) -> bool:
        """Note what a step that begins says of its sequence; whether it says anything."""
        for one in prompt.each:
            if one.begins:
                self._tell(partial(SequenceBegan, time.monotonic(), tokens=one.tokens, sequence=one.sequence))
            if one.decodes:
                self._tell(partial(DecodingBegan, time.monotonic(), sequence=one.sequence))
        return prompt.begins or prompt.decodes

    def ended(self, step: Step) -> None:
        """Note a step whose counts are on their way."""
        self._ended.append((next(self._order), step))

    def _tell(self, event: Callable[[Sequence[int]], Event]) -> None:
        if self._needs.prompts:
            self._told.append((next(self._order), event))

    def deliver(self, decide: Callable[[Event], None], capacity: Callable[[], Sequence[int]]) -> None:
        """Let the policy know of sequences, and add up the steps that have ended, in the order of all this: what a step
        has counted is heard before what happens to its sequence next, however late its numbers arrive.

        Args:
            decide: is handed every event.
            capacity: what fits now, for events.
        """
        for number in self.sequences.over():
            self._tell(partial(SequenceEnded, time.monotonic(), sequence=number))
        for _ in range(len(self._told) + len(self._ended)):  # not what comes meanwhile: there may be no end of it
            told = self._told[0] if self._told else None  # before looking at steps: those that went before are there
            try:
                order, step = self._ended.popleft()
            except IndexError:
                if told is None:
                    break
                decide(self._told.popleft()[1](capacity()))
                continue
            if told is not None and told[0] < order:
                self._ended.appendleft((order, step))
                decide(self._told.popleft()[1](capacity()))
                continue
            if not step.counters.arrived():
                self._ended.appendleft((order, step))
                break
            if step.counters.used:
                for event in self._add(step, capacity):
                    decide(event)
            for counters in (step.counters, *(apart for _, apart in step.counters.within)):
                counters.clear()
                if len(self._spare) < UNDELIVERED:
                    self._spare.append(counters)

    def _add(self, step: Step, capacity: Callable[[], Sequence[int]]) -> Iterator[Event]:
        counts, gates = step.counters.take()
        for chosen, new in zip(self._counts, counts, strict=True):
            chosen += new
        for weighed, more in zip(self._gates, gates, strict=True):
            weighed += more
        if not step.prompt.several and self._needs.timings:
            self._steps += 1
            self._computed += step.seconds
            for position, *sizes in step.demanded:
                row = self._loaded[position]
                row[:] = [old + new for old, new in zip(row, (0, *sizes), strict=True)]
        if not self._needs.prompts:
            return
        reading = [one for one in step.prompt.each if one.tokens]
        of = [apart for _, apart in step.counters.within] if step.prompt.parts else [step.counters]
        for one, counters in zip(reading, of, strict=bool(reading)):
            counts, gates = counters.take()
            mine = [row.copy() for row in counts], [row.copy() for row in gates]
            yield PrefillEnded(time.monotonic(), capacity(), *mine, one.sequence)

    def interval(self, now: float, capacity: Sequence[int]) -> Interval:
        """What was added up since the last one."""
        event = Interval(now, capacity, self._counts, self._gates, self._steps, self._computed, self._loaded)
        self._clear()
        return event
