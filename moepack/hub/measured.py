"""Read divergences that `moepack eval --kl --json` printed, for the card of a bundle that is pushed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError
from moepack.pipeline.model_card import MeasuredKl

_MOST = 1 << 24  # bytes of a file
_LARGEST = 1e6  # nats a token; the logarithm of a vocabulary is some 12


def read_divergences(paths: Iterable[Path], versions: Sequence[str]) -> dict[str, MeasuredKl]:
    """The divergence of each version that a file measured, by its name.

    Raises InputError for a file that is no such output, or one of a version that the bundle lacks or
    another file measured.
    """
    out: dict[str, MeasuredKl] = {}
    for path in paths:
        try:
            with path.open(encoding="utf-8") as f:
                found = json.loads(f.read(_MOST))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise InputError(f"{path}: is not JSON") from None
        found = found if isinstance(found, dict) else {}
        measured = _measured(found.get("kl"), found.get("kl_interval"))
        if measured is None or not isinstance(found.get("policy"), str):
            what = "moepack eval --kl --policy static:VERSION --json prints of two samples or more"
            raise InputError(f"{path}: is not what {what}")
        name = found["policy"].removeprefix("static:")
        if name not in versions:
            raise InputError(f"{path}: measures {name}, and the bundle has {', '.join(versions)}")
        if name in out:
            raise InputError(f"{path}: measures {name}, as another file does: name one of them")
        out[name] = measured
    return out


def _measured(kl: object, interval: object) -> MeasuredKl | None:
    """A mean inside its interval. Of one sample the interval is infinite."""
    numbers: list[Any] = [kl, *interval] if isinstance(interval, list) else []
    if len(numbers) != 3 or not all(isinstance(x, float) and abs(x) < _LARGEST for x in numbers):
        return None
    made = MeasuredKl(*numbers)
    return made if made.low <= made.kl <= made.high else None
