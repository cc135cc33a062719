"""The state that residency.py keeps: each expert's versions in memory, and the steps that read them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moepack.runtime.devices.contract import Completion

from .pools import Block

if TYPE_CHECKING:
    from moepack.runtime.experts.handles import Handle


class Outcome(enum.Enum):
    """The result of a request for a version."""

    NOTHING = "nothing"  # the version is active, or on its way
    READY = "ready"  # the version is resident, and is published next
    STARTED = "started"  # its copy has begun
    REFUSED = "refused"  # the pool is empty, or the budget refuses another block: ask again
    BUSY = "busy"  # another copy for the expert is in flight: ask again


@dataclass(frozen=True, slots=True)
class Complete:
    """A version whose bytes are complete in memory."""

    block: Block | None  # None for a version that takes no memory
    handle: Handle  # the forward pass reads the version through it


@dataclass(frozen=True, slots=True)
class Copying:
    """A version that is being copied into a block."""

    version: int
    block: Block
    event: Completion


@dataclass(slots=True)
class ExpertState:
    """The state of one expert. A version is an index into the ladder of placements."""

    active: int  # the version that steps read; always complete
    complete: dict[int, Complete]  # the active, the ready, the leaving and spare ones (kept until bytes are needed)
    flying: Copying | None = None  # the copy in flight
    ready: int | None = None  # the version that is published next

    @property
    def coming(self) -> int | None:
        """The version that is being copied or is ready; None if there is none, or if its copy was cancelled."""
        if self.flying is not None:
            return None if self.flying.event.cancelled else self.flying.version
        return self.ready


@dataclass(slots=True)
class TransitionCounts:
    """Counts of transitions since loading."""

    promotions: int = 0
    demotions: int = 0
    cancelled: int = 0


@dataclass
class RunningSteps:
    """Running steps, and ended steps whose computation still runs on the device."""

    begun: int = 0  # how many steps have begun: the number of the latest
    open: dict[int, int] = field(default_factory=dict)  # the thread of each running step
    ended: dict[int, Completion] = field(default_factory=dict)  # events at the end of the steps' computation

    def oldest(self) -> int:
        """Forget steps whose computation has ended; return the oldest step left, or else the next step's number."""
        self.ended = {n: e for n, e in self.ended.items() if not e.done()}
        return min([*self.open, *self.ended], default=self.begun + 1)
