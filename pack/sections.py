"""Matrices, and the sections of an extent that hold them. Standard library only; sizes and offsets are in bytes."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

PAGE = 4096  # alignment of extents: direct I/O, host registration and file mapping work in pages
# What this machine takes and gives back memory in: 4 KiB on x86-64, up to 64 KiB on Arm. No file depends on it.
MEMORY_PAGE = max(PAGE, mmap.PAGESIZE)
SECTION = 64  # alignment of sections: one cache line, and the widest vector load
BLOCK_ROWS = 16  # rows of a packed matrix that are interleaved: the lanes of the widest vector
GROUPS = (128, 64, 32)  # columns that may share a scale
MAX_EXTENT = (1 << 32) - PAGE  # offsets inside an extent are 32 bits wide


def align(value: int, to: int) -> int:
    """Round `value` up to a multiple of `to`."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of an expert: y = W x + b, with W of shape [rows, cols].

    Rows stand in the order in which the model's gate activation reads them (FORMAT.md, "Matrices").
    """

    name: str
    rows: int
    cols: int
    bias: bool = False

    @property
    def weights(self) -> int:
        """The number of weights, without the bias."""
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Section:
    """A run of bytes inside an extent: an array of `shape` with elements of `item` bytes, row-major."""

    matrix: int
    kind: str
    offset: int
    shape: tuple[int, ...]
    item: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.item * math.prod(self.shape)

    @property
    def end(self) -> int:
        """The offset just after the section's last byte."""
        return self.offset + self.size


def plane_words(cols: int, bits: int) -> int:
    """Number of 32-bit words of one row of a plane that holds `bits` bits of every code."""
    return -(-cols * bits // 32)
