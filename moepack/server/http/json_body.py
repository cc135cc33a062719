"""Read a body as JSON. One that is very large, or whose numbers no float holds, is refused before that."""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from moepack.server.errors import ApiError

# The most of a body that texts do not hold, so that reading it takes under 50 ms: commas, lists and objects, strings.
COMMAS, NESTED, STRINGS = 150_000, 50_000, 100_000
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_values(raw: bytes | bytearray) -> None:
    """Refuse a body, or as much of it as there is, that has very many values. Raises ApiError."""
    if _is_large(raw) and (  # texts may hold as many signs; without them the count is exact
        raw.count(b'"') - raw.count(b'\\"') > 2 * STRINGS or _is_large(_STRING.sub(b"", raw))
    ):
        raise ApiError(400, f"the body has more than {COMMAS:,} values, or {NESTED:,} objects and lists")


def parse_json(raw: bytes) -> dict[str, object]:
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
