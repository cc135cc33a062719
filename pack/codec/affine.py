"""Affine extents: convert one expert's codes, scales and zero points to bytes and back, and to reference values.

`AffineMatrix.dequantise` defines a version's weights and is the reference for every kernel. Values are exact in
float32, because a code minus a zero point has at most 12 significant bits and a scale has 8. Scales of a byte become
the BF16 numbers that they stand for, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..encodings.base import Stored, Version
from ..sections import BLOCK_ROWS, Matrix, Section
from . import trellis
from .bits import Bf16Bits, Buffer, Codes, bf16_to_float32, from_blocks, join_planes, split_planes, to_blocks

# The values of scales of a byte: three bits of exponent, five of mantissa, from 1 on.
BYTE_SCALES = ((1 + np.arange(256) % 32 / 32) * 2.0 ** (np.arange(256) // 32)).astype(np.float32)

Rows = Any  # a NumPy array or a torch tensor, [..., cols]
MIDDLE = 128  # the zero point 2^(bits-1), as it is stored


@dataclass(frozen=True, slots=True)
class AffineMatrix:
    """One matrix of an affine version."""

    codes: Codes  # uint8 [rows, cols], below 2**bits
    scale: Bf16Bits  # BF16 bits, uint16 [rows, groups]
    zero: npt.NDArray[np.uint8] | None  # uint8 [rows, groups] in units of 2**(bits-8), or None where none are stored
    bias: Bf16Bits | None = None  # BF16 bits, uint16 [rows], or None

    def grid(self, version: Version) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The zero points, in codes, and the scales, float32 [rows, groups]."""
        if self.zero is None:
            zero = np.full(self.scale.shape, unstored_zero(version), np.float32)
        else:
            zero = self.zero.astype(np.float32) * np.float32(2.0 ** (version.bits - 8))
        half = version.scale_dtype == "F16"
        return zero, self.scale.view(np.float16).astype(np.float32) if half else bf16_to_float32(self.scale)

    def dequantise(self, version: Version) -> npt.NDArray[np.float32]:
        """The weights, float32 [rows, cols]: scale * (level - zero)."""
        rows, cols = self.codes.shape
        zero, scale = self.grid(version)
        out: npt.NDArray[np.float32] = levels(self.codes, version).astype(np.float32)
        if cols % version.group_size:
            group = np.arange(cols) // version.group_size
            out -= zero[:, group]
            out *= scale[:, group]
            return out
        grouped = out.reshape(rows, -1, version.group_size)
        grouped -= zero[..., None]
        grouped *= scale[..., None]
        return out


def levels(codes: Rows, version: Version) -> Rows:
    """What a scale multiplies, less the zero point: the codes [.., cols], uint8, or a trellis version's levels."""
    if not version.trellis:
        return codes
    wide = codes.astype(np.int32) if isinstance(codes, np.ndarray) else codes.int()
    return trellis.levels(wide, version.bits)


def unstored_zero(version: Version) -> float:
    """The zero point of every group of a version that stores none, in levels."""
    if version.trellis:
        return trellis.ZERO
    return 1 << (version.bits - 1) if version.zero == "symmetric" else ((1 << version.bits) - 1) / 2


def encode(matrices: Sequence[Matrix], version: Version, values: Sequence[Stored]) -> Buffer:
    """The extent of one expert, padding included, uint8. `values`: an AffineMatrix or ReleasedMatrix for each."""
    out = np.zeros(version.resident_size(matrices), np.uint8)
    for m, v in zip(matrices, values, strict=True):
        if v.codes.shape != (m.rows, m.cols):
            raise ValueError(f"{m.name}: codes are {v.codes.shape}, not {(m.rows, m.cols)}")
        if version.zero == "symmetric" and (zero := getattr(v, "zero", None)) is not None and (zero != MIDDLE).any():
            raise ValueError(f"{m.name}: a zero point is not the middle code, as those of symmetric codes are")
    packed = [split_planes(v.codes, version.at(i).planes) for i, v in enumerate(values)]
    scales = [
        bytes_of(v.scale, m.name) if version.scale_bits == 8 else {} for m, v in zip(matrices, values, strict=True)
    ]
    for section in version.sections(matrices):
        v = values[section.matrix]
        if section.kind.startswith("plane"):
            array: npt.NDArray[np.generic] = packed[section.matrix][int(section.kind[5:])]
        else:
            small = scales[section.matrix].get(section.kind)
            array = getattr(v, section.kind) if small is None else small
            if len(section.shape) == 3:
                array = to_blocks(array)
            elif section.kind != "bias":
                array = by_block(array, matrices[section.matrix].name)
        if array.shape != section.shape or array.dtype.itemsize != section.item:
            raise ValueError(f"{section.kind} of {matrices[section.matrix].name}: {array.shape}, not {section.shape}")
        out[section.offset : section.end] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return out


