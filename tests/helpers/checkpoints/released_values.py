"""Random matrices of every released version."""

import numpy as np
import torch

from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.codec.released import ReleasedMatrix
from moepack.pack.spec import BLOCK_ROWS, Matrix, Version

NAMES = [
    ("mxfp4", 32), ("nvfp4", 16), ("mxfp8", 32), ("fp8", 128), ("fp8", 32), ("fp8row", 0),
    ("int4", 32), ("int8", 128), ("int4fp16", 128), ("int8fp16", 32),
]  # fmt: skip


def random_released(m: Matrix, version: Version, seed: int) -> AffineMatrix | ReleasedMatrix:
    """A matrix with random codes, all of them numbers, and scales between about 1/128 and 2."""
    rng = np.random.default_rng(seed)
    groups = -(-m.cols // version.group_size) if version.group_size else 1
    codes = rng.integers(0, 1 << version.bits, (m.rows, m.cols)).astype(np.uint8)
    bias = rng.integers(0x3C00, 0x4000, m.rows).astype(np.uint16) if m.bias else None
    if version.zero == "stored":
        scale = rng.integers(0x3C00, 0x4000, (m.rows, groups)).astype(np.uint16)
        zero = (rng.integers(0, 1 << version.bits, (m.rows, groups)) << (8 - version.bits)).astype(np.uint8)
        return AffineMatrix(codes, scale, zero, bias)
    if version.bits == 8:
        codes[codes & 0x7F == 0x7F] = 0
    if version.scale_dtype != "F32":
        low, high = (121, 128) if version.scale_dtype == "F8_E8M0" else (8, 0x40)
        bits = rng.integers(low, high, (m.rows, groups)).astype(np.uint8)
        outer = np.full(m.rows, rng.uniform(0.1, 1), np.float32) if version.name == "nvfp4" else None
        return ReleasedMatrix(codes, bits, outer, bias)
    scale32 = rng.uniform(0.01, 2, (m.rows, groups)).astype(np.float32)
    if version.group_size:
        scale32 = np.repeat(scale32[::BLOCK_ROWS], BLOCK_ROWS, axis=0)[: m.rows]
    return ReleasedMatrix(codes, scale32, None, bias)


def gaussian_released(m: Matrix, version: Version, seed: int) -> ReleasedMatrix:
    """E4M3 codes of normally distributed weights: the greatest of those that share a scale stands for 448 or less."""
    w = torch.randn(m.rows, m.cols, generator=torch.Generator().manual_seed(seed))
    width = version.group_size or m.cols
    most = torch.nn.functional.pad(w.abs(), (0, -m.cols % width)).view(m.rows, -1, width).amax(2)
    if version.name == "fp8":
        most = torch.cat([x.amax(0, keepdim=True).expand_as(x) for x in most.split(max(BLOCK_ROWS, width))])
    scale = most / 448
    if version.name == "mxfp8":
        scale = torch.exp2(torch.log2(scale).ceil())
    codes = (w / scale.repeat_interleave(width, 1)[:, : m.cols]).to(torch.float8_e4m3fn).view(torch.uint8)
    stored = (torch.log2(scale) + 127).to(torch.uint8) if version.name == "mxfp8" else scale
    return ReleasedMatrix(codes.numpy(), stored.numpy(), None, np.arange(m.rows, dtype=np.uint16) if m.bias else None)
