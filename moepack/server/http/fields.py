"""Check a request's fields one by one. An unknown or unsupported field is refused by name."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn, TypeVar

from moepack.server.errors import ApiError, bad

Kind = TypeVar("Kind")


# The most of a body that texts do not hold, so that reading it takes under 50 ms: commas, lists and objects, strings.
COMMAS, NESTED, STRINGS = 150_000, 50_000, 100_000
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_values(raw: bytes | bytearray) -> None:
    """Refuse a body, or as much of it as there is, that has very many values. Raises ApiError."""
    if _is_large(raw) and (  # texts may hold as many signs; without them the count is exact
        raw.count(b'"') - raw.count(b'\\"') > 2 * STRINGS or _is_large(_STRING.sub(b"", raw))
    ):
        raise ApiError(400, f"the body has more than {COMMAS:,} values, or {NESTED:,} objects and lists")


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Any other body is an ApiError."""
    try:
        value = json.loads(raw.decode(), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


def _is_large(raw: bytes | bytearray) -> bool:
    return raw.count(b",") > COMMAS or raw.count(b"{") + raw.count(b"[") > NESTED


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text[:32])


class Fields:
    """A JSON object's fields. Each is taken once; `end` refuses those not taken. A null counts as absent."""

    def __init__(self, given: dict[str, Any], where: str = "") -> None:
        """Hold the fields of `given`. `where` is the path before their names in errors, such as `messages[0].`."""
        self._left = {name: value for name, value in given.items() if value is not None}
        self._where = where

    def inside(self, name: str) -> Fields | None:
        """Take an object as fields of its own; None if it is absent."""
        given = self.record(name)
        return None if given is None else type(self)(given, f"{self._where}{name}.")

    def take(self, name: str) -> Any:
        """Take a field unchecked; None if it is absent."""
        return self._left.pop(name, None)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Take a finite number within bounds, inclusive."""
        if (value := self.take(name)) is None:
            return default
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise bad(self._where + name, "must be a number")
        if not least <= value <= most:
            raise bad(self._where + name, f"must be from {least:g} to {most:g}, not {value:g}")
        return float(value)

    def whole(self, name: str, default: int | None, least: int, most: int = 1 << 31) -> int | None:
        """Take an integer within bounds, inclusive."""
        if (value := self.take(name)) is None:
            return default
        if type(value) is not int:
            raise bad(self._where + name, "must be a whole number")
        if not least <= value <= most:
            raise bad(self._where + name, f"must be from {least} to {most}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Take a boolean."""
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """Take a string."""
        return self._typed(name, str, "a string")

    def record(self, name: str) -> dict[str, Any] | None:
        """Take an object."""
        return self._typed(name, dict, "an object")

    def _typed(self, name: str, kind: type[Kind], described: str) -> Kind | None:
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise bad(self._where + name, f"must be {described}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Take a field that must be absent or have one of these values."""
        value = self.take(name)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            shown = " or ".join(json.dumps(a) for a in allowed)
            raise bad(
                self._where + name, f"only {shown} is supported" if allowed else "is not supported", "unsupported"
            )

    def end(self) -> None:
        """Refuse fields that were not taken."""
        if self._left:
            raise bad(self._where + min(self._left), "is not supported", "unsupported")
