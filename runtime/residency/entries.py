"""The state that residency.py keeps: of each expert its placements in memory, and the steps that read them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from moepack.runtime.devices.contract import Completion

from .pools import Block


class Outcome(enum.Enum):
    """What became of a request for a version."""

    NOTHING = "nothing"  # it is active, or on its way
    READY = "ready"  # it is resident: it is published next
    STARTED = "started"  # its copy has begun
    REFUSED = "refused"  # no block for it, or no budget: ask again
    BUSY = "busy"  # another copy for the expert is in flight: ask again


@dataclass(frozen=True, slots=True)
class Complete:
    """A complete version: its block, if it takes any memory, and what the forward pass reads it through."""

    block: Block | None
    handle: Any


@dataclass(frozen=True, slots=True)
class Copying:
    """A version being copied."""

    version: int
    block: Block
    event: Completion


@dataclass(slots=True)
class ExpertState:
    """One expert.

    Attributes:
        base: the version it is at while nobody wants another.
        active: the version that steps read; always one, always complete.
        complete: all that are: the active one, the one that is ready, those that are leaving, and spare ones.
        flying: the copy in flight.
        ready: the version that is published next.
        leaving: versions that were active and that a step may still read.
    """

    base: int
    active: int
    complete: dict[int, Complete]
    flying: Copying | None = None
    ready: int | None = None
    leaving: set[int] = field(default_factory=set)

    @property
    def coming(self) -> int | None:
        """The version on its way, unless its copy was given up."""
        if self.flying is not None:
            return None if self.flying.event.cancelled else self.flying.version
        return self.ready


@dataclass(slots=True)
class TransitionCounts:
    """What has happened since loading."""

    promotions: int = 0
    demotions: int = 0
    cancelled: int = 0
    failures: int = 0
    steps: int = 0


@dataclass
class RunningSteps:
    """Steps that are running, and those whose compute has not ended on the device."""

    begun: int = 0
    open: set[int] = field(default_factory=set)
    ended: dict[int, Completion] = field(default_factory=dict)

    def oldest(self) -> int:
        """The number of the oldest step that may still read."""
        self.ended = {n: e for n, e in self.ended.items() if not e.done()}
        return min([*self.open, *self.ended], default=self.begun + 1)
