"""Read divergences that `moepack eval --kl --json` printed, for the card of a bundle that is pushed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError
from moepack.pipeline.model_card import MeasuredKl

_MOST = 1 << 24  # bytes of a file


def read_divergences(paths: Iterable[Path], versions: Sequence[str]) -> dict[str, MeasuredKl]:
    """The divergence of each version that a file measured, by its name.

    Raises InputError for a file that is no such output, or one of a version that the bundle lacks.
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
        numbers = [found.get("kl"), *_pair(found.get("kl_interval"))]
        name = str(found.get("policy")).removeprefix("static:")
        if len(numbers) != 3 or not all(isinstance(x, float) and math.isfinite(x) for x in numbers):
            raise InputError(f"{path}: is not what moepack eval --kl --policy static:VERSION --json prints")
        if name not in versions:
            raise InputError(f"{path}: measures {name}, and the bundle has {', '.join(versions)}")
        out[name] = MeasuredKl(*numbers)
    return out


def _pair(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
