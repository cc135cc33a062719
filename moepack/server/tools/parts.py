"""Parts of an answer, and what its readers need: a text that grows, cut at marks, and the end of a JSON value.

It knows no model's form of tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST_CALLS = 8  # of one answer whose grammar allows several: a weak model would never end them
Schema = dict[str, Any]  # a JSON schema
Functions = Mapping[str, Schema]  # name -> schema of the arguments, an object


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that an answer may call, and whether it must."""

    functions: Functions = field(default_factory=dict)
    required: bool = False  # whether the answer is calls and nothing else
    several: bool = True  # whether it may have more than one
    strict: bool = False  # whether calls must keep to their schemas where none is required

    @property
    def binding(self) -> bool:
        """Whether a grammar must hold the answer."""
        return bool(self.functions) and (self.required or self.strict)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer, in the order in which the model wrote them.

    `kind` is "content" or "reasoning" with a piece of text, "call" with the name of a function, which begins a call, or
    "arguments" with a piece of the JSON of the call that began last. `id` is a call's, from a model that writes one.
    """

    kind: str
    text: str
    id: str = ""


class AnswerReader(Protocol):
    """Takes an answer piece by piece, and gives back its parts."""

    def push(self, text: str) -> list[AnswerPart]:
        """Take more of the answer; return the parts that are certain by now."""

    def end(self, unfinished: bool = False) -> list[AnswerPart]:
        """Return what was held back, at the end of the answer.

        `unfinished` says that a limit or a stop string cut the answer off: the beginning of a mark, and a call without
        its name, are then left out.
        """


class StateReader:
    """Reads by a state: a function that takes text from `held`, adds to `parts`, and says whether it got further."""

    def __init__(self, state: Callable[[], bool]) -> None:
        self.held = ""
        self.parts = list[AnswerPart]()
        self.ended = False
        self.unfinished = False  # whether the answer was cut off
        self.state = state

    def push(self, text: str) -> list[AnswerPart]:
        """Take more of the answer; return the parts that are certain by now."""
        self.held += text
        self.parts = []
        while self.state():
            pass
        return self.parts

    def end(self, unfinished: bool = False) -> list[AnswerPart]:
        """Return what was held back, at the end of the answer."""
        self.ended = True
        self.unfinished = unfinished
        return self.push("")

    def until(self, *marks: str) -> tuple[str, str | None]:
        """Take the text before the first of these marks, and that mark, off `held`.

        Without one, take what cannot begin a mark any more: all, at the end of the answer. The beginning of a mark that
        was cut off is dropped.
        """
        text, mark, self.held = cut(self.held, marks, self.ended and not self.unfinished)
        if self.unfinished and mark is None:
            self.held = ""
        return text, mark

    def add(self, kind: str, text: str, identity: str = "") -> None:
        """Add a part, if it has text."""
        if text:
            self.parts.append(AnswerPart(kind, text, identity))

    def content(self, text: str, before_call: bool = False) -> None:
        """Add content. White space at its end waits for more content; before a call, or a cut, it is dropped."""
        shown = text.rstrip()
        self.add("content", shown)
        if before_call or self.unfinished:
            return
        if self.ended or (shown and not text[len(shown) :]):
            self.add("content", text[len(shown) :])
        else:
            self.held = text[len(shown) :] + self.held


class PlainReader:
    """A reader of answers that are content alone."""

    def push(self, text: str) -> list[AnswerPart]:
        """Take more of the answer."""
        return [AnswerPart("content", text)] if text else []

    def end(self, unfinished: bool = False) -> list[AnswerPart]:
        """Return nothing: nothing is held back."""
        return []


class LeavingReader(StateReader):
    """A reader of an answer's beginning, which leaves the rest to another reader."""

    def __init__(self, state: Callable[[], bool], inner: AnswerReader) -> None:
        """Begin in a state; after `rest`, the answer goes to `inner`."""
        super().__init__(state)
        self.inner = inner

    def end(self, unfinished: bool = False) -> list[AnswerPart]:
        """Return what was held back, at the end of the answer."""
        return [*super().end(unfinished), *self.inner.end(unfinished)]

    def rest(self) -> bool:
        """Behind the beginning."""
        text = self.held
        self.held = ""
        self.parts += self.inner.push(text)
        return False


class JsonOrCalls(LeavingReader):
    """A reader of answers that are JSON or calls. JSON is content, whatever marks its strings hold."""

    def __init__(self, calls: AnswerReader) -> None:
        """Leave an answer that begins with a call's mark to the reader `calls`."""
        super().__init__(self._begin, calls)

    def _begin(self) -> bool:
        begins = self.held.lstrip()
        if not begins:
            return False
        if not begins.startswith("<"):  # as all marks do, and no JSON
            self.inner = PlainReader()
        self.state = self.rest
        return True


def cut(text: str, marks: tuple[str, ...], ended: bool) -> tuple[str, str | None, str]:
    """Split a text at the first mark in it; the text may end within a mark.

    Returns:
        What stands before the mark, the mark, and what stands behind it. If no mark is whole: what cannot begin one,
        None, and what may, which is nothing once the text has `ended`.
    """
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, _, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    most = 0 if ended else max(map(len, marks)) - 1
    for at in range(max(0, len(text) - most), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at], None, text[at:]
    return text, None, ""


class JsonEnd:
    """Finds where a JSON object or list ends, in a text that comes in pieces."""

    _SIGNS = re.compile(r'[{}\[\]"]|\\')

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Read the next piece; return how many of its characters belong to the value if it ends there, else None."""
        at = 0
        if self._escaped and text:
            at = 1
            self._escaped = False
        while (sign := self._SIGNS.search(text, at)) is not None:
            at = sign.end()
            if sign[0] == "\\":
                if self._quoted:
                    self._escaped = at == len(text)
                    at += 1
            elif sign[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if sign[0] in "{[" else -1
                if self._depth <= 0:
                    return at
        return None
