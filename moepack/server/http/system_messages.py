"""Give each system message of a conversation a place that the model's chat template shows.

Agents send several system messages, also behind others. Many templates show the first message of this kind alone: they
refuse later ones, or leave them out without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moepack.server.errors import bad

from .models import Object

_MARK = "system-text"  # a text that no template writes by itself
_USER = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}
_SYSTEM = {"role": "system", "content": _MARK}


@dataclass(frozen=True, slots=True)
class Places:
    """Where a chat template shows a system message."""

    first: bool = True  # before all other messages
    later: bool = True  # behind others


def places_of(render: Callable[[list[Object]], str]) -> Places:
    """Find the places by rendering two short conversations with `render`, which may raise anything."""

    def shows(messages: list[Object]) -> bool:
        try:
            return _MARK in render(messages)
        except Exception:  # a template is a program
            return False

    return Places(shows([_SYSTEM, _USER]), shows([_USER, _ANSWER, _SYSTEM, _USER]))


def check_single(messages: Sequence[Object], origins: Sequence[str]) -> None:
    """Refuse a system message that is not the first message. Raises ApiError with the message's origin."""
    for message, origin in list(zip(messages, origins, strict=True))[1:]:
        if message["role"] == "system":
            raise bad(origin, "only the first message may be of system or developer", "unsupported")


def joined(messages: Sequence[Object], places: Places) -> list[Object]:
    """Join the leading system messages into one, and give every system message a place that the template shows.

    Where the template shows none, the text becomes a paragraph of the user's message before it, or else of the next
    one, or else a user's message of its own, but never between calls of tools and their results.
    """
    lead = next((n for n, one in enumerate(messages) if one["role"] != "system"), len(messages))
    left = list(messages[lead:])
    if lead:
        left.insert(0, {**messages[0], "content": _paragraphs([one["content"] for one in messages[:lead]])})
    out: list[Object] = []
    waiting: list[str] = []  # texts without a place yet
    for n, one in enumerate(left):
        shown = places.later if n else places.first
        if one["role"] == "tool":  # results stay right behind their calls
            out.append(one)
        elif one["role"] != "system" or shown:
            if waiting and one["role"] == "user":
                one = {**one, "content": _paragraphs([*waiting, one["content"]])}
            elif waiting:
                out.append({"role": "user", "content": _paragraphs(waiting)})
            waiting = []
            out.append(one)
        elif out and out[-1]["role"] == "user":
            out[-1] = {**out[-1], "content": _paragraphs([out[-1]["content"], one["content"]])}
        else:
            waiting.append(one["content"])
    if waiting:
        out.append({"role": "user", "content": _paragraphs(waiting)})
    return out


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, texts))
