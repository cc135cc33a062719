"""The torch operators `moepack::experts`, `moepack::dense` and `moepack::rows`, which compiled models call.

An operator takes tensors and numbers, so each module is registered under a number while the module lives. The operators
run `experts_forward` and the modules' own forwards, so results equal those of uncompiled models to the bit. A compiled
pass is one step, from its first layer of experts to its last (`ForwardWrapper.compiled_layer`).
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.step.context import StepOpener

_numbers = itertools.count()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enter(module: torch.nn.Module) -> int:
    """Register a module and return its number."""
    number = next(_numbers)
    _modules[number] = module
    return number


def _gone() -> InputError:
    return InputError("the model of a compiled pass has gone: load the bundle and compile it again")


@torch.library.custom_op("moepack::experts", mutates_args=())
def experts(hidden: Tensor, index: Tensor, weights: Tensor, layer: int) -> Tensor:
    """Run the experts of the module with number `layer`: [tokens, hidden]. Raises InputError when the model is freed.

    `hidden` is [tokens, hidden]; `index` and `weights` are [tokens, top_k], the router's choice.
    """
    module = _modules.get(layer)
    steps: StepOpener | None = None if module is None else module._moepack.steps
    if module is None or steps is None:
        raise _gone()
    return steps.compiled_layer(module, hidden, index, weights).contiguous()


@experts.register_fake
def _(hidden: Tensor, index: Tensor, weights: Tensor, layer: int) -> Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op("moepack::dense", mutates_args=())
def dense(x: Tensor, number: int, rows: int) -> Tensor:
    """Run the packed linear map registered under `number`; return [..., rows]. Raises InputError as `experts` does."""
    if (module := _modules.get(number)) is None:
        raise _gone()
    made: Tensor = module.forward(x)
    return made.contiguous()


@dense.register_fake
def _(x: Tensor, number: int, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.custom_op("moepack::rows", mutates_args=())
def rows(ids: Tensor, number: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Read rows [..., cols] of the embedding registered under `number`. Raises InputError as `experts` does."""
    if (module := _modules.get(number)) is None:
        raise _gone()
    made: Tensor = module.forward(ids)
    return made


@rows.register_fake
def _(ids: Tensor, number: int, cols: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, cols), dtype=dtype)
