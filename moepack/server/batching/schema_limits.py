"""Refuse schemas whose grammar could take long, by their size alone and before any grammar is made.

Limits are far above what functions need, and below what took 50 ms to refuse when it was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from moepack.server.errors import ApiError, bad

# of all schemas of a request together: levels, values, named fields
DEPTH = 48
VALUES = 4000
FIELDS = 500
TEXT = 64 << 10  # characters in names and values
# characters of a pattern, and with its counts written out
PATTERN = 500
WRITTEN = 2000
# of a number, which 64 bits hold, and of one that numbers are to be multiples of
LARGEST = 10**19
MULTIPLE = 10**5
MERGED = 256  # parts of all `allOf` times choices of all `anyOf` and `oneOf`, which their grammar multiplies
# What llguidance may spend on one grammar and on one mask: a fifth of its defaults, some 10 ms each.
FUEL: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d*),?(\d*)\}|.", re.DOTALL)
_WORDS = ("description", "title", "$comment", "examples", "default")  # keys whose values no grammar has


def check_schemas(param: str, schemas: Iterable[dict[str, object]]) -> None:
    """Refuse schemas that are together too large. Raises ApiError."""
    values = 0
    fields = 0
    text = 0
    parts = 0
    choices = 0
    left: list[tuple[object, int]] = [(schema, 1) for schema in schemas]
    while left:
        one, depth = left.pop()
        values += 1
        if values > VALUES or depth > DEPTH:
            raise _too_large(param, f"more than {VALUES:,} values or {DEPTH} levels")
        if isinstance(one, dict):
            inner = one.get("properties")
            fields += len(inner) if isinstance(inner, dict) else 0
            text += sum(map(len, one))
            named = one.get("patternProperties")
            for pattern in (one.get("pattern"), *(named if isinstance(named, dict) else ())):
                if isinstance(pattern, str) and (len(pattern) > PATTERN or _written(pattern) > WRITTEN):
                    raise _too_large(param, f"a pattern of more than {PATTERN} letters, or {WRITTEN:,} with its counts")
            if not str(one.get("$ref", "#")).startswith("#"):
                raise _too_large(param, "a $ref to elsewhere")
            parts += _length(one.get("allOf"))
            choices += _length(one.get("anyOf")) + _length(one.get("oneOf"))
            multiple = one.get("multipleOf")
            if isinstance(multiple, int | float) and multiple > MULTIPLE:
                raise _too_large(param, f"a multiple of more than {MULTIPLE:,}")
            left += [(value, depth + 1) for name, value in one.items() if not _is_word(name, value)]
        elif isinstance(one, list):
            left += [(value, depth + 1) for value in one]
        elif isinstance(one, str):
            text += len(one)
        elif isinstance(one, int | float) and not -LARGEST <= one <= LARGEST:
            raise _too_large(param, f"a number beyond {LARGEST:.0e}")
        if fields > FIELDS or text > TEXT or parts * choices > MERGED:
            raise _too_large(param, f"more than {FIELDS} fields, {TEXT >> 10} KiB of text, or {MERGED} merged choices")


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) and len(value) > 1 else 0


def _is_word(name: str, value: object) -> bool:
    """Whether a key only explains; a field may be called so too, but its schema is an object."""
    return name in _WORDS and not isinstance(value, dict)


def _written(pattern: str) -> int:
    """Count a pattern's letters as if its counts were written out: (ab{3}){2} has 8."""
    # of the open groups, and of what a count would repeat
    sums = [0]
    last = 0
    for piece in _PIECE.finditer(pattern):
        if piece[0] == "(":
            sums.append(0)
        elif piece[0] == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif piece[1] is not None:
            times = max(1, *(int(n or 0) for n in piece.groups()))
            sums[-1] += last * (times - 1)
            last *= times
        elif piece[0] not in "?*+":
            last = 1
            sums[-1] += 1
    return sum(sums)


def _too_large(param: str, what: str) -> ApiError:
    return bad(param, f"this schema cannot be kept to: it has {what}")
