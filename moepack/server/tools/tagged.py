"""Calls that have a tag for each argument: GLM's `<arg_key>`, Qwen3-Coder's `<parameter=`, DeepSeek's DSML.

A string stands between its tags as it is; any other value stands as JSON. So the function's schema says how to read it,
or the tag itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .calls import Marked, MarkedReader
from .lark import Lark
from .parts import AnswerReader, Functions, Schema, cut

MOST_LETTERS = 1 << 16  # of a string's own bounds: a grammar counts up to them


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Marked):
    """A form of calls with tags around each argument."""

    argument: tuple[str, str]  # what stands before, with KEY in it and perhaps IS_TEXT, and after an argument's value
    pair: re.Pattern[str]  # matches an argument: its `key`, its `value`, and perhaps whether it `is_text`
    empty: str = ""  # what may stand in place of the arguments, where there is none

    def reader(self, functions: Functions) -> AnswerReader:
        """Make a reader of one answer."""
        return _Reader(self, functions)

    def call(self, lark: Lark, name: str, schema: Schema) -> str:
        """Return a rule of a call without its opening mark."""
        needed = set(schema.get("required", ()))
        body = [lark.text(self.before.replace("NAME", name).removeprefix(self.open))]
        shared: Schema = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        for key, one in schema.get("properties", {}).items():
            value = {**(one if isinstance(one, dict) else {}), **shared}
            text = _texts(value) if "IS_TEXT" in self.argument[0] else None
            rule = lark.one_of([self._argument(lark, key, v) for v in (text, value) if v is not None])
            body.append(rule if key in needed else f"{rule}?")
        if self.empty and not needed:
            body.append(f"{lark.text(self.empty)}?")
        return lark.rule(" ".join([*body, lark.text(self.after)]))

    def _argument(self, lark: Lark, key: str, schema: Schema) -> str:
        """Return a rule of an argument."""
        opens, closes = self.argument
        opens = opens.replace("IS_TEXT", json.dumps(is_text(schema))).replace("KEY", key)
        return lark.rule(f"{lark.text(opens)} {self._value(lark, closes, schema)}")

    def _value(self, lark: Lark, closes: str, schema: Schema) -> str:
        """Return what matches a value and the tag behind it."""
        if not is_text(schema):
            return f"{lark.json(schema)} {lark.text(closes)}"
        if (values := _values(schema)) is not None:
            return f"{lark.one_of([lark.text(v) for v in values])} {lark.text(closes)}"
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", MOST_LETTERS)
        if not all(type(n) is int and 0 <= n <= MOST_LETTERS for n in (least, most)):
            raise ValueError(f"minLength and maxLength of an argument must be from 0 to {MOST_LETTERS}")
        return lark.through(closes, least, schema.get("maxLength"))


def is_text(schema: object) -> bool:
    """Whether a value by this schema is a string and nothing else."""
    if not isinstance(schema, dict):
        return False
    if (values := _values(schema)) is not None:
        return bool(values) and all(isinstance(v, str) and v for v in values)
    return schema.get("type") == "string"


def _texts(schema: Schema) -> Schema | None:
    """The schema of strings, of one that allows them among others; None if it allows none, or no others."""
    if isinstance(types := schema.get("type"), list) and "string" in types and _values(schema) is None:
        return {**schema, "type": "string"}
    choices = schema.get("anyOf")
    return next((one for one in choices if is_text(one)), None) if isinstance(choices, list) else None


def _values(schema: Schema) -> list[Any] | None:
    """The only values that a schema allows; None if it names none."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


