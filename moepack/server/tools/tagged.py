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
            value = self._value(
                lark, closes, {**one, **{k: schema[k] for k in ("$defs", "definitions") if k in schema}}
            )
            rule = lark.rule(f"{lark.text(opens.replace('KEY', key))} {value}")
            body.append(rule if key in needed else f"{rule}?")
        return lark.rule(" ".join([*body, lark.text(self.after)]))

    def _value(self, lark: Lark, closes: str, schema: dict[str, Any]) -> str:
        """Return what matches a value and the tag behind it."""
        if not is_text(schema):
            return f"{lark.json(schema)} {lark.text(closes)}"
        if "enum" in schema or "const" in schema:
            texts = [str(v) for v in schema.get("enum", [schema.get("const")])]
            return f"{lark.one_of([lark.text(v) for v in texts])} {lark.text(closes)}"
        return lark.through(closes, schema.get("minLength", 0), schema.get("maxLength"))


def is_text(schema: dict[str, Any]) -> bool:
    """Whether a value by this schema is a string and nothing else."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return bool(values) and all(isinstance(v, str) and v for v in values)
    return schema.get("type") == "string"


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
        """Read an argument, or the end of the call. What a call is cut off in is left out."""
        before, mark, _ = self.held.partition(CLOSE)
        pair = self._form.pair.match(self.held)
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
        return bool(mark)

    def _nothing(self) -> bool:
        return False


def _read(text: str, schema: dict[str, Any]) -> str:
    """Return an argument's text as JSON: itself if it is JSON and may be other than a string, else a string."""
    if not is_text(schema):
        try:
            value = json.loads(text, parse_constant=_no_constant)
            return json.dumps(value, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(name)


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
