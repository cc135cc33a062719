"""MOEPACK_ISA: the most that compiled loops may use of a processor's instruction sets. Standard library only.

Each compiled library asks here when it is imported, and processes that it starts inherit the variable. What a processor
has is the libraries' to say (isa.h).
"""

from __future__ import annotations

import os

from .errors import InputError

VARIABLE = "MOEPACK_ISA"
LEVELS = ("plain", "avx2", "avx512", "avx512-vnni", "avx512-bf16", "amx")  # each has those before it; isa.h counts them


def bound(best: int) -> int:
    """The highest index into LEVELS that may be used where `best` is what there is: `best`, or what the variable asks.

    Raises:
        InputError: for a word that is no level, or a level above `best`.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return best
    here = ", ".join(LEVELS[: best + 1])
    if asked not in LEVELS:
        raise InputError(f"{VARIABLE}={asked}: there is no such level: the levels of this processor are {here}")
    if LEVELS.index(asked) > best:
        raise InputError(f"{VARIABLE}={asked}: this processor does not have it: its levels are {here}")
    return LEVELS.index(asked)
