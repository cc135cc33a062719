"""Calls whose arguments stand as JSON between marks: Hermes and Qwen, DeepSeek V3 and V3.1, Kimi."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from .calls import Marked, MarkedReader
from .lark import Lark
from .parts import AnswerReader, Functions, JsonEnd


@dataclass(frozen=True, slots=True)
class Delimited(Marked):
    """A form of calls with JSON as their arguments.

    `before` has # for a number. `head` may have a group before the name: the identity that the model gives the call.
    """

    def reader(self, functions: Functions) -> AnswerReader:
        """Make a reader of one answer."""
        return _Reader(self)

    def call(self, lark: Lark, name: str, schema: dict[str, object]) -> str:
        """Return a rule of a call without its opening mark."""
        return lark.rule(f"{self._before(lark, name)} {lark.json(schema)} {lark.text(self.after)}")

    def _before(self, lark: Lark, name: str) -> str:
        """Return what matches `before` without its opening mark, for one function."""
        pieces = self.before.removeprefix(self.open).split("#")
        number = f" {lark.rule('/[0-9]{1,3}/', 'T')} " if len(pieces) > 1 else ""
        return number.join(lark.text(piece.replace("NAME", name)) for piece in pieces)


class _Reader(MarkedReader):
    def __init__(self, form: Delimited) -> None:
        super().__init__(form)
        self._json = JsonEnd()
        self._loose = ""  # what stands behind arguments: a call's end, or the answer's text

    def begin(self, head: re.Match[str]) -> Callable[[], bool]:
        *identity, name = head.groups()
        self.add("call", name, *identity)
        self._json = JsonEnd()
        return self._arguments

    def no_call(self, body: str, close: str) -> None:
        if (found := _call_of(body)) is None:
            super().no_call(body, close)
        else:
            self.add("call", found[0])
            self.add("arguments", found[1])

    def _arguments(self) -> bool:
        at = self._json.find(self.held)
        self.add("arguments", self.held[:at])
        self.held = "" if at is None else self.held[at:]
        if at is not None:
            self.state = self._tail
        return at is not None

    def _tail(self) -> bool:
        """Behind the arguments; some models leave the closing mark out. Then what is no end of a call is content."""
        form = self.form
        text, mark = self.until(form.open, *self.ends)
        self._loose += text
        if mark is not None or self.ended:
            ends = form.after.removesuffix(form.close).strip()
            loose = self._loose.lstrip()
            shown = "" if self.unfinished and ends.startswith(loose) else loose.removeprefix(ends).lstrip()
            self._loose = ""
            if mark != form.close:
                self.add("content", shown if mark is None else shown.rstrip())
        if mark is not None:
            self.state = self.head if mark == form.open else self.behind(mark)
        return mark is not None


def _call_of(body: str) -> tuple[str, str] | None:
    """Read a call with fields in another order, or without arguments; None if it is no call."""
    try:
        given = json.loads(body)
        name = given["name"]
        arguments = given.get("arguments", given.get("parameters")) or {}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, written


HERMES = Delimited(
    "hermes",
    "<tool_call>",
    ("<tool_call>", "</tool_call>"),
    "<tool_call>",
    "</tool_call>",
    '<tool_call>\n{"name": "NAME", "arguments": ',
    "}\n</tool_call>",
    "\n",
    re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'),
)
_OPEN, _CLOSE, _SEP, *_BOTH = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("call▁begin", "call▁end", "sep", "calls▁begin", "calls▁end")
)
_ALL = (_BOTH[0], _BOTH[1])
_MARKS = (*_ALL, _OPEN, _CLOSE, _SEP)
DEEPSEEK_V3 = Delimited(
    "deepseek-v3",
    "```json",
    _MARKS,
    _OPEN,
    _CLOSE,
    f"{_OPEN}function{_SEP}NAME\n```json\n",
    f"\n```{_CLOSE}",
    "\n",
    re.compile(rf"\w*{_SEP}\s*(\S+)\s*```json\s*(?=\{{)"),
    _ALL,
)
DEEPSEEK = Delimited(
    "deepseek-v3.1",
    _OPEN,
    _MARKS,
    _OPEN,
    _CLOSE,
    f"{_OPEN}NAME{_SEP}",
    _CLOSE,
    "",
    re.compile(rf"\s*(\S+?)\s*{_SEP}\s*(?=\{{)"),
    _ALL,
)
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_OPEN, _ARGUMENTS, _CLOSE = (f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end"))
KIMI = Delimited(
    "kimi",
    _ARGUMENTS,
    (*_SECTION, _OPEN, _CLOSE, _ARGUMENTS),
    _OPEN,
    _CLOSE,
    f"{_OPEN}functions.NAME:#{_ARGUMENTS}",
    _CLOSE,
    "",
    re.compile(r"\s*(?=(\S+?)\s*<\|)(?:functions\.)?([^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"),
    _SECTION,
)
