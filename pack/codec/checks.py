"""Rules of the format that need every byte: for `verify`, not for loading.

A digest shows that bytes did not change, not that FORMAT.md allows them. These rules fix every byte, so that all
readers agree. Decoders do not rely on these rules: they check everything that their own safety needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..encodings.base import Version
from ..errors import Kind
from ..sections import BLOCK_ROWS, PAGE, SECTION, Matrix, align
from . import lossless, released
from .affine import section_array
from .bits import Buffer
from .exponent import CODED, ESCAPE, LANE_WORDS, RAW, TILE, WIDE, WIDE_WORDS, CodedMatrix, parse

Wrong = tuple[Kind, str]


def check_affine(matrices: Sequence[Matrix], version: Version, extent: Buffer) -> Iterator[Wrong]:
    """Find numbers that are not finite, and padding that is not zero, in an extent of the right size."""
    sections = version.sections(matrices)
    ends = [0, *(s.end for s in sections)]
    if _any(extent, zip(ends, [*(s.offset for s in sections), len(extent)], strict=True)):
        yield "padding", "bytes between its sections, or after them, are not zero"
    for section in sections:
        m = matrices[section.matrix]
        array = section_array(extent, section)
        if section.kind == "bias":
            continue
        if version.scale_bits == 8:  # scales of any byte are numbers
            if section.kind == "outer" and not _powers(array):
                yield "number", f"{m.name} has an outer scale that is no power of two from 2^-126 to 2^120"
        elif section.kind in ("scale", "outer") and not _finite(
            array, "F32" if section.item == 4 else version.scale_dtype
        ):
            yield "number", f"{m.name} has a scale that is not finite"
        if section.kind == "plane0" and version.zero == "none" and version.bits == 8 and not _finite(array, "F8_E4M3"):
            yield "number", f"{m.name} has a code that is not a number"
        if len(section.shape) < 3:  # one number for a block of rows
            continue
        if m.rows % BLOCK_ROWS and array[-1, :, m.rows % BLOCK_ROWS :].any():
            yield "padding", f"{section.kind} of {m.name}: rows past the last are not zero"
        if section.kind.startswith("plane"):
            bits = m.cols * version.at(section.matrix).planes[int(section.kind[5:])] % 32
            if bits and (array[:, -1] >> np.uint32(bits)).any():  # type: ignore[operator]
                yield "padding", f"{section.kind} of {m.name}: bits past the last column are not zero"


# By dtype of a number: the bits that tell whether it is finite, and their value where it is not.
_NOT_FINITE: dict[str, tuple[np.unsignedinteger[Any], int]] = {
    "BF16": (np.uint16(0x7F80), 0x7F80),
    "F16": (np.uint16(0x7C00), 0x7C00),
    "F32": (np.uint32(0x7F800000), 0x7F800000),
    "F8_E4M3": (np.uint8(0x7F), 0x7F),
    "F8_E8M0": (np.uint8(0xFF), 0xFF),
}


def _finite(array: npt.NDArray[Any], dtype: str) -> bool:
    mask, value = _NOT_FINITE[dtype]
    return not bool((array.view(mask.dtype) & mask == value).any())


def _powers(outer: npt.NDArray[Any]) -> bool:
    exponent = outer >> 23
    return not bool((outer & 0x7FFFFF).any() or exponent.min() < 1 or exponent.max() > 120 + 127)


def _any(extent: Buffer, gaps: Iterator[tuple[int, int]]) -> bool:
    return any(bool(extent[begin:end].any()) for begin, end in gaps)


def check_lossless(matrices: Sequence[Matrix], extent: Buffer) -> Iterator[Wrong]:
    """Find wrong offsets, nonzero padding and unsorted escaped exponents in a lossless extent that decodes."""
    yield from _check_places(matrices, lossless.beside(matrices), extent)
    for m, (data, _) in zip(matrices, lossless.directory(matrices, extent), strict=True):
        for kind, message in check_coded(parse(data, m.weights)):
            yield kind, f"{m.name}: {message}"


def check_released(matrices: Sequence[Matrix], version: Version, extent: Buffer) -> Iterator[Wrong]:
    """Find what `check_affine` and `check_lossless` find, in a stored extent with coded planes.

    Raises CodecError where the extent is not well formed.
    """
    plain = np.zeros(version.resident_size(matrices), np.uint8)
    coded = released.restore_coded(matrices, version, extent, plain)
    yield from _check_places(matrices, [len(rest) for _, rest in released.rooms(matrices, version, plain)], extent)
    yield from check_affine(matrices, version, plain)
    for m, data, codes in coded:
        for kind, message in check_coded(parse(data, codes, fp8=True)):
            yield kind, f"{m.name}: {message}"


def _check_places(matrices: Sequence[Matrix], beside: Sequence[int], extent: Buffer) -> Iterator[Wrong]:
    """Find wrong offsets, and padding that is not zero, in an extent that `lossless.split` splits."""
    table = extent[: lossless.ENTRY * len(matrices)].view("<u4").reshape(-1, 2)
    ends = [table.nbytes]
    at = align(table.nbytes, SECTION)
    begins = []
    for i, (offset, size) in enumerate(table.tolist()):
        if i % 2 and not beside[i // 2]:
            if offset:
                yield "offsets", f"nothing is beside {matrices[i // 2].name}, which has an offset of that"
            continue
        if offset != at:
            yield "offsets", f"part {i} begins at {offset}, its place is {at}"
            return
        begins.append(offset)
        ends.append(offset + size)
        at = align(offset + size, SECTION)
    if len(extent) != align(at, PAGE):
        yield "size", f"{len(extent)} bytes, where its parts end at {ends[-1]}"
    if _any(extent, zip(ends, [*begins, len(extent)], strict=True)):
        yield "padding", "bytes between its parts, or after them, are not zero"


def check_coded(coded: CodedMatrix) -> Iterator[Wrong]:
    """Find padding that is not zero and unordered patches, in a coded matrix, or coded FP8 codes, that decode."""
    unused = coded.code.length == 0
    unused[ESCAPE] = True
    if not coded.fp8 and coded.code.exponent[unused].any():
        yield "padding", "the exponent of a symbol that has none is not zero"
    starts = coded.patch_start.astype(np.int64)
    tile = np.repeat(np.arange(coded.tiles), starts[1:] - starts[:-1])
    position = (coded.patches & np.uint32(0xFFFF)).astype(np.int64)
    if (np.diff(tile * TILE + position) <= 0).any():
        yield "order", "patches of a tile do not stand by rising position"
    if _loose_bits(coded):
        yield "padding", "bits past the end of a tile are not zero"
    if coded.fp8 and coded.weights % 2 and coded.plane[-1] >> 4:
        yield "padding", "the half byte past the last sign and mantissa is not zero"


def _loose_bits(coded: CodedMatrix) -> bool:
    begins = coded.tile_start[:-1].astype(np.int64)
    last = coded.stream[coded.tile_start[1:].astype(np.int64) - 1]
    first = coded.stream[begins]
    mode = first >> np.uint32(16)
    total = 32 * (first & np.uint32(0xFFFF)).astype(np.int64)
    for coded_mode, words, kind in ((CODED, LANE_WORDS, "u1"), (WIDE, WIDE_WORDS, "<u2")):
        of_mode = mode == coded_mode
        lengths = coded.stream[begins[of_mode][:, None] + np.arange(1, words)]
        total[of_mode] += lengths.view(kind).sum(axis=1, dtype=np.int64)
    ones: npt.NDArray[np.uint64] = (np.uint64(1) << (-total % 32).astype(np.uint64)) - np.uint64(1)
    if (last & ones)[mode != RAW].any():
        return True
    per_word = 8 if coded.fp8 else 4
    rest = coded.weights % TILE % per_word
    return bool(rest and mode[-1] == RAW and int(last[-1]) >> 32 // per_word * rest)
