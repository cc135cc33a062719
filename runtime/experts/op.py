"""The experts' forward as one operator of torch, `moepack::experts`: what a compiled model calls.

Which layer is meant a number says, as an operator takes tensors and numbers: layers are entered under theirs for as
long as they live. Results are those of `experts_forward` to the bit, as that is what runs. A compiled pass is one step:
it begins with its first layer of experts and ends with its last. Decides nothing.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError

_numbers = itertools.count()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enter(module: Any) -> int:
    """Give an experts module its number."""
    number = next(_numbers)
    _modules[number] = module
    return number


@torch.library.custom_op("moepack::experts", mutates_args=())
def experts(hidden: Tensor, index: Tensor, weights: Tensor, layer: int) -> Tensor:
    """The experts of a layer.

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
    if module is None or module._moepack.compiled is None:
        raise InputError("the model of a compiled pass has gone: load the bundle and compile it again")
    out: Tensor = module._moepack.compiled(module, hidden, index, weights)
    return out.contiguous()


@experts.register_fake
def _(hidden: Tensor, index: Tensor, weights: Tensor, layer: int) -> Tensor:
    return hidden.new_empty(hidden.shape)


class Open:
    """A context that a compiled pass is inside of, entered by one of its operators and left by another.

    An interrupted pass leaves it open: then the thread's next pass ends it, or the thread's own end does.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context: AbstractContextManager[Any] | None = context
        context.__enter__()

    def end(self) -> None:
        """Leave it. May be called twice."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    __del__ = end
