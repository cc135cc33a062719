"""Calls that have a tag for each argument: GLM's `<arg_key>` and Qwen3-Coder's `<parameter=`.

A string stands between its tags as it is; any other value stands as JSON. So the function's schema says how to read it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .lark import Lark
from .parts import MOST_CALLS, AnswerReader, Functions, StateReader, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_LETTERS = 1 << 16  # of a string's own bounds: a grammar counts up to them


@dataclass(frozen=True, slots=True)
class Tagged:
    """A form of calls: `before` with the function's name, each argument, and `after`."""

    name: str
    sign: str  # what a template holds if it has this form
    before: str  # with NAME for the function's name
    argument: tuple[str, str]  # what stands before, with KEY in it, and after an argument's value
    after: str
    head: re.Pattern[str]  # matches what stands between the opening mark and the arguments, with the name as a group
    pair: re.Pattern[str]  # matches an argument, with its key and its value as groups
    marks: tuple[str, ...] = (OPEN, CLOSE)

    def reader(self, functions: Functions) -> AnswerReader:
        """Make a reader of one answer."""
        return _Reader(self, functions)

    def answer(self, lark: Lark, tools: Tools) -> str:
        """Return the body of a rule of an answer: of calls, or of a text and calls if none is required."""
        call = lark.one_of([self._call(lark, name, schema) for name, schema in tools.functions.items()])
        opens = lark.text("\n" + OPEN)
        calls = f"{call} ({opens} {call}){{0,{MOST_CALLS - 1}}}" if tools.several else call
        return f"{lark.text(OPEN)} {calls}" if tools.required else lark.text_or(OPEN, calls)

    def _call(self, lark: Lark, name: str, schema: dict[str, Any]) -> str:
        """Return a rule of a call without its opening mark."""
        needed = set(schema.get("required", ()))
        body = [lark.text(self.before.replace("NAME", name).removeprefix(OPEN))]
        for key, one in schema.get("properties", {}).items():
            opens, closes = self.argument
            shared: dict[str, Any] = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
            value = self._value(lark, closes, {**(one if isinstance(one, dict) else {}), **shared})
            rule = lark.rule(f"{lark.text(opens.replace('KEY', key))} {value}")
            body.append(rule if key in needed else f"{rule}?")
        return lark.rule(" ".join([*body, lark.text(self.after)]))

    def _value(self, lark: Lark, closes: str, schema: dict[str, Any]) -> str:
        """Return what matches a value and the tag behind it."""
        if not is_text(schema):
            return f"{lark.json(schema)} {lark.text(closes)}"
        if (values := _values(schema)) is not None:
            return f"{lark.one_of([lark.text(v) for v in values])} {lark.text(closes)}"
        least, most = schema.get("minLength", 0), schema.get("maxLength", MOST_LETTERS)
        if not all(type(n) is int and 0 <= n <= MOST_LETTERS for n in (least, most)):
            raise ValueError(f"minLength and maxLength of an argument must be from 0 to {MOST_LETTERS}")
        return lark.through(closes, least, schema.get("maxLength"))


def is_text(schema: Any) -> bool:
    """Whether a value by this schema is a string and nothing else."""
    if not isinstance(schema, dict):
        return False
    if (values := _values(schema)) is not None:
        return bool(values) and all(isinstance(v, str) and v for v in values)
    return schema.get("type") == "string"


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The only values that a schema allows; None if it names none."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


class _Reader(StateReader):
    def __init__(self, form: Tagged, functions: Functions) -> None:
        super().__init__(self._content)
        self._form, self._functions = form, functions
        self._properties: dict[str, Any] = {}
        self._seen: set[str] = set()

    def _content(self) -> bool:
        text, mark = self.until(OPEN)
        self.content(text, before_call=mark is not None)
        if mark is not None:
            self.state = self._head
        return mark is not None

    def _head(self) -> bool:
        if (head := self._form.head.match(self.held)) is not None:
            self.add("call", head[1])
            self.held, self._seen = self.held[head.end() :], set()
            self._properties = self._functions.get(head[1], {}).get("properties", {})
            self.state = self._argument
            return True
        body, close, rest = self.held.partition(CLOSE)
        if not close and not self.ended:
            return False
        self.held, self.state = rest, self._content
        self.add("content", OPEN + body + close)  # no call: it stays text
        return bool(self.held)

    def _argument(self) -> bool:
        """Read an argument, or the end of the call. An argument that is cut off is left out.

        What stands behind a call without its end is content.
        """
        before, mark, _ = self.held.partition(CLOSE)
        # a long argument comes in many pieces: the pattern would read all of it at each
        ends = self._form.argument[1].strip() in self.held
        pair = self._form.pair.match(self.held) if ends else None
        if pair is not None and (not mark or pair.end() <= len(before)):
            self.held = self.held[pair.end() :]
            if pair[1] not in self._seen:  # JSON has each key once
                self.add("arguments", ", " if self._seen else "{")
                self._seen.add(pair[1])
                value = _read(pair[2], self._properties.get(pair[1], {}))
                self.add("arguments", f"{json.dumps(pair[1], ensure_ascii=False)}: {value}")
            return True
        if mark:
            self.held = self.held[len(before) + len(mark) :]
        if mark or self.ended:
            self.add("arguments", "}" if self._seen else "{}")
            self.state = self._content if mark else self._nothing
            if not mark:
                self._behind(before.lstrip())
        return bool(mark)

    def _behind(self, text: str) -> None:
        """Show what stands at the answer's end behind a call without its mark, but for an argument that is cut off."""
        ends = self._form.after.removesuffix(CLOSE).strip()
        argument = self._form.argument[0].partition("KEY")[0].strip()
        text = text.removeprefix(ends).lstrip()
        if not text.startswith(argument) and not any(mark.startswith(text) for mark in (ends, argument)):
            self.add("content", text)

    def _nothing(self) -> bool:
        return False


def _read(text: str, schema: Any) -> str:
    """Return an argument's text as JSON: itself if it is JSON of a type that the schema allows, else a string."""
    if not is_text(schema):
        try:
            value, types = json.loads(text), _types(schema)
            if "string" not in types or types & _NAMES[type(value)]:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """The types that a schema allows, also as choices; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(choices := schema.get("anyOf"), list):
        each = [_types(one) for one in choices]
        return set().union(*each) if all(each) else set()
    given = schema.get("type")
    return {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}


_NAMES = {
    bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}, str: {"string"},
    list: {"array"}, dict: {"object"},
}  # fmt: skip


GLM = Tagged(
    "glm", "<arg_key>", "<tool_call>NAME\n", ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"), CLOSE,
    re.compile(r"\s*([^\s<]+)\s*(?=<arg_key>|</tool_call>)"),
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL),
    (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
QWEN_CODER = Tagged(
    "qwen3-coder", "<function=", "<tool_call>\n<function=NAME>\n", ("<parameter=KEY>\n", "\n</parameter>\n"),
    "</function>\n</tool_call>", re.compile(r"\s*<function=([^>]+)>\s*"),
    re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
)  # fmt: skip
