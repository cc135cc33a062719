"""Reasoning that a model writes between `<think>` and `</think>` before its answer."""

from __future__ import annotations

from .parts import AnswerReader, LeavingReader

OPEN = "<think>"
CLOSE = "</think>"


class Thinking(LeavingReader):
    """A reader that takes reasoning off an answer's beginning, and leaves the rest to another reader."""

    def __init__(self, inner: AnswerReader, opened: bool) -> None:
        """Read an answer; `opened` says that its prompt ends with the opening tag."""
        super().__init__(self._reasoning if opened else self._begin, inner)
        self._began = False

    def _begin(self) -> bool:
        text = self.held.lstrip()
        if text.startswith(OPEN):
            self.held = text[len(OPEN) :]
            self.state = self._reasoning
        elif OPEN.startswith(text) and (not self.ended or (text and self.unfinished)):
            return False
        else:
            self.state = self.rest
        return True

    def _reasoning(self) -> bool:
        text, mark = self.until(CLOSE)
        if not self._began:
            text = text.lstrip()
            self._began = bool(text)
        kept = text.rstrip()
        self.add("reasoning", kept)
        if mark is None:
            if not self.ended:  # white space waits: it is dropped before the closing tag
                self.held = text[len(kept) :] + self.held
            return False
        self.state = self._gap
        return True

    def _gap(self) -> bool:
        """Line breaks between reasoning and answer belong to neither."""
        self.held = self.held.lstrip("\n")
        if self.held:
            self.state = self.rest
        return bool(self.held)
