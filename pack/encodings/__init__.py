"""The encodings: every module of this folder names its own in ENCODINGS, from the most to the least precise.

A module describes sections and sizes with the standard library alone, so that naming a version imports no NumPy. The
code that reads and writes bytes is imported when it is first called.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from . import base


def found(paths: Iterable[str]) -> tuple[base.Version, ...]:
    """The encodings of all modules in these folders, by falling precision, released first, then by module."""
    names = sorted(m.name for m in pkgutil.iter_modules(paths))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    every = [e for m in modules for e in getattr(m, "ENCODINGS", ())]
    return tuple(sorted(every, key=lambda e: (-e.precision, not e.released)))


base.KNOWN = found(__path__)
