"""Calls whose arguments stand as JSON between marks: Hermes and Qwen, DeepSeek V3 and V3.1, Kimi."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .lark import Lark
from .parts import MOST_CALLS, AnswerReader, Functions, JsonEnd, StateReader, Tools


@dataclass(frozen=True, slots=True)
class Delimited:
    """A form of calls: `before` with the function's name in it, the arguments, and `after`.

    `section` stands around all calls of an answer. `head` matches what stands between `open` and the arguments, with
    the name as its last group, perhaps behind the identity that the model gives the call; models vary more than what
    `before` writes.
    """

    name: str
    sign: str  # what a template holds if it has this form
    open: str
    close: str
    before: str  # with NAME for the function's name, and # for a number
    after: str
    between: str  # what stands between two calls
    head: re.Pattern[str]
    section: tuple[str, str] | None = None
    marks: tuple[str, ...] = ()  # tokens that answers must show though they may be special ones

    def reader(self, functions: Functions) -> AnswerReader:
        """Make a reader of one answer."""
        return _Reader(self)

    def answer(self, lark: Lark, tools: Tools) -> str:
        """Return the body of a rule of an answer: of calls, or of a text and calls if none is required."""
        call = lark.one_of(
            [
                lark.rule(f"{self._before(lark, name)} {lark.json(schema)} {lark.text(self.after)}")
                for name, schema in tools.functions.items()
            ]
        )
        opens, closes = self.section or ("", "")
        more = f"({lark.text(self.between + self.open)} {call}){{0,{MOST_CALLS - 1}}}" if tools.several else ""
        first = f"{lark.text(self.open)} " if opens else ""
        calls = f"{first}{call} {more} {lark.text(closes)}"
        mark = opens or self.open
        return f"{lark.text(mark)} {calls}" if tools.required else lark.text_or(mark, calls)

    def _before(self, lark: Lark, name: str) -> str:
        """Return what matches `before` without its opening mark, for one function."""
        pieces = self.before.removeprefix(self.open).split("#")
        number = f" {lark.rule('/[0-9]{1,3}/', 'T')} " if len(pieces) > 1 else ""
        return number.join(lark.text(piece.replace("NAME", name)) for piece in pieces)


class _Reader(StateReader):
    def __init__(self, form: Delimited) -> None:
        super().__init__(self._content)
        self._form, self._json = form, JsonEnd()
        self._loose = ""  # what stands behind arguments: a call's end, or the answer's text

    def _content(self) -> bool:
        form = self._form
        opens = (form.open,) if form.section is None else (form.section[0], form.open)
        text, mark = self.until(*opens)
        self.content(text, before_call=mark is not None)
        if mark is not None:
            self.state = self._head if mark == form.open else self._section
        return mark is not None

    def _section(self) -> bool:
        """Between two calls of a section."""
        assert self._form.section is not None
        _, mark = self.until(self._form.open, self._form.section[1])
        if mark is not None:
            self.state = self._head if mark == self._form.open else self._content
        return mark is not None

    def _head(self) -> bool:
        form = self._form
        if (head := form.head.match(self.held)) is not None:
            *identity, name = head.groups()
            self.add("call", name, *identity)
            self.held, self._json, self.state = self.held[head.end() :], JsonEnd(), self._arguments
            return True
        body, close, rest = self.held.partition(form.close)
        if not close and not self.ended:
            return False
        self.held, self.state = rest, self._behind()
        if (found := _call_of(body)) is None:
            self.add("content", form.open + body + close)  # no call: it stays text
        else:
            self.add("call", found[0])
            self.add("arguments", found[1])
        return bool(self.held)

    def _arguments(self) -> bool:
        at = self._json.find(self.held)
        self.add("arguments", self.held[:at])
        self.held = "" if at is None else self.held[at:]
        if at is not None:
            self.state = self._tail
        return at is not None

    def _tail(self) -> bool:
        """Behind the arguments; some models leave the closing mark out. Then what is no end of a call is content."""
        form = self._form
        text, mark = self.until(form.close, form.open, *(() if form.section is None else (form.section[1],)))
        self._loose += text
        if mark is not None or self.ended:
            shown = self._loose.lstrip().removeprefix(form.after.removesuffix(form.close).strip()).lstrip()
            self._loose = ""
            if mark != form.close:
                self.add("content", shown if mark is None else shown.rstrip())
        if mark is not None:
            self.state = {form.close: self._behind(), form.open: self._head}.get(mark, self._content)
        return mark is not None

    def _behind(self) -> Any:
        return self._content if self._form.section is None else self._section


def _call_of(body: str) -> tuple[str, str] | None:
    """Read a call with fields in another order, or without arguments; None if it is no call."""
    try:
        given = json.loads(body)
        name, arguments = given["name"], given.get("arguments", given.get("parameters")) or {}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, written


HERMES = Delimited(
    "hermes", "<tool_call>", "<tool_call>", "</tool_call>",
    '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n",
    re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'),
    marks=("<tool_call>", "</tool_call>"),
)  # fmt: skip
_OPEN, _CLOSE, _SEP, *_BOTH = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("call▁begin", "call▁end", "sep", "calls▁begin", "calls▁end")
)
_ALL = (_BOTH[0], _BOTH[1])
DEEPSEEK_V3 = Delimited(
    "deepseek-v3", "```json", _OPEN, _CLOSE, f"{_OPEN}function{_SEP}NAME\n```json\n", f"\n```{_CLOSE}", "\n",
    re.compile(rf"\w*{_SEP}\s*(\S+)\s*```json\s*(?=\{{)"), _ALL, (*_ALL, _OPEN, _CLOSE, _SEP),
)  # fmt: skip
DEEPSEEK = Delimited(
    "deepseek-v3.1", _OPEN, _OPEN, _CLOSE, f"{_OPEN}NAME{_SEP}", _CLOSE, "",
    re.compile(rf"\s*(\S+?)\s*{_SEP}\s*(?=\{{)"), _ALL, (*_ALL, _OPEN, _CLOSE, _SEP),
)  # fmt: skip
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_OPEN, _ARGUMENTS, _CLOSE = (f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end"))
KIMI = Delimited(
    "kimi", _ARGUMENTS, _OPEN, _CLOSE, f"{_OPEN}functions.NAME:#{_ARGUMENTS}", _CLOSE, "",
    re.compile(r"\s*(?=(\S+?)\s*<\|)(?:functions\.)?([^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"),
    _SECTION, (*_SECTION, _OPEN, _CLOSE, _ARGUMENTS),
)  # fmt: skip
