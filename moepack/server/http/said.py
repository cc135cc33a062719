"""The answer so far: text, reasoning and calls, collected from the events of a job."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from moepack.server.batching.jobs import JobEvent
from moepack.server.tools.parts import AnswerPart, AnswerReader


@dataclass(slots=True)
class Call:
    """A call of a function, as far as it was written."""

    id: str
    name: str
    arguments: str = ""  # JSON


class Said:
    """One answer, read as it arrives."""

    def __init__(self, reader: AnswerReader, several: bool = True) -> None:
        """Begin; without `several`, calls after the first are left out."""
        self.content, self.reasoning, self.calls = "", "", list[Call]()
        self.finish: str | None = None  # why it ended, as the scheduler says it, or "tool_calls"; None until then
        self.reasoning_tokens = 0  # tokens generated when reasoning ended
        self._reader, self._several, self._left_out = reader, several, False

    def hear(self, event: JobEvent) -> list[AnswerPart]:
        """Append an event; return the new parts."""
        parts = self._reader.push(event.text)
        if event.finish is not None:
            unfinished = event.finish == "length" or event.stop is not None
            parts = [*parts, *self._reader.end(unfinished)]
        kept = [part for part in parts if self._take(part)]
        if self.reasoning and not self.content and not self.calls:
            self.reasoning_tokens = event.generated
        if event.finish is not None:
            self.finish = "tool_calls" if self.calls and event.finish == "stop" else event.finish
        return kept

    def _take(self, part: AnswerPart) -> bool:
        if part.kind == "content":
            self.content += part.text
        elif part.kind == "reasoning":
            self.reasoning += part.text
        elif part.kind == "call":
            self._left_out = bool(self.calls) and not self._several
            if not self._left_out:
                own = bool(part.id) and all(part.id != call.id for call in self.calls)
                self.calls.append(Call(part.id if own else f"call_{secrets.token_hex(12)}", part.text))
        elif not self._left_out:
            self.calls[-1].arguments += part.text
        return part.kind in ("content", "reasoning") or not self._left_out
