"""The torch operator `moepack::experts`, which compiled models call.

An operator takes tensors and numbers, so each experts module is registered under a number while it lives. The operator
runs `experts_forward`: results are equal to the bit. A compiled pass is one step, from its first layer of experts to
its last (`ForwardWrapper.compiled_layer`).
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.step import StepOpener

_numbers = itertools.count()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enter(module: Any) -> int:
    """Register an experts module and return its number."""
    number = next(_numbers)
    _modules[number] = module
    return number


@torch.library.custom_op("moepack::experts", mutates_args=())
def experts(hidden: Tensor, index: Tensor, weights: Tensor, layer: int) -> Tensor:
    """Run the experts of a layer.

    Args:
        hidden: [tokens, hidden].
        index, weights: [tokens, top_k], the router's choice.
        layer: the number that `enter` gave.

    Returns:
        [tokens, hidden].

    Raises:
        InputError: when the model has gone.
    """
    module = _modules.get(layer)
    steps: StepOpener | None = None if module is None else module._moepack.steps
    if steps is None:
        raise InputError("the model of a compiled pass has gone: load the bundle and compile it again")
    out = steps.compiled_layer(module, hidden, index, weights)
    return out.contiguous()


@experts.register_fake
def _(hidden: Tensor, index: Tensor, weights: Tensor, layer: int) -> Tensor:
    return hidden.new_empty(hidden.shape)
