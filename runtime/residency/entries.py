"""The state that residency.py keeps: each expert's placements in memory, and the steps that read them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from moepack.runtime.devices.contract import Completion

from .pools import Block


class Outcome(enum.Enum):
    """The result of a request for a version."""

    NOTHING = "nothing"  # the version is active, or on its way
    READY = "ready"  # the version is resident, and is published next
    STARTED = "started"  # its copy has begun
    REFUSED = "refused"  # there is no free block, or no budget for one: ask again
    BUSY = "busy"  # another copy for the expert is in flight: ask again


@dataclass(frozen=True, slots=True)
class Complete:
    """A complete version."""

    block: Block | None  # None where it takes no memory
    handle: Any  # the forward pass reads the version through it


@dataclass(frozen=True, slots=True)
class Copying:
    """A version being copied."""

    version: int
    block: Block
    event: Completion


@dataclass(slots=True)
class ExpertState:
    """One expert."""

    base: int  # the version that it has while no other is wanted
    active: int  # the version that steps read; always complete
    complete: dict[int, Complete]  # the active version, the ready one, those that are leaving, and spare ones
    flying: Copying | None = None  # the copy in flight
    ready: int | None = None  # the version that is published next
    leaving: set[int] = field(default_factory=set)  # versions that were active and that a step may still read

    @property
    def coming(self) -> int | None:
        """The version on its way; None if there is none, or its copy was cancelled."""
        if self.flying is not None:
            return None if self.flying.event.cancelled else self.flying.version
        return self.ready


@dataclass(slots=True)
class TransitionCounts:
    """Transitions since loading."""

    promotions: int = 0
    demotions: int = 0
    cancelled: int = 0
    failures: int = 0


@dataclass
class RunningSteps:
    """Running steps, and ended steps whose compute has not ended on the device."""

    begun: int = 0
    open: set[int] = field(default_factory=set)
    ended: dict[int, Completion] = field(default_factory=dict)

    def oldest(self) -> int:
        """Return the number of the oldest step that may still read."""
        self.ended = {n: e for n, e in self.ended.items() if not e.done()}
        return min([*self.open, *self.ended], default=self.begun + 1)
