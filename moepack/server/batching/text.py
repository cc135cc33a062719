"""Tokens to text, piece by piece: no half characters, and no part of a stop string. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # tokens before a piece that may change how it reads (a space that a word begins with)
LONGEST = 64  # tokens that wait for the rest of a character: of four bytes, it has long come if it will come
BROKEN = "\ufffd"


class Pieces:
    """The text of a sequence's tokens as they come."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT:])
        if decode(self._tokens).endswith(BROKEN):
            self._tokens = []
        self._from, self._read = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """The text that a token completes; "" while a character is not whole."""
        self._tokens.append(token)
        return self._piece(len(self._tokens) - self._read > LONGEST)

    def end(self) -> str:
        """What is left, half characters as U+FFFD."""
        return self._piece(True)

    def _piece(self, whatever: bool) -> str:
        before = self._decode(self._tokens[self._from : self._read])
        now = self._decode(self._tokens[self._from :])
        if len(now) <= len(before) or (now.endswith(BROKEN) and not whatever):
            return ""
        self._tokens = self._tokens[self._read :]  # what was read last is the context of the next
        self._from, self._read = 0, len(self._tokens)
        return now[len(before) :]


class Stops:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string came: then it ends before the first that was complete, which
        is the same however the text comes in pieces."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)[1]], ""
            return shown, True
        keep = self._longest_beginning()
        at = len(self._held) - keep
        shown, self._held = self._held[:at], self._held[at:]
        return shown, False

    def _longest_beginning(self) -> int:
        """Characters at the end that begin a stop string."""
        most = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops if len(stop) > size):
                return size
        return 0

    def end(self) -> str:
        """What was held back: no more comes."""
        shown, self._held = self._held, ""
        return shown
