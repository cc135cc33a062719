"""Blocks of rows, planes of packed codes, and BF16 bits as NumPy arrays (FORMAT.md, "Affine extents")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..sections import BLOCK_ROWS, plane_words

Buffer = npt.NDArray[np.uint8]
Bf16Bits = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Number = TypeVar("Number", bound=np.generic)


def bf16_to_float32(bits: Bf16Bits) -> npt.NDArray[np.float32]:
    """BF16 bits as float32 values of the same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_blocks(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Values [rows, n] as blocks [ceil(rows / 16), n, 16]: each interleaves 16 rows, missing rows are zero."""
    rows, n = values.shape
    blocks = -(-rows // BLOCK_ROWS)
    if rows % BLOCK_ROWS:
        values = np.concatenate([values, np.zeros((blocks * BLOCK_ROWS - rows, n), values.dtype)])
    return np.ascontiguousarray(values.reshape(blocks, BLOCK_ROWS, n).transpose(0, 2, 1))


def from_blocks(blocks: npt.NDArray[Number], rows: int) -> npt.NDArray[Number]:
    """The inverse of `to_blocks`: values [rows, n]."""
    return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1, blocks.shape[1])[:rows]


def pack_plane(values: Codes, bits: int) -> Words:
    """Pack `values` as `pack_rows` does, by blocks of rows: words [blocks, ceil(cols*bits/32), 16]."""
    return to_blocks(pack_rows(values, bits))


def pack_rows(values: Codes, bits: int) -> Words:
    """Pack `values` [rows, cols], each below 2**bits, into words [rows, ceil(cols*bits/32)]; bits: 1, 2, 4 or 8.

    Column c of a row stands at bits c*bits .. c*bits+bits-1 of the row's little-endian bit string.
    """
    rows, cols = values.shape
    words = plane_words(cols, bits)
    per_byte = 8 // bits
    padded = np.zeros((rows, words * 4 * per_byte), np.uint8)
    padded[:, :cols] = values
    packed = padded[:, 0::per_byte].copy()
    for i in range(1, per_byte):
        packed |= padded[:, i::per_byte] << np.uint8(i * bits)
    return packed.view("<u4")


def unpack_plane(words: Words, bits: int, rows: int, cols: int) -> Codes:
    """The inverse of `pack_plane`: values [rows, cols]."""
    packed = from_blocks(words, rows).view(np.uint8)
    out = packed.astype(f"<u{8 // bits}")  # a byte in as many as it has codes, halved again and again: 4 times as fast
    # as to take every n-th code of a row at once
    place = 8 * out.itemsize
    width = 8
    while width > bits:
        place = place // 2
        width = width // 2
        out |= out << out.dtype.type(place - width)
        out &= out.dtype.type(sum((1 << width) - 1 << at for at in range(0, 8 * out.itemsize, place)))
    return out.view(np.uint8)[:, :cols]


def split_planes(codes: Codes, planes: Sequence[int]) -> list[Words]:
    """Pack codes [rows, cols] into planes, least significant first. `planes` has the bits of each, at most 8 in all."""
    out = []
    shift = 0
    for width in planes:
        mask = np.uint8((1 << width) - 1)
        out.append(pack_plane((codes >> np.uint8(shift)) & mask, width))
        shift += width
    return out


def join_planes(parts: Sequence[Words], planes: Sequence[int], rows: int, cols: int) -> Codes:
    """The inverse of `split_planes`: codes [rows, cols]."""
    codes = unpack_plane(parts[0], planes[0], rows, cols)
    shift = planes[0]
    for words, width in zip(parts[1:], planes[1:], strict=True):
        codes |= unpack_plane(words, width, rows, cols) << np.uint8(shift)
        shift += width
    return codes
