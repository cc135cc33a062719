"""Which linear maps of a model are dense matrices, and which of them are given the same input.

Decides nothing about versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from moepack.pack.spec import is_dense

# Names of maps that families give one input to. Where one does not, the group dissolves as it runs (linears.py).
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)


def linears(model: nn.Module, experts: Sequence[str]) -> dict[str, nn.Linear]:
    """A model's dense matrices by their modules' names, in its order; none of the modules in `experts`, or inside."""
    inside = tuple(f"{name}." for name in experts)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and is_dense(name, module.out_features, module.in_features)
        and not name.startswith(inside)
    }


def groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Names that belong together, each name once, in the order of their first ones."""
    left: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        if name not in left:
            continue
        parent, _, last = name.rpartition(".")
        found: tuple[str, ...] = (name,)
        for family in SIBLINGS:
            members = tuple(f"{parent}.{other}" for other in family)
            if last == family[0] and all(member in left for member in members):
                found = members
                break
        for member in found:
            left.pop(member, None)
        yield found