class _Reader(MarkedReader):
    def __init__(self, form: Tagged, functions: Functions) -> None:
        super().__init__(form)
        self._form = form
        self._functions = functions
        self._properties: Schema = {}
        self._seen: set[str] = set()

    def begin(self, head: re.Match[str]) -> Callable[[], bool]:
        self.add("call", head[1])
        self._seen, self._properties = set(), self._functions.get(head[1], {}).get("properties", {})
        return self._argument

    def _argument(self) -> bool:
        """Read an argument, or the end of the call. An argument that is cut off is left out.

        What stands behind a call without its end is content.
        """
        before, mark, rest = cut(self.held, self.ends, ended=True)
        # a long argument comes in many pieces: the pattern would read all of it at each
        ends = self._form.argument[1].strip() in self.held
        pair = self._form.pair.match(self.held) if ends else None
        if pair is not None and (mark is None or pair.end() <= len(before)):
            self.held = self.held[pair.end() :]
            if (key := pair["key"]) not in self._seen:  # JSON has each key once
                self.add("arguments", ", " if self._seen else "{")
                self._seen.add(key)
                told = _TOLD.get(pair.groupdict().get("is_text"), self._properties.get(key, {}))
                self.add("arguments", f"{json.dumps(key, ensure_ascii=False)}: {_read(pair['value'], told)}")
            return True
        if mark is not None:
            self.held, self.state = rest, self.behind(mark)
        elif self.ended:
            self.state = self._nothing
        if mark is not None or self.ended:
            self.add("arguments", "}" if self._seen else "{}")
            if mark is None:
                self._loose(before.lstrip())
        return mark is not None

    def _loose(self, text: str) -> None:
        """Show what stands at the answer's end behind a call without its mark, but for an argument that is cut off."""
        ends = self._form.after.removesuffix(self._form.close).strip()
        argument = self._form.argument[0].partition("KEY")[0].strip()
        text = text.removeprefix(ends).lstrip()
        if not text.startswith(argument) and not any(mark.startswith(text) for mark in (ends, argument, *self.ends)):
            self.add("content", text)

    def _nothing(self) -> bool:
        return False


def _read(text: str, schema: object) -> str:
    """Return an argument's text as JSON: itself if it is JSON of a type that the schema allows, else a string."""
    if not is_text(schema):
        try:
            value = json.loads(text)
            types = _types(schema)
            if "string" not in types or types & _NAMES[type(value)]:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> set[str]:
    """The types that a schema allows, also as choices; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(choices := schema.get("anyOf"), list):
        each = [_types(one) for one in choices]
        return set().union(*each) if all(each) else set()
    given = schema.get("type")
    return {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}


_NAMES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}

# What a tag says of its value, as a schema: it is more certain than the function's own.
_TOLD: dict[str | None, Schema] = {"true": {"type": "string"}, "false": {}}


_CALL = "<tool_call>"
_END = "</tool_call>"
GLM = Tagged(
    "glm",
    "<arg_key>",
    (_CALL, _END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    _CALL,
    _END,
    "<tool_call>NAME\n",
    _END,
    "\n",
    re.compile(r"\s*([^\s<]+)\s*(?=<arg_key>|</tool_call>)"),
    argument=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    pair=re.compile(r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL),
)
QWEN_CODER = Tagged(
    "qwen3-coder",
    "<function=",
    (_CALL, _END),
    _CALL,
    _END,
    "<tool_call>\n<function=NAME>\n",
    "</function>\n</tool_call>",
    "\n",
    re.compile(r"\s*<function=([^>]+)>\s*"),
    argument=("<parameter=KEY>\n", "\n</parameter>\n"),
    pair=re.compile(r"\s*<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL),
)
_DSML = "\uff5cDSML\uff5c"


def _dsml(name: str, section: str) -> Tagged:
    """Return DeepSeek's form, in which templates write tags as "<" and the mark and more, so only the mark is whole."""
    return Tagged(
        name,
        f"{section}>",
        (_DSML,),
        f"<{_DSML}invoke",
        f"</{_DSML}invoke>",
        f'<{_DSML}invoke name="NAME">\n',
        f"</{_DSML}invoke>",
        "\n",
        re.compile(r'\s+name="([^"<]+)"\s*>\s*'),
        (f"<{_DSML}{section}>\n", f"\n</{_DSML}{section}>"),
        argument=(f'<{_DSML}parameter name="KEY" string="IS_TEXT">', f"</{_DSML}parameter>\n"),
        pair=re.compile(
            rf'\s*<{_DSML}parameter\s+name="(?P<key>[^"]*)"(?:\s+string="(?P<is_text>true|false)")?\s*>(?P<value>.*?)'
            rf"</{_DSML}parameter>\s*",
            re.DOTALL,
        ),
        empty="\n",
    )


DEEPSEEK_V32 = _dsml("deepseek-v3.2", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek-v4", "tool_calls")
