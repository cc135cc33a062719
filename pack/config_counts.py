"""Refuse a config.json with numbers that no model has: transformers would work on them for hours.

transformers makes a dictionary of all labels and a list of all layers while it reads the file, and buffers of all
columns for a model without weights.
"""

from __future__ import annotations

import re

from .errors import InputError
from .spec import MAX_DIM, MAX_LAYERS

MAX_LABELS = 1 << 16
_MOST = (
    (re.compile(r"num_labels"), MAX_LABELS),
    (re.compile(r"(num|n)_(\w+_)?(layers?|blocks?)|(\w+_)?depths?"), MAX_LAYERS),
    # Except totals of parameters, tokens and steps: transformers allocates nothing by them.
    (
        re.compile(
            r"(?!total_size$|\w*_(params|parameters|tokens|steps)$)"
            r"((num|n|d)_\w+|(\w+_)?(dims?|size|rank|heads|experts))"
        ),
        MAX_DIM,
    ),
)


def check_counts(where: str, document: object) -> None:
    """Check the counts of labels, layers and columns in a configuration and in nested ones, and `sliding_window`.

    A wrong window would otherwise fail in the first pass. Raises InputError, which names the key.
    """
    if isinstance(document, dict) and "sliding_window" in document:
        window = document["sliding_window"]
        kinds = document.get("layer_types")
        slides = isinstance(kinds, list) and "sliding_attention" in kinds
        if slides and not (type(window) is int and window > 0):
            raise InputError(f"{where} has sliding_window {str(window)[:40]}, and layers whose attention slides")
    for key, value in document.items() if isinstance(document, dict) else ():
        if isinstance(value, dict):
            check_counts(where, value)
            continue
        most = next((most for names, most in _MOST if names.fullmatch(key)), None)
        for number in value if isinstance(value, list) else [value]:
            if most is not None and isinstance(number, int) and number > most:
                raise InputError(f"{where} has {key} {str(number)[:40]}: {most} is the most")
