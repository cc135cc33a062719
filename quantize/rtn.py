"""Round to nearest: the reference for the other methods. Uses no calibration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.spec import Version

from .grid import Quantised, fix_scale, fix_zero, grouped, round_to_grid


def quantise_widths(weight: Tensor, moments: Tensor | None, versions: Sequence[Version]) -> dict[Version, Quantised]:
    """Quantise float32 [experts, rows, cols] at every width; reads no moments."""
    return {v: quantise(weight, v) for v in versions}


def quantise(weight: Tensor, version: Version) -> Quantised:
    """Quantise float32 [experts, rows, cols]; each group's grid spans its minimum, its maximum and 0.

    At one bit, where a grid from minimum to maximum would be worse than zeroing the weights, the levels are plus and
    minus the group's mean magnitude.
    """
    if version.zero == "midpoint":
        used = grouped(torch.ones_like(weight[:1, :1]), version.group_size).sum(-1)
        scale = fix_scale(2 * grouped(weight.abs(), version.group_size).sum(-1) / used, version.scale_bits)
        return round_to_grid(weight, scale, None, version)
    parts = grouped(weight, version.group_size)
    low = parts.amin(-1).clamp_(max=0)
    high = parts.amax(-1).clamp_(min=0)
    top = (1 << version.bits) - 1
    scale = fix_scale((high - low) / top, version.scale_bits)
    zero = (-low / scale.float()).round().clamp(0, top)
    return round_to_grid(weight, scale, fix_zero(zero, version.bits), version)
