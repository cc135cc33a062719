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
    """Every code but those of NaN, scales of one size; and a few that are the least, zero or denormal."""
    rng = np.random.default_rng(seed)
    shape = (m.rows, -(-m.cols // version.group_size) if version.group_size else 1)
    codes = rng.integers(0, 1 << version.bits, (m.rows, m.cols)).astype(np.uint8)
    bias = rng.integers(0x3C00, 0x3E00, m.rows).astype(np.uint16) if m.bias else None
    if version.zero == "stored":
        scale = rng.integers(0x3C00, 0x4000, shape).astype(np.uint16)
        zero = (rng.integers(0, 1 << version.bits, shape) << (8 - version.bits)).astype(np.uint8)
        return AffineMatrix(codes, scale, zero, bias)
    if version.bits == 8:
        codes -= codes & 0x7F == 0x7F
    outer = None
    block = np.arange(m.rows) // BLOCK_ROWS
    if version.scale_dtype == "F32":
        scale = rng.uniform(1e-4, 3e-4, shape).astype(np.float32)
        scale = scale[::BLOCK_ROWS][block] if version.group_size else scale
    else:
        size = {"F8_E8M0": (118, 123), "F8_E4M3": (0x40, 0x60)}[version.scale_dtype]
        scale = np.where(rng.random(shape) < 0.03, rng.integers(0, 3), rng.integers(*size, shape)).astype(np.uint8)
    if "outer" in {s.kind for s in version.sections((m,))}:
        outer = rng.uniform(1e-3, 3e-3, block[-1] + 1).astype(np.float32)[block]
    return ReleasedMatrix(codes, scale, outer, bias)


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
