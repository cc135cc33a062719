"""Tell a policy about forward passes: events of sequences, and the counts of ended steps, in order.

A step's counts may arrive late from a device. Later events of the same sequence wait for them.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moepack.runtime.policies.contract import (
    DecodingBegan,
    Event,
    Interval,
    Needs,
    PrefillEnded,
    SequenceBegan,
    SequenceEnded,
)
from moepack.runtime.policies.reducers import Ints
from moepack.runtime.step.context import Prompt, Step
from moepack.runtime.step.counters import Counters

from .sequences import Sequences

UNDELIVERED = 64  # the most steps whose counts wait for delivery; beyond that the oldest is dropped


class RoutingStatistics:
    """The statistics of one model. Steps come from any thread; one thread at a time calls `deliver` and `interval`."""

    def __init__(self, experts: Sequence[int], placements: int, needs: Needs, device: torch.device) -> None:
        """Count choices among `experts` [layers] experts and `placements` placements; passes count on `device`."""
        self.sequences = Sequences()
        self._experts = tuple(experts)
        self._placements = placements
        self._needs = needs
        self._device = device
        self._order = itertools.count()
        self._told: deque[tuple[int, Callable[[Sequence[int]], Event]]] = deque()  # made with the capacity at delivery
        self._ended: deque[tuple[int, Step]] = deque(maxlen=UNDELIVERED)
        self._spare: list[Counters] = []
        self._clear()

    def _clear(self) -> None:
        self._counts: list[Ints] = [np.zeros(n, np.int64) for n in self._experts]
        self._sums = {reducer: [np.zeros(n) for n in self._experts] for reducer in self._needs.sums}
        self._steps = 0
        self._computed = 0.0
        self._loaded = [[0] * self._placements for _ in self._experts]

    def counters(self, prompt: Prompt, mask: Tensor | None) -> Counters:
        """Return counters for a step that begins, and for each prompt that it packs; `deliver` takes them back.

        `mask` is int64 [tokens], 0 for padding.
        """
        counters = self._take()
        counters.mask = mask
        if self._needs.prompts and prompt.tokens and prompt.parts:
            start = 0
            counters.tokens = prompt.length
            for one in prompt.parts:
                if one.tokens:
                    counters.within.append((slice(start, start + one.length), self._take()))
                start += one.length
        return counters

    def _take(self) -> Counters:
        try:  # another thread may take the last one first
            made = self._spare.pop()
        except IndexError:
            return Counters(self._experts, self._needs.sums, self._device)
        made.clear()
        return made

    def begins(self, prompt: Prompt) -> bool:
        """Note the sequences that begin, or begin decoding, with a step; return whether there are any."""
        for one in prompt.each:
            if one.begins:
                self._tell(partial(SequenceBegan, time.monotonic(), tokens=one.tokens, sequence=one.sequence))
            if one.decodes:
                self._tell(partial(DecodingBegan, time.monotonic(), sequence=one.sequence))
        return prompt.begins or prompt.decodes

    def ended(self, step: Step) -> None:
        """Note an ended step, whose counts may arrive later."""
        self._ended.append((next(self._order), step))

    def _tell(self, event: Callable[[Sequence[int]], Event]) -> None:
        if self._needs.prompts:
            self._told.append((next(self._order), event))

    def deliver(self, decide: Callable[[Event], None], capacity: Callable[[], Sequence[int]]) -> None:
        """Tell the policy the events of sequences, and add up the counts of ended steps, in order.

        However late a step's counts arrive, later events of its sequence wait for them. `decide` takes every event;
        `capacity` returns the bytes that each layer's experts may take now beyond the base.
        """
        for number in self.sequences.over():
            self._tell(partial(SequenceEnded, time.monotonic(), sequence=number))
        for _ in range(len(self._told) + len(self._ended)):  # not those that come meanwhile, perhaps without end
            told = self._told[0] if self._told else None  # read before the steps, so all earlier steps are there
            ended = self._ended.popleft() if self._ended else None
            if told is not None and (ended is None or told[0] < ended[0]):
                if ended is not None:
                    self._ended.appendleft(ended)
                decide(self._told.popleft()[1](capacity()))
                continue
            if ended is None:
                break
            step = ended[1]
            if not step.counted.arrived():
                self._ended.appendleft(ended)
                break
            if step.counted.used:
                for event in self._add(step, capacity):
                    decide(event)
            for counters in (step.counted, *(apart for _, apart in step.counted.within)):
                if len(self._spare) < UNDELIVERED:
                    self._spare.append(counters)

    def _add(self, step: Step, capacity: Callable[[], Sequence[int]]) -> Iterator[Event]:
        counts, sums = step.counted.take()
        for chosen, new in zip(self._counts, counts, strict=True):
            chosen += new
        for reducer, rows in sums.items():
            for total, more in zip(self._sums[reducer], rows, strict=True):
                total += more
        if not step.prompt.several and self._needs.timings:
            self._steps += 1
            self._computed += step.seconds
            for position, placement, size in step.demanded:
                self._loaded[position][placement] += size
        if not self._needs.prompts:
            return
        reading = [one for one in step.prompt.each if one.tokens]
        of = [apart for _, apart in step.counted.within] if step.prompt.parts else [step.counted]
        for one, counters in zip(reading, of, strict=bool(reading)):
            counts, sums = counters.take()
            yield PrefillEnded(time.monotonic(), capacity(), [row.copy() for row in counts], sums, one.sequence)

    def interval(self, now: float, capacity: Sequence[int]) -> Interval:
        """Return the sums since the last interval, and begin again at zero."""
        event = Interval(now, capacity, self._counts, self._sums, self._steps, self._computed, self._loaded)
        self._clear()
        return event
