"""Which steps are running, or have ended but not on the device: what a block waits for before it is used again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moepack.runtime.devices.contract import Event
from moepack.runtime.experts.handles import Snapshot


@dataclass
class Steps:
    """Steps that are running, and those whose compute has not ended on the device."""

    begun: int = 0
    open: set[int] = field(default_factory=set)
    ended: dict[int, Event] = field(default_factory=dict)

    def oldest(self) -> int:
        """The number of the oldest step that may still read."""
        self.ended = {n: e for n, e in self.ended.items() if not e.done()}
        return min([*self.open, *self.ended], default=self.begun + 1)


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass while it runs.

    Attributes:
        number: its number.
        snapshots: of every layer, what it reads from its beginning to its end.
        counts: int64 [experts] a layer, how often the router chose each in it so far.
    """

    number: int
    snapshots: tuple[Snapshot, ...]
    counts: list[npt.NDArray[np.int64]]
