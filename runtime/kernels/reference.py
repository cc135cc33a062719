"""The weights of an extent, in plain torch on any device: the reference for other kernels, and their fallback.

Values equal those of `Version.dequantise`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.codec import trellis
from moepack.pack.codec.released import E2M1
from moepack.pack.sections import BLOCK_ROWS
from moepack.pack.spec import Matrix, Section, Version

Sections = dict[str, Section]  # the sections of one matrix by kind: weight, plane0, plane1, scale, outer, zero, bias


def sections_of(matrices: Sequence[Matrix], version: Version) -> list[Sections]:
    """The sections (byte ranges) of each matrix in an extent."""
    by_matrix: list[Sections] = [{} for _ in matrices]
    for s in version.sections(matrices):
        by_matrix[s.matrix][s.kind] = s
    return by_matrix


def plain_weights(extent: Tensor, sections: Sequence[Sections]) -> tuple[Tensor, ...]:
    """BF16 views [rows, cols] of an extent's matrices; empty unless the version is plain BF16."""
    at = [s["weight"] for s in sections if "weight" in s]
    return tuple(extent[s.offset : s.end].view(torch.bfloat16).view(s.shape) for s in at)


def section(extent: Tensor, s: Section) -> Tensor:
    """One section of an extent (uint8, on any device): a bias is BF16 [rows], others have rows padded to 16.

    Planes (bits of codes) are uint8 [rows, 4 * words]: packing is little-endian, so bytes in order hold codes in order.
    Scales of 16 bits are BF16 [rows, groups], those of 32 float32, others uint8; zero points are uint8 [rows, groups].
    """
    raw = extent[s.offset : s.end]
    if s.kind == "bias":
        return raw.view(torch.bfloat16)
    if len(s.shape) < 3:  # a number for 16 rows
        return raw.view(torch.float32).view(s.shape[0], -1).repeat_interleave(BLOCK_ROWS, dim=0)
    blocks, n, side = s.shape
    rows = raw.view(blocks, n, side, s.item).transpose(1, 2).reshape(blocks * side, n * s.item)
    if s.item == 2:
        return rows.view(torch.bfloat16)
    return rows.view(torch.float32) if s.item == 4 and s.kind == "scale" else rows


def unpack(plane: Tensor, bits: int, cols: int) -> Tensor:
    """Return the codes, uint8 [rows, cols], of a plane's bytes [rows, n]."""
    if bits == 8:
        return plane[:, :cols]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    codes = (plane[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :cols]


def dequantise(extent: Tensor, sections: Sections, matrix: Matrix, version: Version, dtype: torch.dtype) -> Tensor:
    """Return a matrix of a quantised extent (uint8) as [rows, cols] in `dtype`.

    In float32 values are those of `Version.dequantise`; in another dtype they are these, rounded.
    """
    codes = unpack(section(extent, sections["plane0"]), version.planes[0], matrix.cols)
    for p, bits in enumerate(version.planes[1:], 1):
        part = unpack(section(extent, sections[f"plane{p}"]), bits, matrix.cols)
        codes = codes | part << sum(version.planes[:p])
    scale = _scale(section(extent, sections["scale"]), version)
    outer = section(extent, sections["outer"]) if "outer" in sections else None
    size = version.group_size or matrix.cols
    if version.zero == "none" and not version.trellis:
        values = _floats(codes, version.bits).mul_(scale.repeat_interleave(size, dim=1)[:, : matrix.cols])
        if outer is not None:
            values.mul_(outer)
        return values[: matrix.rows].to(dtype)
    if outer is not None:
        scale = scale * outer  # a power of two
    if version.trellis:
        codes = trellis.levels(codes.int(), version.bits)
        zero = torch.full_like(scale, trellis.ZERO)
    elif version.stores_zeros:
        zero = section(extent, sections["zero"]).float() * 2.0 ** (version.bits - 8)
    else:
        middle = 2 ** (version.bits - 1) if version.zero == "symmetric" else (2**version.bits - 1) / 2
        zero = torch.full_like(scale, middle)
    spread = [t.repeat_interleave(size, dim=1)[:, : matrix.cols] for t in (zero, scale)]
    return codes.float().sub_(spread[0]).mul_(spread[1])[: matrix.rows].to(dtype)


def _scale(raw: Tensor, version: Version) -> Tensor:
    """Scales in float32."""
    if version.scale_bits == 8:
        return ((raw.int() << 18) + 0x3F800000).view(torch.float32)  # three bits of exponent, from 1 on
    if version.scale_dtype == "F16":
        return raw.view(torch.float16).float()
    if version.scale_dtype == "F8_E4M3":
        return raw.view(torch.float8_e4m3fn).float()
    if version.scale_dtype == "F8_E8M0":
        return (raw.int() << 23).clamp_(min=1 << 22).view(torch.float32)  # 0 is 2^-127, a denormal number
    return raw.float()


def _floats(codes: Tensor, bits: int) -> Tensor:
    """The values of E2M1 or E4M3 codes, float32."""
    if bits == 8:
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    return torch.from_numpy(E2M1).to(codes.device)[codes.int()]
