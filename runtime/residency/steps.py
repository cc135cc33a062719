"""Which steps are running, or have ended but not on the device: what a block waits for before it is used again."""

from __future__ import annotations

from dataclasses import dataclass, field

from moepack.runtime.devices.contract import Event


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
