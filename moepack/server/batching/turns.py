"""Choose which sequences decode in the next step, where steps wait for experts' bytes. Reads no clock, runs nothing.

Texts keep different experts busy. Where memory holds few experts, a step of many texts reads most of them from the
disk, and a step of one text few. So when steps wait, fewer sequences decode at a time, in turns: one number after
another is tried for some seconds, and kept if it gives more tokens a second. Prompts are read as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

WAITS = 0.3  # the share of steps' time that is waits above which fewer sequences at a time are tried
GAIN = 1.1  # how many times as many tokens a second a number must give to be kept
# seconds and steps, at least, over which a number is measured: turns change within them
WINDOW = 6.0
STEPS = 4
PATIENCE = 32  # the most windows between two trials; it doubles with each trial in vain
# seconds in which every sequence has a turn; the least and the most of one turn
CYCLE = 48.0
TURN = (2.0, 8.0)


class Turning(Protocol):
    """A sequence."""

    @property
    def served(self) -> int:
        """The step that last served it."""


One = TypeVar("One", bound=Turning)


class Turns(Generic[One]):
    """The sequences whose turn it is, and how many these may be."""

    def __init__(self) -> None:
        self.most: int | None = None  # sequences that decode in one step; None for all
        self._mine: list[One] = []
        self._ends = 0.0  # when the turn does
        # of this window
        self._tokens = 0
        self._steps = 0
        self._seconds = 0.0
        self._waited = 0.0
        self._before: tuple[int | None, float] | None = None  # the number before this trial, and its tokens a second
        self._tries = 0  # trials in vain since the number changed
        # windows until the next trial, and after the next one in vain
        self._hold = 0
        self._patience = 1

    def choose(self, ready: Sequence[One], now: float, at_once: int | None = None) -> list[One]:
        """Return which of the sequences that could decode do so; `now` in seconds of any clock.

        A turn ends after its time; who decoded longest ago is next. Who ends early is replaced at once. Of those whose
        turn it is, one step serves no more than `at_once`.
        """
        mine = self._in_turn(ready, now)
        return mine if at_once is None else sorted(mine, key=lambda one: one.served)[:at_once]

    def _in_turn(self, ready: Sequence[One], now: float) -> list[One]:
        if self.most is None or len(ready) <= self.most:
            return list(ready)
        mine = [one for one in self._mine if one in ready and now < self._ends]
        if not mine:
            least, most = TURN
            self._ends = now + max(least, min(most, CYCLE * self.most / len(ready)))
        others = sorted((one for one in ready if one not in mine), key=lambda one: one.served)
        self._mine = mine + others[: self.most - len(mine)]
        return list(self._mine)

    def record(self, decoded: int, ready: int, seconds: float, waited: float) -> None:
        """Count a step that read no prompt.

        Args:
            decoded: how many sequences it served.
            ready: how many could have decoded.
            seconds: the step's time.
            waited: those of them that it waited for experts' bytes.
        """
        self._tokens = self._tokens + decoded
        self._steps = self._steps + 1
        self._seconds = self._seconds + seconds
        self._waited = self._waited + waited
        if self._seconds >= WINDOW and self._steps >= STEPS:
            self._close(ready, self._tokens / self._seconds, self._waited / self._seconds)
            self._tokens = 0
            self._steps = 0
            self._seconds = 0.0
            self._waited = 0.0

    def _close(self, ready: int, rate: float, waits: float) -> None:
        """Judge the trial that a window was, or begin one."""
        if self._before is not None:
            most, least = self._before
            self._before = None
            if rate >= GAIN * least:
                self._tries = 0
                self._patience = 1
            else:
                self.most = most
                self._tries = self._tries + 1
                self._hold = self._patience
                self._patience = min(2 * self._patience, PATIENCE)
                return
        if self._hold:
            self._hold -= 1
            return
        size = min(ready, self.most or ready)
        numbers = [1 << n for n in range(ready.bit_length()) if 1 << n < ready] + [ready]
        others = [n for n in numbers if n > size or (n < size and waits > WAITS)]
        if others:
            found = others[self._tries % len(others)]
            self._before = (self.most, rate)
            self.most = None if found == ready else found
