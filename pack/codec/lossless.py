"""Extents of entropy-coded versions: the directory that all of them have, and the lossless version's matrices.

FORMAT.md, "Lossless extents". An extent holds two parts a matrix: what is coded, and what stands beside it as it is.
For BF16 these are the weights, which exponent_fast.py codes (exponent.py is its reference), and the bias; released.py
says what they are for FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..encodings.base import Version
from ..errors import CodecError
from ..sections import MAX_EXTENT, PAGE, SECTION, Matrix, align
from .bits import Bf16Bits, Buffer

ENTRY = 16  # bytes of an entry, four 32-bit numbers: offset and size of what is coded, and of what is beside it
Parts = tuple[Buffer, Buffer]  # of a matrix: what is coded, and what is beside it, which may be empty


@dataclass(frozen=True, slots=True)
class LosslessMatrix:
    """One matrix of the lossless version: BF16 bits, uint16 [rows, cols], and its bias, uint16 [rows] or None."""

    weight: Bf16Bits
    bias: Bf16Bits | None = None


def directory_size(matrices: Sequence[Matrix]) -> int:
    """Bytes of the directory at the start of an extent."""
    return align(ENTRY * len(matrices), SECTION)


def beside(matrices: Sequence[Matrix]) -> list[int]:
    """Return the bytes stored with each coded matrix of the lossless version: the matrix's bias."""
    return [2 * m.rows if m.bias else 0 for m in matrices]


def join(matrices: Sequence[Matrix], parts: Iterable[Parts]) -> tuple[Buffer, int]:
    """An extent of these parts, padding included, and its payload in bytes. Raises ValueError if it is too large."""
    table = np.zeros((len(matrices), 4), "<u4")
    placed: list[tuple[int, Buffer]] = []
    at = directory_size(matrices)
    for i, (m, both) in enumerate(zip(matrices, parts, strict=True)):
        for k, chunk in enumerate(both):
            if not len(chunk):
                continue
            if at + len(chunk) > MAX_EXTENT:
                raise ValueError(f"{m.name} is too large for one extent: at most {MAX_EXTENT} bytes")
            table[i, 2 * k : 2 * k + 2] = at, len(chunk)
            placed.append((at, chunk))
            at = align(at + len(chunk), SECTION)
    out = np.zeros(align(at, PAGE), np.uint8)
    out[: table.nbytes] = table.view(np.uint8).reshape(-1)
    for offset, chunk in placed:
        out[offset : offset + len(chunk)] = chunk
    return out, table.nbytes + sum(len(c) for _, c in placed)


def split(matrices: Sequence[Matrix], beside: Sequence[int], extent: Buffer) -> list[Parts]:
    """Return the two parts of every matrix as views of the extent; `beside` has the bytes of each second part.

    Raises CodecError when a part leaves the extent, overlaps one before it or the directory, or has another size.
    """
    free = directory_size(matrices)
    if len(extent) < free:
        raise CodecError(f"extent of {len(extent)} bytes is smaller than its directory of {free}")
    out: list[Parts] = []
    table = extent[: ENTRY * len(matrices)].view("<u4").reshape(len(matrices), 4)
    for m, row, want in zip(matrices, table, beside, strict=True):
        offset, size, next_to, length = (int(v) for v in row)
        if length != want:
            raise CodecError(f"what is beside {m.name} has {length} bytes, not {want}")
        for name, start, count in ((m.name, offset, size), (f"what is beside {m.name}", next_to, length)):
            if count and (start < free or start % SECTION or start + count > len(extent)):
                raise CodecError(
                    f"{name} at {start}, {count} bytes, is not in its place: on a multiple of {SECTION}, past the part "
                    f"before it, which ends at {free}, and inside the extent of {len(extent)}"
                )
            free = start + count if count else free
        out.append((extent[offset : offset + size], extent[next_to : next_to + length]))
    return out


def encode_coded(
    matrices: Sequence[Matrix], version: Version, values: Sequence[LosslessMatrix], threads: int | None
) -> tuple[Buffer, int]:
    """Encode one expert: its extent, padding included, and its payload in bytes. `threads` defaults to all cores."""
    from . import exponent_fast

    parts: list[Parts] = []
    for m, value in zip(matrices, values, strict=True):
        if value.weight.shape != (m.rows, m.cols):
            raise ValueError(f"{m.name} is {value.weight.shape}, not {(m.rows, m.cols)}")
        if m.bias and (value.bias is None or value.bias.shape != (m.rows,)):
            raise ValueError(f"{m.name} needs a bias of {m.rows} values")
        bias = value.bias if m.bias and value.bias is not None else np.empty(0, np.uint16)
        parts.append((exponent_fast.encode(value.weight, threads), np.ascontiguousarray(bias).view(np.uint8)))
    return join(matrices, parts)


def directory(matrices: Sequence[Matrix], extent: Buffer) -> list[tuple[Buffer, Bf16Bits | None]]:
    """The coded bytes and the bias of every BF16 matrix, as views of the extent. Raises CodecError as `split` does."""
    parts = split(matrices, beside(matrices), extent)
    return [(coded, bias.view("<u2") if m.bias else None) for m, (coded, bias) in zip(matrices, parts, strict=True)]


def payload(matrices: int, extent: Buffer) -> int:
    """Bytes of an extent without padding: its directory's entries, and its parts."""
    table = extent[: ENTRY * matrices].view("<u4").reshape(-1, 2)
    return table.nbytes + int(table[:, 1].sum(dtype=np.int64))


def restore_coded(
    matrices: Sequence[Matrix],
    version: Version,
    extent: Buffer,
    out: Buffer,
    threads: int | None,
    before: Callable[[int], None],
) -> None:
    """Write a stored extent to `out` in its form in memory; see Version.restore."""
    from . import exponent_fast

    parts = directory(matrices, extent)
    for section in version.sections(matrices):
        data, bias = parts[section.matrix]
        room = out[section.offset : section.end].view(np.uint16)
        if section.kind == "weight":
            before(section.matrix)
            exponent_fast.decode_into(data, room, threads)
        elif bias is not None:
            room[:] = bias


def decode_coded(matrices: Sequence[Matrix], version: Version, extent: Buffer) -> list[LosslessMatrix]:
    """Decode the matrices of one extent; biases are views of it. Raises CodecError when it is not well formed."""
    from . import exponent_fast

    out = []
    for m, (data, bias) in zip(matrices, directory(matrices, extent), strict=True):
        weight = np.empty((m.rows, m.cols), np.uint16)
        exponent_fast.decode_into(data, weight.reshape(-1))
        out.append(LosslessMatrix(weight, bias))
    return out
