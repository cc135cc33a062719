"""Check a request's fields one by one; an unknown or unsupported field is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from moepack.server.errors import ApiError, bad


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises:
        ApiError: for any other body.
    """
    try:
        value = json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class Fields:
    """A request's fields. Each is taken once; `end` refuses the rest. null means absent."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._left = {name: value for name, value in given.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """Take a field unchecked."""
        return self._left.pop(name, default)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Take a finite number within bounds, inclusive."""
        value = self.take(name, default)
        if type(value) not in (int, float) or not _finite(value):
            raise bad(name, "is to be a number")
        if not least <= value <= most:
            raise bad(name, f"is to be from {least:g} to {most:g}, not {value:g}")
        return float(value)

    def whole(self, name: str, default: int | None, least: int, most: int = 1 << 31) -> int | None:
        """Take an integer within bounds, inclusive."""
        value = self.take(name, default)
        if value is None or value is default:
            return default
        if type(value) is not int:
            raise bad(name, "is to be a whole number")
        if not least <= value <= most:
            raise bad(name, f"is to be from {least} to {most}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Take a boolean."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise bad(name, "is to be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Take a string."""
        value = self.take(name, default)
        if value is not None and not isinstance(value, str):
            raise bad(name, "is to be a string")
        return value

    def record(self, name: str) -> dict[str, Any] | None:
        """Take an object."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise bad(name, "is to be an object")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Take a field that must have one of these values."""
        value = self.take(name)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            shown = " or ".join(json.dumps(a) for a in allowed)
            raise bad(name, f"is not served{f' but as {shown}' if allowed else ''}", "unsupported")

    def end(self) -> None:
        """Refuse fields that were not taken."""
        if self._left:
            raise bad(min(self._left), "is not served here", "unsupported")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
