"""Sizes as people write them, 24GiB, 1.5g, 4096, and bounds on a token: 50ms, 2GB."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from moepack.pack.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(size: str | int | None) -> int | None:
    """Bytes of a size; a number is one of bytes.

    Raises:
        InputError: for what is none.
    """
    if size is None:
        return None
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    text = size if isinstance(size, str) else ""
    number = text.strip().lower().removesuffix("b")
    unit = number.lstrip("0123456789.")
    try:
        return int(float(number[: len(number) - len(unit)]) * _UNITS[unit.strip()])
    except (KeyError, ValueError):
        raise InputError(f"size {size!r} is not a number of bytes, nor one with KB, MiB, GB ... after it") from None


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that decoding a token may take: seconds, or bytes that it reads.

    Attributes:
        text: as it was asked for.
    """

    text: str
    seconds: float = math.inf
    bytes: float = math.inf


def parse_bound(text: str | int | None) -> Bound | None:
    """A time, `50ms`, `0.2s`, `800us`; or bytes a token, `2GB`, or a number of them.

    Raises:
        InputError: for what is none, or is not above 0.
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
        raise InputError(f"max_tpot {text!r} is not a time such as 50ms, nor bytes a token such as 2GB") from None
    if not min(bound.seconds, bound.bytes) > 0:
        raise InputError(f"max_tpot {text!r} leaves no time at all")
    return bound


def read_tier(rate: str | int | None, threads: int | None) -> tuple[int | None, int | None]:
    """The host tier's bytes a second and threads.

    Raises:
        InputError: for a rate or a number of threads below one.
    """
    read = parse_size(rate)
    if read == 0:
        raise InputError("host_rate is from 1 byte a second; without it there is no limit")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise InputError(f"host_threads is a whole number from 1, not {threads!r}")
    return read, threads
