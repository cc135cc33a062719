"""JSON with one meaning: UTF-8, no name twice in an object, no floating-point numbers, no NaN.

Of two equal names Python's parser takes the last, others the first: a check and a user could see different values.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

JsonObject = dict[str, Any]  # an object of JSON or YAML, its values not checked


def loads(data: bytes) -> Any:
    """Parse a document. Raises a one-line ValueError for one that breaks these rules or is nested too deeply."""
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_float=_refuse_float, parse_constant=_refuse_float
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return out


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:40]} is not an integer")
