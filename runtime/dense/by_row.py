"""Layers that keep a state of fixed size, in a packed pass: each sequence's tokens by a call of the module's own code.

Linear attention, state space models and short convolutions read their state and write it, and the server packs tokens
of several sequences into one pass. All other modules see the whole pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from moepack.families.arguments import CACHE_NAMES
from moepack.runtime.step.context import PackedCache

from .linears import FamilyModule, in_place_of
from .scans import going_on, has_scan

WRITES = frozenset({"update_conv_state", "update_recurrent_state"})  # methods of a cache


def serve_rows(model: nn.Module, layers: Collection[int]) -> set[int]:
    """Let modules that keep a state run each sequence of a packed pass by itself, unless the kernel runs all at once.

    Returns those of the numbered `layers` whose module was found.
    """
    found = set()
    for module in model.modules():
        kind: Any = type(module)
        number = getattr(module, "layer_idx", None)
        if (
            not isinstance(number, int)
            or number not in layers
            or "forward" in module.__dict__
            or not _keeps_state(kind)
        ):
            continue
        found.add(number)
        if getattr(module, "_moepack_linear", None) is None and "_moepack_by_row" not in vars(kind):
            module.__class__ = in_rows(kind)
    return found


@functools.cache
def _keeps_state(kind: type[nn.Module]) -> bool:
    """Whether a class's own code writes a convolution's window or a state into a cache that its forward is given."""
    if set(CACHE_NAMES).isdisjoint(inspect.signature(kind.forward).parameters):
        return False
    functions = (getattr(inspect.unwrap(f), "__code__", None) for base in kind.__mro__ for f in vars(base).values())
    return any(code is not None and not WRITES.isdisjoint(code.co_names) for code in functions)


@functools.cache
def in_rows(kind: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of `kind` whose forward runs each sequence of a packed pass by itself, from its state."""
    forward = going_on(kind.forward) if has_scan(kind) else kind.forward
    made = in_place_of(kind, by_row(forward))
    made._moepack_by_row = True  # type: ignore[attr-defined]
    return made


def by_row(plain: Callable[..., object]) -> Callable[..., object]:
    """Make a forward that runs `plain` for each sequence of a packed pass, and as it is for any other cache."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def forward(self: FamilyModule, *args: object, **kwargs: object) -> object:
        cache = next((v for v in (*args, *kwargs.values()) if isinstance(v, PackedCache)), None)
        if cache is None:
            return plain(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        more = given.pop("kwargs", {})
        _, first, *_ = given
        x: Any = given[first]
        others = {name: value for name, value in (given | more).items() if name not in ("self", first)}
        name = next(name for name, value in others.items() if value is cache)
        if tensors := [name for name, value in others.items() if isinstance(value, Tensor | tuple | list)]:
            cache.refuse(f"{type(self).__name__} is given {', '.join(tensors)}")
        layer: Any = self.layer_idx
        made = []
        for number, rows in enumerate(cache.by_row(layer, x.device)):
            made += [plain(self, x[:, span], **{**others, name: row}) for span, row in rows]
            cache.ran(layer, number)
        whole = [y for y in made if isinstance(y, Tensor)]
        if len(whole) < len(made):
            cache.refuse(f"{type(self).__name__} returns more than its result")
        return torch.cat(whole, dim=1)

    return forward
