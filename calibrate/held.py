"""Large tensors of a calibration (all activations, a layer's experts), in memory or mapped from an unnamed file.

A mapped tensor is used like any other. `release` returns its pages to the system, which writes them to the file.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moepack.pack.errors import TargetError

_GATHERED = 256  # rows that are read between releases: the system maps 64 KiB around every page that is touched
_mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by address; a tensor keeps its mapping alive


def empty(shape: Sequence[int], dtype: torch.dtype, folder: Path | None = None) -> Tensor:
    """Make an uninitialised CPU tensor; with `folder`, in an unnamed file there that is freed with the tensor.

    Raises TargetError when the folder's disk has no room for it.
    """
    size = math.prod(shape) * dtype.itemsize
    if folder is None or not size:
        with torch.inference_mode(False):
            return torch.empty(*shape, dtype=dtype)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error now, not a signal later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            mapping = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise TargetError(f"{folder}: cannot hold {size:,} bytes that --memory leaves out: {error.strerror}") from None
    with torch.inference_mode(False):
        flat = torch.frombuffer(mapping, dtype=dtype)
    _mapped[flat.data_ptr()] = mapping
    return flat.view(*shape)


def mapped(path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Map a tensor from a file, from byte `offset` on. Writes to the tensor stay in this process."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=offset)
    _mapped[flat.data_ptr()] = mapping
    return flat.view(*shape)


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor's data is mapped from a file."""
    return _mapping(tensor) is not None


def release(tensor: Tensor) -> None:
    """Take a mapped tensor's pages out of this process's memory; they keep their values. Ignores other tensors."""
    mapping = _mapping(tensor)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def expect(tensor: Tensor) -> None:
    """Ask the system to read a contiguous mapped tensor's part of its file into the page cache."""
    mapping = _mapping(tensor)
    if mapping is not None:
        first = int(tensor.storage_offset()) * tensor.itemsize
        start = first - first % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_WILLNEED, start, first + int(tensor.nbytes) - start)


def _mapping(tensor: Tensor) -> mmap.mmap | None:
    return _mapped.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None


class RowGather:
    """Copies of a tensor's rows by index; a mapped tensor's pages are released again."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Tensor) -> Tensor:
        """Copy the rows at `index`, int64 [rows]."""
        if not is_mapped(self._tensor):
            return self._tensor[index]
        out = self._tensor.new_empty(len(index), *self._tensor.shape[1:])
        for start in range(0, len(index), _GATHERED):
            here = slice(start, start + _GATHERED)
            out[here] = self._tensor[index[here]]
            release(self._tensor)
        return out
