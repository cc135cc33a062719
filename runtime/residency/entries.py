"""What residency.py keeps of one expert: its versions in memory, and what is happening to it. Data, no decisions."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from moepack.runtime.devices.cpu import Event

from .pools import Block

Key = tuple[int, int]  # layer position, expert


class State(enum.Enum):
    """What is happening to an expert (dynaexq, section 3.2)."""

    RESIDENT_HI = "resident-hi"  # a version above the base one is active
    RESIDENT_LO = "resident-lo"  # the base version is active
    PROMOTING = "promoting"  # a more precise version is being copied, or waits for the next boundary
    DEMOTING = "demoting"  # a less precise one is, or does
    EVICTING = "evicting"  # a version that was active waits for the last window that could read it


class Outcome(enum.Enum):
    """What became of a request for a version."""

    NOTHING = "nothing"  # it is active, or on its way
    READY = "ready"  # it is resident: the next boundary publishes it
    STARTED = "started"  # its copy has begun
    REFUSED = "refused"  # no block for it, or no budget: ask again
    BUSY = "busy"  # another copy for the expert is in flight: ask again


@dataclass(frozen=True, slots=True)
class Resident:
    """A complete version: its block and what the forward pass reads it through."""

    block: Block
    handle: Any


@dataclass(frozen=True, slots=True)
class Flying:
    """A version being copied."""

    version: int
    block: Block
    event: Event


@dataclass(slots=True)
class Entry:
    """One expert.

    Attributes:
        base: the version it is at while nobody wants another.
        active: the version that windows read; always one, always complete.
        complete: all that are: the active one, the one that is ready, those that are leaving, and spare ones.
        flying: the copy in flight.
        ready: the version that the next boundary publishes.
        leaving: versions that were active and that a window may still read.
    """

    base: int
    active: int
    complete: dict[int, Resident]
    flying: Flying | None = None
    ready: int | None = None
    leaving: set[int] = field(default_factory=set)

    @property
    def coming(self) -> int | None:
        """The version on its way, unless its copy was given up."""
        if self.flying is not None:
            return None if self.flying.event.cancelled else self.flying.version
        return self.ready

    @property
    def state(self) -> State:
        """Its state; of several transitions at once the one towards a new version."""
        coming = self.coming
        if coming is not None and coming != self.active:
            return State.PROMOTING if coming < self.active else State.DEMOTING
        if self.leaving:
            return State.EVICTING
        return State.RESIDENT_LO if self.active == self.base else State.RESIDENT_HI


@dataclass(slots=True)
class Counts:
    """What has happened since loading."""

    promotions: int = 0
    demotions: int = 0
    cancelled: int = 0
    failures: int = 0
    windows: int = 0


@dataclass
class Windows:
    """Windows that are running, and those whose compute has not ended on the device."""

    begun: int = 0
    open: set[int] = field(default_factory=set)
    ended: dict[int, Event] = field(default_factory=dict)

    def oldest(self) -> int:
        """The number of the oldest window that may still read."""
        self.ended = {n: e for n, e in self.ended.items() if not e.done()}
        return min([*self.open, *self.ended], default=self.begun + 1)
