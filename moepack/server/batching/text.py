"""Turn tokens into text piece by piece, without half characters or parts of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # tokens before a piece that are decoded with it: they may change its text (the space before a word)
LONGEST = 64  # the most tokens held back while a character is incomplete; a character has at most four bytes
BROKEN = "\ufffd"


class Pieces:
    """Decode a sequence's tokens as they arrive."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT:])
        if decode(self._tokens).endswith(BROKEN):
            self._tokens = []
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        """Return the text that a token completes; "" while a character is incomplete."""
        self._tokens.append(token)
        return self._piece(len(self._tokens) - self._read > LONGEST)

    def end(self) -> str:
        """Return the text that is still held back, with U+FFFD for an incomplete character."""
        return self._piece(True)

    def _piece(self, broken: bool) -> str:
        before = self._decode(self._tokens[: self._read])
        now = self._decode(self._tokens)
        if len(now) <= len(before) or (now.endswith(BROKEN) and not broken):
            return ""
        self._tokens = self._tokens[self._read :]  # these tokens are the context of the next piece
        self._read = len(self._tokens)
        return now[len(before) :]


class Stops:
    """Hold text back while it may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None  # the stop string that came

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text to show, and whether a stop string came.

        The text ends before the stop string that is complete first, however tokens split the string."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at = min(found)
            shown = self._held[:at]
            self.found = self._held[at:end]
            self._held = ""
            return shown, True
        most = max((len(stop) for stop in self._stops), default=1) - 1
        ends = range(max(0, len(self._held) - most), len(self._held))  # where the text that is held back may begin
        at = next((i for i in ends if any(stop.startswith(self._held[i:]) for stop in self._stops)), len(self._held))
        shown = self._held[:at]
        self._held = self._held[at:]
        return shown, False

    def end(self) -> str:
        """Return what was held back, at the end of the answer."""
        shown = self._held
        self._held = ""
        return shown
