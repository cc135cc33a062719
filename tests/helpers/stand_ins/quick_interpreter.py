"""Triton's interpreter without work that changes nothing, which is two thirds of its time."""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install():
    """Leave out checks whose results are dropped, and do once what is done at every call and every number."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)  # an overflow is asserted in debug mode alone
    replaces, dtype_of = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)

    def replace_once(kernel: Callable[..., object]) -> object:
        """A launch has replaced the language's functions before its kernel calls others, which replace them again."""
        if any(tl.core.is_builtin(language.load) for language in _languages(kernel)):
            return replaces(kernel)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = lambda of: np.dtype(np.uint64) if of.scalar.is_ptr() else dtype_of(of.scalar)


@functools.cache
def _languages(function: Callable[..., object]) -> list[ModuleType]:
    """The modules by which a function knows Triton's language."""
    return [known for known in function.__globals__.values() if known is tl or known is tl.core]
