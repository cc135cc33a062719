"""The answer so far: items of reasoning, of text and of calls, collected from the events of a job."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from moepack.server.batching.jobs import JobEvent
from moepack.server.tools.parts import AnswerPart, AnswerReader


@dataclass(slots=True, eq=False)
class Item:
    """A piece of an answer that is of one kind, as far as it was written."""

    kind: str  # "reasoning", "content" or "call"
    index: int  # among the answer's items
    call: str = ""  # the call's id
    name: str = ""  # the function's name
    text: str = ""  # the text, or the call's arguments as JSON
    id: str = field(default_factory=lambda: secrets.token_hex(16))


class Said:
    """One answer, read as it arrives."""

    def __init__(self, reader: AnswerReader, several: bool = True) -> None:
        """Begin; without `several`, calls after the first are left out."""
        self.items: list[Item] = []
        self.finish: str | None = None  # why it ended, as the scheduler says it, or "tool_calls"; None until then
        self.reasoning_tokens = 0  # tokens generated when reasoning ended
        self._reader = reader
        self._several = several
        self._left_out = False

    @property
    def calls(self) -> list[Item]:
        """The calls."""
        return [item for item in self.items if item.kind == "call"]

    def text(self, kind: str) -> str:
        """Return the text of all items of a kind."""
        return "".join(item.text for item in self.items if item.kind == kind)

    def hear(self, event: JobEvent) -> list[tuple[Item, str]]:
        """Append an event; return each new text with its item: "" as a call begins."""
        parts = self._reader.push(event.text)
        if event.finish is not None:
            unfinished = event.finish == "length" or event.stop is not None
            parts = [*parts, *self._reader.end(unfinished)]
        found = [self._take(part) for part in parts]
        if self.items and all(item.kind == "reasoning" for item in self.items):
            self.reasoning_tokens = event.generated
        if event.finish is not None:
            self.finish = "tool_calls" if self.calls and event.finish == "stop" else event.finish
        return [piece for piece in found if piece is not None]

    def add(self, kind: str, call: str = "", name: str = "") -> Item:
        """Begin an item."""
        self.items.append(Item(kind, len(self.items), call, name))
        return self.items[-1]

    def _take(self, part: AnswerPart) -> tuple[Item, str] | None:
        """Append a part; return its item and text, or None if it is left out."""
        if part.kind == "call":
            self._left_out = bool(self.calls) and not self._several
            if self._left_out:
                return None
            own = bool(part.id) and all(part.id != item.call for item in self.calls)
            return self.add("call", part.id if own else f"call_{secrets.token_hex(12)}", part.text), ""
        if part.kind == "arguments" and self._left_out:
            return None
        kind = "call" if part.kind == "arguments" else part.kind
        item = self.items[-1] if self.items and self.items[-1].kind == kind else self.add(kind)
        item.text += part.text
        return item, part.text
