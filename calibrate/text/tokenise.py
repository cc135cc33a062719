"""Tokenise documents in linear time and constant memory.

A tokenizer keeps data for each token of a text (1.6 GB for 10 MB of prose; in parts 31 MB), and some need more than
linear time. So long texts are cut where this does not change the ids: at white space, if the text around the cut has
the ids of its left side followed by those of its right side. This assumes that a word's ids depend on at most AROUND
characters on either side. A text without a place to cut stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError

from .documents import Conversation, documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PART = 1 << 14  # characters of a part, about
AROUND = 256  # characters checked on each side of a cut
TRIES = 8  # places tried before a part grows by another PART
# Between two words, after a line, or before the full stop of a language without spaces.
_PLACES = re.compile(r"(?<=\S) (?=\S)|(?<=\n)(?=\S)|(?<=\w)(?=。)")

Encode = Callable[[str], list[int]]


class Encoder:
    """A tokenizer, and the ids that it puts around a document."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # The end-of-text token, if any, and the ids that the tokenizer adds before a text, such as BOS.
        self.end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        bare = self.encode("a")
        full = list(tokenizer("a", verbose=False)["input_ids"])
        places = (i for i in range(len(full)) if bare and full[i : i + len(bare)] == bare)
        self.begin = full[: next(places, 0)]

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def stream(self, source: str) -> Iterator[tuple[int, list[int]]]:
        """Yield the ids of a source part by part, each with its document's number; empty documents are not counted.

        A document is `begin`, its own ids, and `end`; a chat goes without those that its template has written itself.
        """
        number = 0
        for document in documents(source):
            if isinstance(document, str):
                if document:
                    yield from ((number, ids) for ids in self._parts(source, document, self.begin, self.end))
                    number += 1
            elif document.messages:
                text = self._chat(document, source)
                begin = [] if self.encode(text[:AROUND])[: len(self.begin)] == self.begin else self.begin
                stop = getattr(self._tokenizer, "eos_token", None)
                end = [] if stop and text.rstrip().endswith(stop) else self.end
                yield from ((number, ids) for ids in self._parts(source, text, begin, end))
                number += 1

    def _parts(self, source: str, text: str, begin: list[int], end: list[int]) -> Iterator[list[int]]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{source}: holds text that is not Unicode: half a pair of surrogates") from None
        yield begin
        yield from map(self.encode, parts(text, self.encode))
        yield end

    def _chat(self, chat: Conversation, source: str) -> str:
        """Render a chat. Raises InputError without a template, or if this refuses the chat or omits its tool calls."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise InputError(
                f"{source}: holds chats, and this model's tokenizer has no chat template: give text, or put the "
                "template into the model's directory as chat_template.jinja"
            )
        try:
            text = str(self._tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False))
        except Exception as error:  # templates are programs and may raise anything
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{source}: the chat template does not take a chat: {what}") from None
        for name in _called(chat):
            if name not in text:
                raise InputError(
                    f"{source}: the chat template leaves out tool calls (here of {name!r}): leave such chats out"
                )
        return text


def _called(chat: Conversation) -> Iterator[str]:
    for message in chat.messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                yield function["name"]


def parts(text: str, encode: Encode, size: int = PART, around: int = AROUND) -> Iterator[str]:
    """Cut a text into parts of about `size` characters whose ids, joined, are the ids of the whole.

    A space between two parts is dropped if the tokenizer adds one before every text.
    """
    start = 0
    while (cut := _cut(text, start, encode, size, around)) is not None:
        yield text[start : cut[0]]
        start = cut[1]
    yield text[start:]


def _cut(text: str, start: int, encode: Encode, size: int, around: int) -> tuple[int, int] | None:
    """Find the end of the part that begins at `start`, and the beginning of the next; None for the last part."""
    for least in range(start + size, len(text), size):
        for tried, place in enumerate(_PLACES.finditer(text, least, min(least + size, len(text)))):
            if tried == TRIES:
                break
            at = place.start()
            low = max(start, at - around)
            high = at + around
            whole = encode(text[low:high])
            for begin in (at, place.end()) if place.group() else (at,):
                if encode(text[low:at]) + encode(text[begin:high]) == whole:
                    return at, begin
    return None
