"""The checkpoint tensors that hold some experts of a layer, by names and shapes.

A family stores a tensor for each expert, or a layer's experts along the first axis of one tensor. In any other layout
the whole layer has to be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Parts = dict[str, range | None]  # checkpoint weight -> which of its first axis; None is all of it


def sources_of(
    experts: range, total: int, sources: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]]
) -> Parts | None:
    """The weights to read for `experts` of a layer of `total`; None for an unknown layout.

    `sources` maps a parameter of the layer's experts to its weights in the checkpoint, `shapes` a weight to its stored
    shape.
    """
    out: Parts = {}
    for keys in sources.values():
        part = _numbered(experts, total, keys)
        if part is None and keys and all(len(shapes[k]) > 1 and shapes[k][0] == total for k in keys):
            part = dict.fromkeys(keys, experts)
        if part is None:
            return None
        out |= part
    return out


def _numbered(experts: range, total: int, keys: Sequence[str]) -> Parts | None:
    """The keys of these experts, if one place of the names counts all numbers below `total`; else None."""
    split = [re.split(r"(?<=\.)(\d+)(?=\.)", key) for key in keys]  # every second part is a number
    if not split or len({len(parts) for parts in split}) != 1:
        return None
    every = set(range(total))
    places = [i for i in range(1, len(split[0]), 2) if {int(parts[i]) for parts in split} == every]
    if len(places) != 1:
        return None
    named: dict[tuple[str, ...], set[int]] = {}  # the other parts of a name -> its numbers
    for parts in split:
        at = places[0]
        named.setdefault((*parts[:at], *parts[at + 1 :]), set()).add(int(parts[at]))
    if any(numbers != every for numbers in named.values()):
        return None
    return {key: None for key, parts in zip(keys, split, strict=True) if int(parts[places[0]]) in experts}
