"""Errors of a memory budget, in the form that other programs recognise as out of memory.

Programs that search for a batch size lower it after torch's `OutOfMemoryError`, or after a `RuntimeError` with a single
argument that contains " out of memory." (accelerate, and with it transformers' Trainer and lm-eval).
"""

from __future__ import annotations

import torch

from moepack.pack.errors import InputError


class BudgetExceeded(InputError, torch.OutOfMemoryError):
    """A request needs more memory than the budget has. A smaller batch or fewer tokens may fit."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"{text}: out of memory.")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text,)


class TooSmallError(BudgetExceeded):
    """A memory budget is too small; `least` is the smallest budget that works, in bytes."""

    def __init__(self, text: str, least: int) -> None:
        self.least = least
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text, self.least)
