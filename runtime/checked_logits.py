"""Have transformers' `generate` raise where logits are not finite, instead of returning the tokens of such logits.

Steps wait for no device: rows are judged there, and the verdict is read once the last token is made. Until then a row
that is not finite is replaced by zeros, because a draw from NaN ends a GPU's process.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from moepack.pack.errors import NotFiniteError

NO_LOGITS = (
    "gives logits that are NaN or infinite: its numbers overflow in this dtype, or weights are damaged (moepack verify)"
)


def finite_rows(logits: Tensor) -> Tensor:
    """Whether the greatest of each row of logits [.., vocabulary] is a number; negative infinity may mask others."""
    most = logits.amax(-1)  # a NaN is the greatest
    return most - most == 0


class CheckedLogits(LogitsProcessor):
    """A processor of one call of `generate`."""

    def __init__(self) -> None:
        self._good: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Judge scores [sequences, vocabulary]."""
        good = finite_rows(scores)
        every = good.all()
        self._good = every if self._good is None else self._good & every
        return torch.where(good[:, None], scores, 0.0)

    def check(self) -> None:
        """Raise NotFiniteError if a row was not finite. Waits for the device."""
        if self._good is not None and not bool(self._good):
            raise NotFiniteError("the model", NO_LOGITS)
