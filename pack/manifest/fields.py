"""Reading single fields of a manifest, and collecting what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..errors import Kind, Problem
from . import MANIFEST, MAX_PATH


class Checker:
    """Collects problems while fields are read; a wrong field gives a default so that the rest is still checked."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def wrong(self, where: str, kind: Kind, message: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(f"{MANIFEST}: {where}", kind, message))

    def integer(self, where: str, value: Any, low: int, high: int) -> int:
        """An integer within bounds; the lower where it is none."""
        if type(value) is int and low <= value <= high:
            return value
        self.wrong(where, "range", f"not an integer from {low} to {high}: {show(value)}")
        return low

    def text(self, where: str, value: Any, allowed: Sequence[str] | None = None) -> str:
        """A string, of those allowed."""
        if isinstance(value, str) and (allowed is None or value in allowed):
            return value
        self.wrong(where, "value", f"not {'one of ' + ', '.join(allowed) if allowed else 'a string'}: {show(value)}")
        return allowed[0] if allowed else ""

    def matching(self, where: str, value: Any, pattern: re.Pattern[str], what: str) -> str:
        """A string that matches wholly; nothing where it does not."""
        if isinstance(value, str) and len(value) <= MAX_PATH and pattern.fullmatch(value):
            return value
        self.wrong(where, "text", f"not {what}: {show(value)}")
        return ""

    def line(self, where: str, value: Any) -> str:
        """Words that a report shows."""
        if isinstance(value, str) and 0 < len(value) <= MAX_PATH and value.isprintable():
            return value
        self.wrong(where, "text", f"not a line of 1 to {MAX_PATH} characters that are printed: {show(value)}")
        return ""

    def items(self, where: str, value: Any, most: int) -> list[Any]:
        """A list of at most so many; an empty one where it is none."""
        if isinstance(value, list) and len(value) <= most:
            return value
        self.wrong(where, "type", f"not a list of at most {most}: {show(value)}")
        return []

    def object(self, where: str, value: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """An object that has exactly these keys, if any are given; an empty one where it is none."""
        if not isinstance(value, dict):
            self.wrong(where, "type", f"not an object: {show(value)}")
            return {}
        if keys is not None and set(value) != set(keys):
            self.wrong(where, "keys", f"has keys {show(sorted(value))}, not {show(sorted(keys))}")
        return value


def show(value: Any) -> str:
    """A value in a message: its JSON, or how that begins."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:197] + "..."
