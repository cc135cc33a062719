"""What a memory budget does not hold, as an error that programs take for one of memory.

Batch-size finders lower the batch at a `RuntimeError` of one argument with " out of memory." in it (accelerate, and
with it transformers' Trainer and lm-eval), others at torch's own `OutOfMemoryError`. Says nothing about why.
"""

from __future__ import annotations

from typing import Any

import torch

from moepack.pack.errors import InputError


class BudgetExceeded(InputError, torch.OutOfMemoryError):
    """Something needs more memory than the budget has. Less of it may fit: a smaller batch, fewer tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"{text}: out of memory.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text,)


class TooSmallError(BudgetExceeded):
    """A memory budget below what would do.

    Attributes:
        least: the smallest budget that would do, in bytes.
    """

    def __init__(self, text: str, least: int) -> None:
        self.least = least
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.least)
