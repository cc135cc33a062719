"""Dequantisation in plain torch, on any device: the reference for every other kernel, and what serves without one.

Reads an extent's sections as they are stored. Equal, value for value, to `moepack.pack.codec.affine`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.pack.spec import Matrix, Section, Version


def section(extent: Tensor, s: Section) -> Tensor:
    """One section of an extent (uint8, on any device): a bias as BF16 [rows], others [rows padded to 16, ...].

    Planes come as uint8 [rows, 4 * words]: the packing is little-endian, so bytes in order hold codes in order. Scales
    are BF16 [rows, groups], zeros uint8 [rows, groups].
    """
    raw = extent[s.offset : s.end]
    if len(s.shape) == 1:
        return raw.view(torch.bfloat16)
    blocks, n, side = s.shape
    rows = raw.view(blocks, n, side, s.item).transpose(1, 2).reshape(blocks * side, n * s.item)
    return rows.view(torch.bfloat16) if s.item == 2 else rows


def unpack(plane: Tensor, bits: int, cols: int) -> Tensor:
    """Codes uint8 [rows, cols] of a plane's bytes [rows, n]."""
    if bits == 8:
        return plane[:, :cols]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    codes = (plane[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :cols]


def dequantise(
    extent: Tensor, sections: dict[str, Section], matrix: Matrix, version: Version, dtype: torch.dtype
) -> Tensor:
    """A matrix of an affine extent as [rows, cols] in `dtype`: exact in float32, rounded once in anything narrower.

    Args:
        extent: uint8, the whole extent.
        sections: the matrix's sections by kind.
        matrix: its shape.
        version: its encoding.
        dtype: of the result.
    """
    codes: Tensor | None = None
    shift = 0
    for p, bits in enumerate(version.planes):
        part = unpack(section(extent, sections[f"plane{p}"]), bits, matrix.cols)
        codes = part if codes is None else codes | part << shift
        shift += bits
    assert codes is not None
    scale = section(extent, sections["scale"]).float()
    if version.stores_zeros:
        zero = section(extent, sections["zero"]).float() * 2.0 ** (version.bits - 8)
    else:
        zero = torch.full_like(scale, ((1 << version.bits) - 1) / 2)
    size = version.group_size
    spread = [t.repeat_interleave(size, dim=1)[:, : matrix.cols] for t in (zero, scale)]
    return codes.float().sub_(spread[0]).mul_(spread[1])[: matrix.rows].to(dtype)
