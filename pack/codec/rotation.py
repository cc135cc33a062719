"""The rotation of `down`'s input (FORMAT.md, "Rotated versions"): random signs, then Hadamard's matrix by blocks.

Additions are made in one order, so NumPy's, torch's and the C kernel's float32 results have the same bits, whatever
rows are rotated at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..encodings.base import Rotation, Version

Rows = Any  # a NumPy array or a torch tensor, [..., cols]


@lru_cache(maxsize=64)
def signs(cols: int, seed: int) -> npt.NDArray[np.float32]:
    """The sign of each column, 1 or -1, float32 [cols], read-only: bit 0 of Murmur3's mix of seed and column."""
    h = (seed + np.arange(cols, dtype=np.uint64) * 0x9E3779B9).astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    out = 1 - 2 * (h & 1).astype(np.float32)
    out.setflags(write=False)
    return out


def norm(block: int) -> float:
    """The factor that makes Hadamard's matrix of a block orthogonal; kernels round it to float32."""
    return float(1 / np.sqrt(block))


def rotate(x: Rows, rotation: Rotation, back: bool = False) -> Rows:
    """Rotate the rows of x [..., cols], or turn rotated ones `back`; a new array, float32 as x.

    `x` is a NumPy array or a torch tensor, contiguous: inputs, or weights, of which W x = rotate(W) rotate(x).
    Raises ValueError for columns that are not whole blocks.
    """
    if x.shape[-1] % rotation.block:
        raise ValueError(f"{x.shape[-1]} columns are not whole blocks of {rotation.block}")
    sign: Rows = signs(x.shape[-1], rotation.seed)
    if not isinstance(x, np.ndarray):
        import torch

        sign = torch.from_numpy(sign.copy()).to(x.device)
    out = x * 1.0 if back else x * sign
    h = 1
    while h < rotation.block:
        pairs = out.reshape(-1, 2, h)  # a view
        first = pairs[:, 0]
        second = pairs[:, 1]
        low = first + second
        high = first - second
        pairs[:, 0], pairs[:, 1] = low, high
        h *= 2
    out *= np.float32(norm(rotation.block)).item()
    if back:
        out *= sign
    return out


def turned_back(version: Version, matrix: int, stored: Rows) -> Rows:
    """Undo the rotation of weights from `version.at(matrix).dequantise`: return [rows, cols] for unrotated inputs."""
    return rotate(stored, version.rotation, back=True) if matrix == 1 and version.rotation is not None else stored