def bytes_of(scale: Bf16Bits, what: str) -> dict[str, npt.NDArray[np.generic]]:
    """Scales as bytes and outer scales: uint8 [rows, groups] and float32 [rows], equal in each block of 16 rows.

    Raises ValueError for scales that are not such products (FORMAT.md, "Scales of a byte").
    """
    exponent = (scale >> np.uint16(7)).astype(np.int32)  # and the sign, which is to be 0
    top = np.maximum.reduceat(exponent.max(1), np.arange(0, len(scale), BLOCK_ROWS))
    base = np.repeat(np.maximum(top - 7, 1), BLOCK_ROWS)[: len(scale)]
    code = (scale.astype(np.int32) >> 2) - (base << 5)[:, None]
    if (scale & np.uint16(3)).any() or code.min() < 0 or code.max() > 255 or top.max() > 254:
        raise ValueError(f"{what}: a scale is no byte times a power of two that 16 rows share")
    return {"scale": code.astype(np.uint8), "outer": (base << 23).astype(np.uint32).view(np.float32)}


def by_block(values: npt.NDArray[np.generic], what: str) -> npt.NDArray[np.generic]:
    """Values [rows] or [rows, n], equal in each block of 16 rows, as one a block: [blocks] or [blocks, n].

    Raises ValueError where rows of a block differ.
    """
    first = values[::BLOCK_ROWS]
    if not np.array_equal(np.repeat(first, BLOCK_ROWS, axis=0)[: len(values)], values):
        raise ValueError(f"{what}: rows of one block of {BLOCK_ROWS} have different scales")
    return first


def put_rows(matrix: Matrix, version: Version, rows: range, packed: Buffer, out: Buffer) -> None:
    """Copy some rows of `matrix` into `out`, the extent of the whole matrix; other rows stay as they are.

    `rows` begins and ends at multiples of BLOCK_ROWS, or ends at the last row. `packed` is the extent of these rows
    as a matrix.
    """
    whole = {s.kind: s for s in version.sections((matrix,))}
    for section in version.sections((replace(matrix, rows=len(rows)),)):
        before = rows.start if section.kind == "bias" else rows.start // BLOCK_ROWS
        at = whole[section.kind].offset + before * (section.size // section.shape[0])
        out[at : at + section.size] = packed[section.offset : section.end]


def section_array(extent: Buffer, section: Section) -> npt.NDArray[np.generic]:
    """A view of one section, of dtype uint8, uint16 or uint32 by its element size."""
    return extent[section.offset : section.end].view(f"<u{section.item}").reshape(section.shape)


def decode(matrices: Sequence[Matrix], version: Version, extent: Buffer) -> list[AffineMatrix]:
    """The matrices of one extent; biases are views of the extent."""
    parts: list[dict[str, npt.NDArray[np.generic]]] = [{} for _ in matrices]
    for section in version.sections(matrices):
        parts[section.matrix][section.kind] = section_array(extent, section)
    return [
        unpacked(part, version.at(i).planes, m.rows, m.cols)
        for i, (m, part) in enumerate(zip(matrices, parts, strict=True))
    ]


def unpacked(part: Mapping[str, npt.NDArray[np.generic]], planes: Sequence[int], rows: int, cols: int) -> AffineMatrix:
    """A matrix, or rows of one from a first block on, of its sections by kind."""
    codes = join_planes([part[f"plane{p}"] for p in range(len(planes))], planes, rows, cols)  # type: ignore[misc]
    zero = from_blocks(part["zero"], rows) if "zero" in part else None
    scale = from_blocks(wide_scales(part["scale"], part.get("outer")), rows)
    return AffineMatrix(codes, scale, zero, part.get("bias"))  # type: ignore[arg-type]


def wide_scales(scale: npt.NDArray[Any], outer: npt.NDArray[Any] | None) -> Bf16Bits:
    """A section of scales [blocks, groups, 16] with 16 bits each: as it is, or of bytes and their `outer` [blocks]."""
    if outer is None:
        return scale
    values = BYTE_SCALES[scale] * outer.view("<f4")[:, None, None]
    bits: Bf16Bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits
