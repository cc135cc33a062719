"""HQQ (half-quadratic quantisation, Badri and Shaji, 2023) through the hqq library. Uses no calibration.

Scales and zero points minimise an l_p norm (p < 1) of the weight error, which tolerates outliers. Its one-bit form is
worse than zeroing the weight, so `rtn` makes one bit: sign times mean magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.errors import MissingExtraError
from moepack.pack.spec import Version

from . import rtn
from .grid import Quantised, fix_scale, fix_zero, round_to_grid


def quantise_widths(weight: Tensor, moments: Tensor | None, versions: Sequence[Version]) -> dict[Version, Quantised]:
    """Quantise float32 [experts, rows, cols] at every width; reads no moments."""
    return {v: quantise(weight, v) for v in versions}


def quantise(weight: Tensor, version: Version) -> Quantised:
    """Quantise float32 [experts, rows, cols]."""
    if version.zero == "midpoint":
        return rtn.quantise(weight, version)
    experts, rows, cols = weight.shape
    tail = cols % version.group_size
    parts = [_solve(weight[..., : cols - tail], version.bits, version.group_size)] if cols > tail else []
    if tail:
        parts.append(_solve(weight[..., cols - tail :], version.bits, tail))
    scale = torch.cat([p[0].view(experts, rows, -1) for p in parts], dim=-1)
    zero = torch.cat([p[1].view(experts, rows, -1) for p in parts], dim=-1)
    return round_to_grid(weight, fix_scale(scale, version.scale_bits), fix_zero(zero, version.bits), version)


def _solve(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """HQQ's scale and zero point (in codes) for every group of a block whose columns are whole groups."""
    try:
        from hqq.core.quantize import Quantizer
    except ImportError:
        raise MissingExtraError("hqq", "build") from None
    # The library treats groups narrower than 1e-4 as constant, so scale the block near 1 by a power of two.
    unit = 2.0 ** torch.floor(torch.log2(weight.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)))
    _, meta = Quantizer.quantize(
        (weight / unit).reshape(-1, weight.shape[-1]),
        nbits=bits,
        group_size=group_size,
        axis=1,
        bitpack=False,
        compute_dtype=torch.float32,
        device=str(weight.device),
    )
    return meta["scale"].float() * unit, meta["zero"].float()
