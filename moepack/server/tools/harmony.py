"""The answers of gpt-oss: messages in channels, of which one is reasoning, one the answer, and one calls functions."""

from __future__ import annotations

import re

from .calls import CallForm
from .lark import BREAK, Lark
from .parts import AnswerReader, Functions, Schema, StateReader, Tools, cut

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
CONSTRAIN = "<|constrain|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(CallForm):
    """The form of every answer, with calls or without, and of reasoning."""

    __slots__ = ()

    def reader(self, functions: Functions) -> AnswerReader:
        """Make a reader of one answer."""
        return _Reader()

    def answer(self, lark: Lark, tools: Tools, schema: Schema | None = None) -> str:
        """See CallForm. Reasoning may stand before the answer, which has one call at most."""
        each = []
        for name, arguments in tools.functions.items():
            head = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"
            each.append(lark.rule(f"{lark.text(head)} {lark.json(arguments)} {lark.text('<|call|>')}"))
        if not tools.required:
            text = lark.rule(f"/(.|{BREAK})*/", "T") if schema is None else lark.json(schema)
            each.append(lark.rule(f"{lark.text(FINAL)} {text}"))
        return f"{_thought(lark)} {lark.one_of(each)}"

    def final(self, lark: Lark, text: str) -> str:
        """Return the body of a rule of an answer of this text, after reasoning or not."""
        return f"{_thought(lark)} {lark.text(FINAL)} {text}"


def _thought(lark: Lark) -> str:
    begins = lark.text(CHANNEL + "analysis" + MESSAGE)
    goes_on = lark.text(START + "assistant")
    return lark.rule(f"{begins} {lark.through('<|end|>')} {goes_on}") + "?"


HARMONY = Harmony("gpt-oss", CHANNEL, (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS))


class _Reader(StateReader):
    def __init__(self) -> None:
        super().__init__(self._header)
        self._kind = "content"
        self._began = False  # whether a message has begun

    def _header(self) -> bool:
        """Before a message: its channel, and the function that it is for."""
        head, mark, rest = self.held.partition(MESSAGE)
        if not mark:
            if self.ended and not self._looks_like_header(head):  # no channel at all: an answer of another form
                self.add("content", cut(head, (CHANNEL, START), not self.unfinished)[0])
            return False
        self.held = rest
        self._began = True
        self.state = self._message
        channel = _CHANNEL.search(head)
        if (to := _TO.search(head)) is not None:
            self._kind = "arguments"
            self.add("call", to[1])
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        return True

    def _looks_like_header(self, head: str) -> bool:
        return CHANNEL in head or START in head or (self._began and self.unfinished)

    def _message(self) -> bool:
        text, mark = self.until(*ENDS, START)
        self.add(self._kind, text)
        if mark is not None:
            self.state = self._header
        return mark is not None
