"""Which steps are running, or have ended but not on the device: what a block waits for before it is used again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moepack.runtime.devices.contract import Event
from moepack.runtime.experts.counters import Counters
from moepack.runtime.experts.handles import Snapshot

from .tables import Table


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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a step reads of a sequence (sequences.py).

    Attributes:
        sequence: its number, from 1; 0 where nobody needs to know.
        tokens: of a prompt or a chunk of one, over the batch; 0 where it goes on by one token each.
        begins: whether the sequence begins with it.
        decodes: whether decoding does.
        several: whether it reads several tokens of a prompt of each of its texts.
        length: tokens of the pass that are its sequence's, over the batch.
        parts: of a pass that packs sequences, one after another: what it reads of each. The rest is then of all
            together: sums of tokens, and whether any of them does.
    """

    sequence: int = 0
    tokens: int = 0
    begins: bool = False
    decodes: bool = False
    several: bool = False
    length: int = 0
    parts: tuple[Prompt, ...] = ()

    @property
    def each(self) -> tuple[Prompt, ...]:
        """What it reads, by sequence."""
        return self.parts or (self,)


def packed(parts: Iterable[Prompt]) -> Prompt:
    """What a pass reads of sequences that it packs."""
    of = tuple(parts)
    return Prompt(
        0, sum(p.tokens for p in of), any(p.begins for p in of), any(p.decodes for p in of),
        any(p.several for p in of), sum(p.length for p in of), of,
    )  # fmt: skip


NO_PROMPT = Prompt()


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass while it runs.

    Attributes:
        number: its number.
        snapshots: of every layer, what it reads from its beginning to its end.
        counters: what the router chose in it so far.
        prompt: what it reads of a sequence.
        table: the handles on a GPU, as of its epoch.
        began: when it did.
        seconds: that it took, once it has ended, without those that it waited.
        waited: seconds that it waited for experts' bytes.
        demanded: layer position, and bytes that were brought for it: what was packed, what was stored.
        ahead: pages that were taken for it before it got to their layer.
        issued: what a device was given to do for its pages, and has not been asked about.
    """

    number: int
    snapshots: tuple[Snapshot, ...]
    counters: Counters
    prompt: Prompt = NO_PROMPT
    table: Table | None = None
    began: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    demanded: list[tuple[int, int, int]] = field(default_factory=list)
    ahead: Any = None
    issued: list[Any] = field(default_factory=list)
