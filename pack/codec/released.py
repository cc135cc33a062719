"""Released extents: convert a released matrix's codes and scales to bytes and back, and to reference values.

`ReleasedMatrix.dequantise` defines a version's weights and is the reference for every kernel: code times scale is exact
in float32 but for FP8 with float32 scales; that product, and one by an outer scale, are rounded to float32.
Extents with E4M3 codes are stored with their planes coded by fp8.py, and restored to their form in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..encodings.base import Version
from ..errors import CodecError
from ..sections import BLOCK_ROWS, Matrix
from . import affine, fp8, lossless
from .affine import section_array
from .bits import Bf16Bits, Buffer, Codes, from_blocks, join_planes

Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[np.uint8] | Floats

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NAN = 0x7F  # of E4M3, but for the sign; 255 in E8M0


def _e4m3() -> Floats:
    code = np.arange(256)
    exponent = code >> 3 & 15
    mantissa = (code & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[code & 0x7F == NAN] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


E4M3 = _e4m3()
E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
CODES = {4: E2M1, 8: E4M3}  # the values of codes, by their bits
SCALES = {"F8_E8M0": E8M0, "F8_E4M3": E4M3}  # the values of scales of one byte


@dataclass(frozen=True, slots=True)
class ReleasedMatrix:
    """One matrix of a released version with floating-point codes."""

    codes: Codes  # uint8 [rows, cols]
    scale: Raw  # [rows, groups]: bits of E8M0 or E4M3, or float32
    outer: Floats | None = None  # float32 [rows], or None without outer scales
    bias: Bf16Bits | None = None  # BF16 bits, uint16 [rows], or None

    def dequantise(self, version: Version) -> Floats:
        """The weights, float32 [rows, cols]: code * scale, times the row's outer scale where there is one."""
        scale = SCALES[version.scale_dtype][self.scale] if version.scale_dtype in SCALES else self.scale
        cols = self.codes.shape[1]
        wide = scale[:, np.arange(cols) // (version.group_size or cols)].astype(np.float32)
        values: Floats = CODES[version.bits][self.codes] * wide
        return values if self.outer is None else values * self.outer[:, None]


def decode(matrices: Sequence[Matrix], version: Version, extent: Buffer) -> list[ReleasedMatrix]:
    """The matrices of one extent; biases are views of the extent."""
    parts: list[dict[str, npt.NDArray[np.generic]]] = [{} for _ in matrices]
    for section in version.sections(matrices):
        array = section_array(extent, section)
        if section.item == 4 and not section.kind.startswith("plane"):
            array = array.view("<f4")
        parts[section.matrix][section.kind] = array
    out = []
    for m, part in zip(matrices, parts, strict=True):
        codes = join_planes([part["plane0"]], version.planes, m.rows, m.cols)  # type: ignore[list-item]
        rows = {
            k: from_blocks(v, m.rows) if v.ndim == 3 else np.repeat(v, BLOCK_ROWS, axis=0)[: m.rows]
            for k, v in part.items()
            if k in ("scale", "outer")
        }
        out.append(ReleasedMatrix(codes, rows["scale"], rows.get("outer"), part.get("bias")))  # type: ignore[arg-type]
    return out


def rooms(matrices: Sequence[Matrix], version: Version, extent: Buffer) -> list[lossless.Parts]:
    """The plane of every matrix, and all sections behind it, as views of an extent in its form in memory."""
    out: list[lossless.Parts] = []
    sections = version.sections(matrices)
    for i in range(len(matrices)):
        plane, *rest = (s for s in sections if s.matrix == i)
        out.append((extent[plane.offset : plane.end], extent[rest[0].offset : rest[-1].end]))
    return out


def encode_coded(
    matrices: Sequence[Matrix], version: Version, values: Sequence[ReleasedMatrix], threads: int | None
) -> tuple[Buffer, int]:
    """Encode one expert with each plane coded where that gains: its stored extent, and its payload in bytes."""
    parts: list[lossless.Parts] = []
    for plane, rest in rooms(matrices, version, affine.encode(matrices, version, values)):
        coded = fp8.encode(plane, threads)
        parts.append((plane if coded is None else coded, rest))
    return lossless.join(matrices, parts)


def restore_coded(
    matrices: Sequence[Matrix],
    version: Version,
    extent: Buffer,
    out: Buffer,
    threads: int | None = None,
    before: Callable[[int], None] = lambda matrix: None,
) -> list[tuple[Matrix, Buffer, int]]:
    """Write a stored extent to `out` in its form in memory, but for what is between sections.

    Returns each matrix whose plane is coded, the coded bytes, and the number of codes. Raises CodecError where the
    extent is not well formed.
    """
    places = rooms(matrices, version, out)
    parts = lossless.split(matrices, [len(rest) for _, rest in places], extent)
    found = []
    for i, ((coded, stored), (plane, rest)) in enumerate(zip(parts, places, strict=True)):
        before(i)
        if len(coded) < len(plane):
            fp8.decode_into(coded, plane, threads)
            found.append((matrices[i], coded, len(plane)))
        elif len(coded) == len(plane):
            plane[:] = coded
        else:
            raise CodecError(f"{matrices[i].name} has {len(coded)} bytes of codes, more than its {len(plane)} codes")
        rest[:] = stored
    return found


def decode_coded(matrices: Sequence[Matrix], version: Version, extent: Buffer) -> list[ReleasedMatrix]:
    """The matrices of one stored extent with coded planes. Raises CodecError when it is not well formed."""
    plain = np.zeros(version.resident_size(matrices), np.uint8)
    restore_coded(matrices, version, extent, plain)
    return decode(matrices, version, plain)
