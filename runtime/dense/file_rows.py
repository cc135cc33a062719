"""An input embedding whose rows stay in the bundle's file: for a model on a CPU with a memory limit.

A token needs one row of the table: 4 KB of 0.6 GB at Qwen3-30B-A3B's size, which experts then have. Rows are read
through the page cache without read-ahead, so the system keeps those in use as long as it has room for them.
"""

from __future__ import annotations

import os
import weakref

import torch
from torch import Tensor, nn

from moepack.pack.errors import BundleError
from moepack.pack.files import advise
from moepack.runtime.experts.op import enter


class FileRows(nn.Module):
    """An embedding [rows, cols] in a file. It replaces an `nn.Embedding`; its `weight` lacks the values alone."""

    def __init__(self, of: nn.Embedding, file: int, at: int, location: str) -> None:
        """Take the sizes of `of`; its rows begin at byte `at` of a descriptor `file`, which is closed with this module.

        From now on a change of the file is found. `location` names the file in errors.
        """
        super().__init__()
        self.num_embeddings = of.num_embeddings
        self.embedding_dim = of.embedding_dim
        self.padding_idx = of.padding_idx
        self._dtype = of.weight.dtype
        self._file = file
        self._at = at
        self._location = location
        self._state, self._number = _state(file), enter(self)
        advise(file, "RANDOM", at, of.weight.nbytes)
        weakref.finalize(self, os.close, file)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of int [...] ids: [..., cols], with the file's bits.

        Raises:
            IndexError: for an id that the table does not have.
            BundleError: when the file cannot be read, or has changed since it was checked.
        """
        if torch.compiler.is_compiling():
            made: Tensor = torch.ops.moepack.rows(ids, self._number, self.embedding_dim, self._dtype)
            return made
        wanted, where = torch.unique(ids, return_inverse=True)
        if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.num_embeddings:
            raise IndexError(f"token id out of range: the embedding has {self.num_embeddings} rows")
        rows = torch.empty(len(wanted), self.embedding_dim, dtype=self._dtype)
        parts = rows.view(torch.uint8).numpy()
        size = parts.shape[-1]
        try:
            changed = _state(self._file) != self._state
            got = sum(
                os.preadv(self._file, [p], self._at + i * size) for p, i in zip(parts, wanted.tolist(), strict=True)
            )
        except OSError as error:
            raise BundleError.single(self._location, "read", f"cannot be read: {error.strerror}") from None
        if changed or got != rows.nbytes:
            raise BundleError.single(self._location, "read", "has changed since it was loaded: load the bundle again")
        return rows[where]

    @property
    def weight(self) -> Tensor:
        """Return a placeholder with the weight's shape, dtype and device. The values are NaN and use no memory."""
        return torch.full((1, 1), torch.nan, dtype=self._dtype).expand(self.num_embeddings, self.embedding_dim)

    def extra_repr(self) -> str:
        """Add the sizes to torch's own text."""
        return f"{self.num_embeddings}, {self.embedding_dim}, in {self._location}"


def _state(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns
