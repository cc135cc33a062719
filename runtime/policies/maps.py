"""Maps of versions that never change, made of a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.runtime.allocation.knapsack import uniform

from .contract import Versions

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle


def static_map(bundle: Bundle, argument: str, room: int | None = None) -> Versions:
    """Make the map of `static:ARGUMENT`. The map does not depend on `room`.

    The argument is a version's name; a JSON file {"versions": [[name, ...], ...]}; "allocation", the map in the
    bundle's manifest; or nothing, for the most precise version here.

    Raises:
        InputError: when a version is not in the bundle, or a map does not fit it.
    """
    present = [v.name for v in bundle.versions]
    here = ", ".join(present)
    if argument == "allocation":
        if bundle.manifest.allocation is None:
            raise InputError(f"{bundle.path}: its manifest holds no allocation: name a version or a file")
        where = f"{bundle.path}: allocation"
        table = bundle.manifest.allocation.versions
    elif argument.endswith(".json"):
        where = argument
        table = _read_map(argument)
    else:
        name = argument or present[0]
        if name not in present:
            raise InputError(f"{bundle.path}: has no version {name!r}: here are {here}")
        return tuple((name,) * layer.experts for layer in bundle.layers)
    if len(table) != len(bundle.layers):
        raise InputError(f"{where}: has {len(table)} layers, the bundle {len(bundle.layers)} with experts")
    for row, layer in zip(table, bundle.layers, strict=True):
        if len(row) != layer.experts:
            raise InputError(f"{where}: layer {layer.index} has {layer.experts} experts, the map {len(row)}")
        for name in row:
            if name not in present:
                raise InputError(f"{where}: layer {layer.index}: no version {name!r}: here are {here}")
    return table


def _read_map(file: str) -> Versions:
    try:
        return tuple(tuple(str(name) for name in row) for row in json.loads(Path(file).read_text())["versions"])
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f'{file}: is not {{"versions": [[name, ...], ...]}}, one list a layer') from None


def uniform_map(bundle: Bundle, room: int) -> Versions:
    """Make the map of versions that fits `room` bytes.

    Raises:
        BudgetError: when the smallest versions do not fit.
    """
    sizes = [
        [v.resident_size(layer.matrices) for v in bundle.versions]
        for layer in bundle.layers
        for _ in range(layer.experts)
    ]
    chosen = iter(uniform(sizes, room))
    return tuple(tuple(bundle.versions[next(chosen)].name for _ in range(x.experts)) for x in bundle.layers)
