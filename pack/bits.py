"""Planes of packed codes: `bits` bits a code, little-endian, rows padded with zero bits to whole 32-bit words.

Knows nothing of scales or of sections; FORMAT.md, "Planes", is what it implements.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .spec import PLANES, plane_words

Codes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


def pack_plane(values: Codes, bits: int) -> Words:
    """Pack `values` [rows, cols], each below 2**bits (bits in {1, 2, 4}), into words [rows, ceil(cols*bits/32)].

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


def unpack_plane(words: Words, bits: int, cols: int) -> Codes:
    """The inverse of `pack_plane`: values [rows, cols]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    per_byte = 8 // bits
    out = np.empty((packed.shape[0], packed.shape[1] * per_byte), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for i in range(per_byte):
        out[:, i::per_byte] = (packed >> np.uint8(i * bits)) & mask
    return out[:, :cols]


def split_planes(codes: Codes, bits: int) -> list[Words]:
    """Pack codes [rows, cols] below 2**bits into their planes, least significant first."""
    planes, shift = [], 0
    for width in PLANES[bits]:
        mask = np.uint8((1 << width) - 1)
        planes.append(pack_plane((codes >> np.uint8(shift)) & mask, width))
        shift += width
    return planes


def join_planes(planes: list[Words], bits: int, cols: int) -> Codes:
    """The inverse of `split_planes`: codes [rows, cols]."""
    codes = np.zeros((planes[0].shape[0], cols), np.uint8)
    shift = 0
    for words, width in zip(planes, PLANES[bits], strict=True):
        codes |= unpack_plane(words, width, cols) << np.uint8(shift)
        shift += width
    return codes
