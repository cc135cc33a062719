"""Random matrices of every version that has codes, for benchmarks and tests."""

import numpy as np
import torch

from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.codec.bits import Bf16Bits
from moepack.pack.codec.released import ReleasedMatrix
from moepack.pack.codec.trellis import DEVIATION
from moepack.pack.spec import BLOCK_ROWS, Matrix, Version

Coded = AffineMatrix | ReleasedMatrix


def bf16(values: torch.Tensor) -> Bf16Bits:
    """Their bits, rounded."""
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def coded(m: Matrix, version: Version, seed: int, small: float = 0.03) -> Coded:
    """Any codes, and what stands beside them as in a trained matrix.

    Scales are of one size, some negative where they may be; of those in a byte, the share `small` is far smaller, down
    to zero and denormal numbers. Zero points lie about the middle of the codes.
    """
    rng = np.random.default_rng(seed)
    shape = (m.rows, -(-m.cols // version.group_size) if version.group_size else 1)
    codes = rng.integers(0, 1 << version.bits, (m.rows, m.cols)).astype(np.uint8)
    bias = bf16(torch.from_numpy(rng.normal(0, 0.1, m.rows))) if m.bias else None
    if version.zero == "none" and not version.trellis:
        return _released(m, version, codes, bias, shape, small, rng)
    values = torch.from_numpy(rng.uniform(0.01, 0.03, shape) * rng.choice([-1, 1, 1, 1], shape))
    if version.trellis:  # levels go to some hundreds
        values /= DEVIATION
    if version.scale_bits == 8:  # five bits of mantissa, none negative
        values[torch.from_numpy(rng.random(shape) < small)] = 0.0002
    scale = values.half().view(torch.uint16).numpy() if version.scale_dtype == "F16" else bf16(values)
    if version.scale_bits == 8:
        scale &= 0x7FFC
    zero = rng.integers(64, 192, shape).astype(np.uint8) if version.zero == "stored" else None
    return AffineMatrix(codes, scale, zero, bias)


def _released(
    m: Matrix,
    version: Version,
    codes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    bias: Bf16Bits | None,
    shape: tuple[int, int],
    small: float,
    rng: np.random.Generator,
) -> ReleasedMatrix:
    """With every code but those of NaN."""
    if version.bits == 8:
        codes -= codes & 0x7F == 0x7F
    block = np.arange(m.rows) // BLOCK_ROWS
    if version.scale_dtype == "F32":
        scale = rng.uniform(1e-4, 3e-4, shape).astype(np.float32)
        return ReleasedMatrix(codes, scale[::BLOCK_ROWS][block] if version.group_size else scale, None, bias)
    size = {"F8_E8M0": (118, 123), "F8_E4M3": (0x40, 0x60)}[version.scale_dtype]
    bits = np.where(rng.random(shape) < small, rng.integers(0, 3), rng.integers(*size, shape)).astype(np.uint8)
    outer = None
    if "outer" in {s.kind for s in version.sections((m,))}:
        outer = rng.uniform(1e-3, 3e-3, block[-1] + 1).astype(np.float32)[block]
    return ReleasedMatrix(codes, bits, outer, bias)


def gaussian(m: Matrix, version: Version, seed: int) -> ReleasedMatrix:
    """E4M3 codes of normally distributed weights: the greatest of those that share a scale stands for 448 or less."""
    w = torch.randn(m.rows, m.cols, generator=torch.Generator().manual_seed(seed)) / 50
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
