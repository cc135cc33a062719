"""`static`: a map that never changes: one version, a file, or the allocation in the bundle's manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError

from .contract import Entry, Versions

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle


def static_map(bundle: Bundle, argument: str) -> Versions:
    """The version of every expert under `static:ARGUMENT`.

    Args:
        bundle: for its versions, its layers and its allocation.
        argument: a version's name; a JSON file {"versions": [[name, ...], ...]}; "allocation", the map in the bundle's
            manifest; or nothing: the most precise version that is here.

    Raises:
        InputError: when a version is not in the bundle, or a map does not fit it.
    """
    present = [v.name for v in bundle.versions]
    if argument == "allocation":
        if bundle.manifest.allocation is None:
            raise InputError(f"{bundle.path}: its manifest holds no allocation: name a version or a file")
        return _checked(bundle, bundle.manifest.allocation.versions, f"{bundle.path}: allocation")
    if argument.endswith(".json"):
        try:
            table = json.loads(Path(argument).read_text())["versions"]
            rows = tuple(tuple(str(name) for name in row) for row in table)
        except OSError as error:
            raise InputError(f"{argument}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f'{argument}: is not {{"versions": [[name, ...], ...]}}, one list a layer') from None
        return _checked(bundle, rows, argument)
    name = argument or present[0]
    if name not in present:
        raise InputError(f"{bundle.path}: has no version {name!r}: here are {', '.join(present)}")
    return tuple((name,) * layer.experts for layer in bundle.layers)


def _checked(bundle: Bundle, table: Versions, where: str) -> Versions:
    present = [v.name for v in bundle.versions]
    if len(table) != len(bundle.layers):
        raise InputError(f"{where}: has {len(table)} layers, the bundle {len(bundle.layers)} with experts")
    for row, layer in zip(table, bundle.layers, strict=True):
        if len(row) != layer.experts:
            raise InputError(f"{where}: layer {layer.index} has {layer.experts} experts, the map {len(row)}")
        for name in row:
            if name not in present:
                raise InputError(f"{where}: layer {layer.index}: no version {name!r}: here are {', '.join(present)}")
    return table


ENTRY = Entry(
    name="static",
    usage="static, static:VERSION, static:FILE.json, static:allocation",
    parse=str,
    versions=lambda bundle, argument, room: static_map(bundle, argument),
)
