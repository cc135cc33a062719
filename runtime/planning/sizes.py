"""Read sizes (24GiB, 1.5g, 4096) and bounds on a token (50ms, 2GB)."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from dataclasses import dataclass
from numbers import Real
from typing import SupportsIndex

from moepack.pack.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

# A size in bytes, as it stands in an error, and not a count of tokens or experts.
_BYTES = re.compile(
    r"(at most )?(?<![\w/.:,-])(\d{4,}|\d{1,3}(?:,\d{3})+(?= bytes))(?: bytes)?"
    r"(?![\w/.,-]*[\w/]|,\d| (?:cached )?(?:tokens?|sequences?|experts?|layers?))"
)


class Size(int):
    """Bytes, and how the user wrote them."""

    text: str

    def __new__(cls, size: int, text: str = "") -> Size:
        """Make it of a number."""
        made = super().__new__(cls, size)
        made.text = text
        return made


def parse_size(size: str | float | SupportsIndex | None) -> int | None:
    """Return the bytes of a size such as "24GiB"; a number counts bytes. Raises InputError for an invalid size."""
    if size is None:
        return None
    if isinstance(size, Real | SupportsIndex) and not isinstance(size, bool):
        with contextlib.suppress(ArithmeticError, RuntimeError, TypeError, ValueError):
            if isinstance(size, Real):
                whole = size if isinstance(size, int) else int(size)
                exact = whole == size
            else:
                whole = operator.index(size)
                exact = True
            if exact and whole >= 0:
                return whole
    text = size if isinstance(size, str) else ""
    number = text.strip().lower().removesuffix("b")
    unit = number.lstrip("0123456789.")
    try:
        return Size(int(float(number[: len(number) - len(unit)]) * _UNITS[unit.strip()]), text)
    except (KeyError, ValueError, OverflowError):
        raise InputError(f"size {size!r} is not a number of bytes, nor one with KB, MiB, GB ... after it") from None


def in_unit(text: str, like: str | int | None) -> str:
    """Return a text in which sizes are in the unit of the user's own, `like`; bytes stay where that is a number.

    Sizes are rounded up to three digits, so that they suffice, and down behind "at most".
    """
    written = like.text if isinstance(like, Size) else str(like or "")
    found = re.search(r"(?<=[\d\s.])([kmgt]i?)b?\s*$", written, re.IGNORECASE)
    if found is None:
        return text
    unit = found[0].strip()
    bytes_of = _UNITS[found[1].lower()]

    def shown(number: re.Match[str]) -> str:
        size = int(number[2].replace(",", ""))
        places = 2 - min(0, math.floor(math.log10(size / bytes_of)))
        down, rest = divmod(size * 10**places, bytes_of)
        rounded = (down + (rest > 0 and number[1] is None)) / 10**places
        return f"{number[1] or ''}{rounded:.{places}f}".rstrip("0").rstrip(".") + unit

    return _BYTES.sub(shown, text)


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that decoding a token may take, in seconds or in bytes read; `text` is what the user wrote."""

    text: str
    seconds: float = math.inf
    bytes: float = math.inf


def parse_bound(text: str | int | None) -> Bound | None:
    """Read a bound on a token: a time (`50ms`, `0.2s`, `800us`), or bytes a token (`2GB`, or a number).

    Raises:
        InputError: for anything else, or a bound that is not above 0.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d*\.?\d+(?:e-?\d+)?)\s*(us|ms|s)", str(text).strip().lower())
    try:
        if found:
            bound = Bound(str(text), seconds=float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]])
        else:
            bound = Bound(str(text), bytes=float(parse_size(text) or 0))
    except (InputError, OverflowError):
        raise InputError(f"--max-tpot {text!r} is not a time such as 50ms, nor bytes a token such as 2GB") from None
    if not min(bound.seconds, bound.bytes) > 0:
        raise InputError(f"--max-tpot {text!r} leaves no time at all")
    return bound
