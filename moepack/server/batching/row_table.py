"""A table on a GPU of where the rows of a decoding pass lie, which attention's launches read.

The table stays where it is, whatever rows a pass has, so CUDA graphs of passes hold its address and not the rows'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.runtime.experts.backends import serves_dense

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Where = npt.NDArray[np.int64]  # of a row, [layers, FIELDS]: where keys and values lie, where they end, their room
REFUSED = 8  # passes after which the next ones are not expected to be replayed either
# the fields that change as a row grows
END = 2
ROOM = 3


def where(layers: Sequence[Any]) -> Where:
    """Return where a row's layers lie."""
    fields = [(x.keys.data_ptr(), x.values.data_ptr(), x.end, x.keys.shape[2]) for x in layers]
    return np.array(fields, np.int64)


class RowTable:
    """One model's table. Passes of a model run one after another."""

    def __init__(self, layers: int, device: torch.device) -> None:
        """Make room for SEQUENCES rows of so many layers."""
        from moepack.runtime.kernels.attend_triton import FIELDS, SEQUENCES

        self.sequences: int = SEQUENCES.value  # the most of a pass
        self.there = torch.zeros(layers, FIELDS, self.sequences, dtype=torch.int64, device=device)
        self._here: Where = np.zeros(self.there.shape, np.int64)
        self.by_address = False  # whether some layer's attention reads its rows at their own addresses
        self.refused = 0  # passes of the most rows, one after another, that were not replayed (decode_graph.py)

    @classmethod
    def of(cls, model: PreTrainedModel, layers: int) -> RowTable | None:
        """Return a table for a model whose decoding passes may be replayed; None for another."""
        graphs = getattr(getattr(model, "_moepack_wrapper", None), "graphs", None)
        return cls(layers, model.device) if graphs is not None and serves_dense() else None

    def at_once(self) -> int | None:
        """Return the largest batch that CUDA graphs cover, or None if graphs are off."""
        return None if self.by_address or self.refused >= REFUSED else self.sequences

    def write(self, rows: Sequence[Where]) -> None:
        """Write where a pass's rows lie, in order."""
        for n, row in enumerate(rows):
            self._here[:, :, n] = row
        # `_here` is written again after the tokens of this pass have been read, which waits for this copy.
        self.there.copy_(torch.from_numpy(self._here), non_blocking=True)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new keys and values, [1, heads, rows, dim], into the rows."""
        from moepack.runtime.kernels.attend_triton import append
        from moepack.runtime.kernels.current import current

        with current(key.device):
            append(_apart(key), _apart(value), self.there[layer])

    def attend(
        self, layer: int, query: Tensor, held: Any, scaling: float | None, window: int | None, sinks: Tensor | None
    ) -> Tensor | None:
        """Attend within each row, [1, heads, rows, dim] to [1, rows, heads, dim]; None if the kernel does not.

        `held` is the layer of one of the rows.
        """
        from moepack.runtime.kernels.attend_triton import attend_rows, takes_rows
        from moepack.runtime.kernels.current import current

        if not takes_rows(query, held.keys, held.values):
            return None
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        with current(query.device):
            return attend_rows(query, held.keys.shape[1], self.there[layer], scale, window, sinks)


def _apart(x: Tensor) -> Tensor:
    """Heads whose numbers are contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()
