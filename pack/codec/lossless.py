"""Extents of the lossless version: matrices go through the exponent codec, biases stay as they are.

FORMAT.md, "Lossless extents". exponent_fast.py does the work, and exponent.py is its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CodecError
from ..sections import MAX_EXTENT, PAGE, SECTION, Matrix, align
from .bits import Bf16Bits, Buffer

_ENTRY = 16  # bytes of an entry, four 32-bit numbers: offset and size of the coded matrix, and of its bias


@dataclass(frozen=True, slots=True)
class LosslessMatrix:
    """One matrix of the lossless version: BF16 bits, uint16 [rows, cols], and its bias, uint16 [rows] or None."""

    weight: Bf16Bits
    bias: Bf16Bits | None = None


def directory_size(matrices: Sequence[Matrix]) -> int:
    """Bytes of the directory at the start of an extent."""
    return align(_ENTRY * len(matrices), SECTION)


def encode(matrices: Sequence[Matrix], values: Sequence[LosslessMatrix], threads: int | None) -> tuple[Buffer, int]:
    """Encode one expert: its extent, padding included, and its payload in bytes. `threads` defaults to all cores."""
    from . import exponent_fast

    directory = np.zeros((len(matrices), 4), "<u4")
    parts: list[tuple[int, Buffer]] = []
    at = directory_size(matrices)
    for i, (m, value) in enumerate(zip(matrices, values, strict=True)):
        if value.weight.shape != (m.rows, m.cols):
            raise ValueError(f"{m.name} is {value.weight.shape}, not {(m.rows, m.cols)}")
        chunks = [exponent_fast.encode(value.weight, threads)]
        if m.bias:
            if value.bias is None or value.bias.shape != (m.rows,):
                raise ValueError(f"{m.name} needs a bias of {m.rows} values")
            chunks.append(np.ascontiguousarray(value.bias).view(np.uint8))
        for k, chunk in enumerate(chunks):
            if at + len(chunk) > MAX_EXTENT:
                raise ValueError(f"{m.name} is too large for one extent: at most {MAX_EXTENT} bytes")
            directory[i, 2 * k : 2 * k + 2] = at, len(chunk)
            parts.append((at, chunk))
            at = align(at + len(chunk), SECTION)
    out = np.zeros(align(at, PAGE), np.uint8)
    out[: directory.nbytes] = directory.view(np.uint8).reshape(-1)
    for offset, chunk in parts:
        out[offset : offset + len(chunk)] = chunk
    return out, directory.nbytes + sum(len(c) for _, c in parts)


def directory(matrices: Sequence[Matrix], extent: Buffer) -> list[tuple[Buffer, Bf16Bits | None]]:
    """The coded bytes and the bias of every matrix, as views of the extent.

    Raises CodecError when an entry leaves the extent, overlaps the directory, or has a bias of the wrong size.
    """
    head = directory_size(matrices)
    if len(extent) < head:
        raise CodecError(f"extent of {len(extent)} bytes is smaller than its directory of {head}")
    out: list[tuple[Buffer, Bf16Bits | None]] = []
    table = extent[: _ENTRY * len(matrices)].view("<u4").reshape(len(matrices), 4)
    for m, row in zip(matrices, table, strict=True):
        offset, size, bias_offset, bias_size = (int(v) for v in row)
        if bias_size != (2 * m.rows if m.bias else 0):
            raise CodecError(f"bias of {m.name} has {bias_size} bytes")
        for name, start, length in ((m.name, offset, size), (f"bias of {m.name}", bias_offset, bias_size)):
            if length and (start < head or start % SECTION or start + length > len(extent)):
                raise CodecError(f"{name} at {start}, {length} bytes, is not inside the extent of {len(extent)}")
        bias = extent[bias_offset : bias_offset + bias_size].view("<u2") if m.bias else None
        out.append((extent[offset : offset + size], bias))
    return out


def payload(matrices: int, extent: Buffer) -> int:
    """Bytes of an extent without padding: its directory's entries, coded matrices and biases."""
    table = extent[: _ENTRY * matrices].view("<u4").reshape(-1, 2)
    return table.nbytes + int(table[:, 1].sum(dtype=np.int64))


def decode(matrices: Sequence[Matrix], extent: Buffer) -> list[LosslessMatrix]:
    """Decode the matrices of one extent; biases are views of it. Raises CodecError when it is not well formed."""
    from . import exponent_fast

    out = []
    for m, (data, bias) in zip(matrices, directory(matrices, extent), strict=True):
        weight = np.empty((m.rows, m.cols), np.uint16)
        exponent_fast.decode_into(data, weight.reshape(-1))
        out.append(LosslessMatrix(weight, bias))
    return out
