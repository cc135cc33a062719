"""Token ids of documents, in time that is linear in their length, and memory that does not grow with it.

A tokenizer keeps much of every token of a text (1.6 GB for 10 MB of prose; in parts 31 MB), and some take time that
grows faster than the text. So a long one is cut first, where that changes nothing: at white space, and only where the
ids of the text around the cut are those of its left side followed by those of its right side. What a tokenizer does
with a word may then depend on AROUND characters on either side of it, and on no more; a text without such a place stays
whole. Decides nothing about windows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from moepack.pack.errors import InputError

from .documents import Conversation, documents

PART = 1 << 14  # characters of a part, about
AROUND = 256  # characters on each side of a cut that its check looks at
TRIES = 8  # places tried before a part grows by another PART
# Between two words; after a line; before the stop of a language that has no spaces.
_PLACES = re.compile(r"(?<=\S) (?=\S)|(?<=\n)(?=\S)|(?<=\w)(?=。)")

Encode = Callable[[str], list[int]]


class Encoder:
    """A tokenizer, and what it puts around a document.

    Attributes:
        begin: ids that a document begins with: those that the tokenizer adds by itself, as many add a BOS.
        end: the end-of-text token, where the tokenizer has one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        bare, full = self.encode("a"), list(tokenizer("a", verbose=False)["input_ids"])
        places = (i for i in range(len(full)) if bare and full[i : i + len(bare)] == bare)
        self.begin = full[: next(places, 0)]

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def stream(self, source: str) -> Iterator[tuple[int, list[int]]]:
        """The ids of a source part by part, each with the number of its document among those that are not empty.

        A document is `begin`, its own ids, and `end`. Of a chat, the template says how it begins and ends: what it
        wrote already is not written again.
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
            raise InputError(f"{source}: holds text that is no Unicode: half a pair of surrogates") from None
        yield begin
        yield from map(self.encode, parts(text, self.encode))
        yield end

    def _chat(self, chat: Conversation, source: str) -> str:
        """A chat as the model's template writes it.

        Raises:
            InputError: without a template, or where it does not take this chat, or leaves out its tool calls.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise InputError(
                f"{source}: holds chats, and this model's tokenizer has no chat template: give text, or put the "
                "template into the model's directory as chat_template.jinja"
            )
        try:
            text = str(self._tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False))
        except Exception as error:  # whatever a template raises
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{source}: the chat template does not take a chat: {what}") from None
        for name in _called(chat):
            if name not in text:
                raise InputError(
                    f"{source}: the chat template leaves out tool calls (here of {name!r}): leave such chats out"
                )
        return text


def _called(chat: Conversation) -> Iterator[str]:
    """Names of the functions that a chat's messages call."""
    for message in chat.messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                yield function["name"]


def parts(text: str, encode: Encode, size: int = PART, around: int = AROUND) -> Iterator[str]:
    """A text in parts of about `size` characters whose ids, one after another, are those of the whole.

    A space between two parts is dropped where the tokenizer puts one before every text by itself.
    """
    start = 0
    while (cut := _cut(text, start, encode, size, around)) is not None:
        yield text[start : cut[0]]
        start = cut[1]
    yield text[start:]


def _cut(text: str, start: int, encode: Encode, size: int, around: int) -> tuple[int, int] | None:
    """Where the part from `start` on ends and the next begins; None where it goes to the end of the text."""
    for least in range(start + size, len(text), size):
        for tried, place in enumerate(_PLACES.finditer(text, least, min(least + size, len(text)))):
            if tried == TRIES:
                break
            at = place.start()
            low, high = max(start, at - around), at + around
            whole = encode(text[low:high])
            for begin in (at, place.end()) if place.group() else (at,):
                if encode(text[low:at]) + encode(text[begin:high]) == whole:
                    return at, begin
    return None
