"""Forms of calls, and what those between marks share, whatever stands between a call's marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .lark import Lark
from .parts import MOST_CALLS, AnswerReader, Functions, Schema, StateReader, Tools

HEAD = 4096  # the most characters of a call's head: those of one without end are not looked through at every token


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of calls: how they are read from an answer, and what grammar holds an answer to them."""

    name: str
    sign: str  # what a template holds if it has this form
    marks: tuple[str, ...]  # texts that answers must show though they may be tokens of their own, perhaps special ones

    def reader(self, functions: Functions) -> AnswerReader:
        """Make a reader of one answer."""
        raise NotImplementedError

    def answer(self, lark: Lark, tools: Tools, schema: Schema | None = None) -> str:
        """Return the body of a rule of an answer.

        It consists of calls; or, if none is required, of JSON that keeps to `schema` or of calls; or, without a schema,
        of a text and perhaps calls.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Marked(CallForm):
    """Calls between marks: `before` with the function's name in it, the arguments, and `after`.

    `section` stands around all calls of an answer. `head` matches what stands between `open` and the arguments, with
    the name as its last group; models vary more than what `before` writes.
    """

    open: str
    close: str
    before: str  # with NAME for the function's name
    after: str
    between: str  # what stands between two calls
    head: re.Pattern[str]
    section: tuple[str, str] | None = None

    def answer(self, lark: Lark, tools: Tools, schema: Schema | None = None) -> str:
        """See CallForm."""
        call = lark.one_of([self.call(lark, name, schema) for name, schema in tools.functions.items()])
        opens, closes = self.section or ("", "")
        more = f"({lark.text(self.between + self.open)} {call}){{0,{MOST_CALLS - 1}}}" if tools.several else ""
        first = f"{lark.text(self.open)} " if opens else ""
        calls = f"{first}{call} {more} {lark.text(closes)}"
        mark = opens or self.open
        if not tools.required and schema is None:
            return lark.text_or(mark, calls)
        only = f"{lark.text(mark)} {calls}"
        return only if tools.required or schema is None else f"({only} | {lark.json(schema)})"

    def call(self, lark: Lark, name: str, schema: dict[str, object]) -> str:
        """Return a rule of a call without its opening mark."""
        raise NotImplementedError


class MarkedReader(StateReader):
    """Reads the text around calls; what stands in a call is for `begin` and the states behind it."""

    def __init__(self, form: Marked) -> None:
        super().__init__(self.text)
        self.form = form
        around = tuple(mark.strip() for mark in form.section or ())
        self._opens = (*around[:1], form.open)
        self.ends = (form.close, *around[1:])

    def text(self) -> bool:
        """Outside of calls and their section."""
        text, mark = self.until(*self._opens)
        self.content(text, before_call=mark is not None)
        if mark is not None:
            self.state = self.head if mark == self.form.open else self._section
        return mark is not None

    def _section(self) -> bool:
        """Between two calls of a section."""
        _, mark = self.until(self.form.open, *self.ends[1:])
        if mark is not None:
            self.state = self.head if mark == self.form.open else self.text
        return mark is not None

    def head(self) -> bool:
        """Behind a call's opening mark. What is no call stays text."""
        if (head := self.form.head.match(self.held, 0, HEAD)) is not None:
            self.held = self.held[head.end() :]
            self.state = self.begin(head)
            return True
        body, close, rest = self.held.partition(self.form.close)
        if not close and self.unfinished:
            self.held = ""
        if not close and (self.unfinished or not self.ended):
            return False
        self.held, self.state = rest, self.behind(self.form.close)
        self.no_call(body, close)
        return bool(self.held)

    def behind(self, end: str) -> Callable[[], bool]:
        """Return the state behind an end of a call, its own or its section's."""
        return self._section if self.ends[1:] and end == self.form.close else self.text

    def begin(self, head: re.Match[str]) -> Callable[[], bool]:
        """Add the call that this head begins; return the state behind it."""
        raise NotImplementedError

    def no_call(self, body: str, close: str) -> None:
        """Add the text between a call's marks when it has no valid head."""
        self.add("content", self.form.open + body + close)
