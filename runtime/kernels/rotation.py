"""Rotations of `down`'s inputs by torch, for GPUs: one product with Hadamard's matrix for all slots, without waiting.

The C kernel (c/small.c) rotates in place. Here a product sums in another order; for blocks that are no square it is
rounded before a factor of the root of 2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.codec.rotation import norm, signs
from moepack.pack.spec import Rotation, Version

from .forms import VERSION_BITS


class SlotRotation:
    """The rotations of a layer's versions, on a device."""

    def __init__(self, versions: Sequence[Version], cols: int, device: torch.device) -> None:
        """Make what `run` needs, so that a captured pass copies nothing from the host."""
        self._of = [v.rotation for v in versions]  # by a version's number
        self._cols = cols
        found = dict.fromkeys(r for r in self._of if r is not None)
        with torch.inference_mode(False):
            self._has = {r: torch.tensor([own == r for own in self._of], device=device) for r in found}
        for rotation in found:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                _tensors(rotation, cols, device, dtype)

    def run(self, x: Tensor, index: Tensor, table: Tensor, served: Sequence[int]) -> Tensor:
        """Return x [slots, cols] with the rows rotated whose expert is in a rotated version.

        `index` is int64 [slots]; rows past the last expert are undefined. `table` is the handle table, int64 [experts];
        `served` are the version numbers in it.
        """
        if not len(x):
            return x
        for rotation, has in self._has.items():
            if not any(self._of[n] == rotation for n in served):
                continue
            sign, square = _tensors(rotation, self._cols, x.device, x.dtype)
            made = ((x * sign).view(-1, rotation.block) @ square).view(x.shape)
            if (rest := norm(rotation.block) / _scale(rotation.block)) != 1:
                made *= rest
            if all(self._of[n] == rotation for n in served):
                return made
            number = table[index.clamp(max=len(table) - 1)] & ((1 << VERSION_BITS) - 1)
            x = torch.where(has[number.clamp(max=len(has) - 1)][:, None], made, x)
        return x


def _scale(block: int) -> float:
    """A power of two near `norm`: FP16 would not hold the sums without it."""
    return 2.0 ** -(block.bit_length() // 2)


@functools.cache
def _tensors(rotation: Rotation, cols: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The columns' signs [cols] and Hadamard's matrix [block, block] times `_scale`."""
    with torch.inference_mode(False):
        square = torch.ones(1, 1)
        while len(square) < rotation.block:
            square = torch.cat([torch.cat([square, square], 1), torch.cat([square, -square], 1)])
        sign = torch.from_numpy(signs(cols, rotation.seed).copy())
        return sign.to(device, dtype), (square * _scale(rotation.block)).to(device, dtype)
