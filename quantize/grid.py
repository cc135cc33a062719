"""The affine grid in torch: batches of quantised matrices, their values, and rounding to a grid.

`moepack.pack.codec.affine.AffineMatrix.dequantise` is the reference for `dequantise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.codec.affine import AffineMatrix, levels, unstored_zero
from moepack.pack.codec.bits import Bf16Bits
from moepack.pack.spec import BLOCK_ROWS, Version

_TOGETHER = 1 << 17  # elements, 512 KiB of float32; larger temporaries cost a page fault each 4 KiB


@dataclass(frozen=True, slots=True)
class Quantised:
    """A batch of matrices in an affine version."""

    codes: Tensor  # uint8 [experts, rows, cols]
    scale: Tensor  # bfloat16 [experts, rows, groups]
    zero: Tensor | None  # uint8 [experts, rows, groups] in units of 2**(bits-8), or None for "midpoint"

    def map(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        """Apply `change` to each tensor, and return the new batch."""
        return Quantised(change(self.codes), change(self.scale), None if self.zero is None else change(self.zero))

    def replaced(self, experts: Mapping[int, int], other: Quantised) -> Quantised:
        """This batch with some experts taken from `other`: position here -> position there."""
        parts = [other.one(experts[i]) if i in experts else self.one(i) for i in range(len(self.codes))]
        return join(parts)

    def one(self, expert: int) -> Quantised:
        """One expert's matrix, as a batch."""
        return self.map(lambda tensor: tensor[expert : expert + 1])

    def matrix(self, expert: int, bias: Bf16Bits | None = None) -> AffineMatrix:
        """One expert's matrix for `pack`."""
        return AffineMatrix(
            self.codes[expert].cpu().numpy(),
            self.scale[expert].cpu().contiguous().view(torch.uint16).numpy(),
            None if self.zero is None else self.zero[expert].cpu().numpy(),
            bias,
        )


def join(parts: Sequence[Quantised]) -> Quantised:
    """The experts of several batches as one batch."""
    zero = [p.zero for p in parts if p.zero is not None]
    return Quantised(
        torch.cat([p.codes for p in parts]), torch.cat([p.scale for p in parts]), torch.cat(zero) if zero else None
    )


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """Weights [..., cols] as [..., groups, group_size]; zeros fill a last partial group."""
    if pad := -weight.shape[-1] % group_size:
        weight = torch.nn.functional.pad(weight, (0, pad))
    return weight.reshape(*weight.shape[:-1], -1, group_size)


def zero_values(scale: Tensor, zero: Tensor | None, version: Version) -> Tensor:
    """Zero points in units of a code, float32, shaped like `scale`."""
    if zero is None:
        return torch.full_like(scale, unstored_zero(version), dtype=torch.float32)
    return zero.float() * 2.0 ** (version.bits - 8)


def fix_zero(zero: Tensor, bits: int) -> Tensor:
    """Round zero points in units of a code to their stored form, uint8."""
    return (zero * 2.0 ** (8 - bits)).round().clamp(0, 255).to(torch.uint8)


def fix_scale(scale: Tensor, bits: int = 16) -> Tensor:
    """Round scales to bfloat16; with 8 `bits` to five bits behind the first, none below 0 (`raised` fits the range).

    Zero becomes the least normal number, so that groups of zeros can be divided by it.
    """
    tiny = torch.finfo(torch.bfloat16).tiny
    if bits == 8:
        part, exponent = torch.frexp(scale.float().clamp_(min=tiny))
        scale = torch.ldexp((part * 64).round_(), exponent - 6)
    return torch.where(scale == 0, tiny, scale).to(torch.bfloat16)


def least_beside(scale: Tensor) -> Tensor:
    """The least scale that a byte holds beside the greatest of 16 rows: float32 [.., rows, 1], of scales [.., rows, n].

    A byte has eight powers of two (FORMAT.md, "Scales of a byte").
    """
    rows = scale.shape[-2]
    blocks = torch.nn.functional.pad(scale.amax(-1), (0, -rows % BLOCK_ROWS)).unflatten(-1, (-1, BLOCK_ROWS))
    exponent = torch.frexp(blocks.amax(-1))[1] - 8  # the greatest is in [2^7, 2^8) of the least
    least = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return least.repeat_interleave(BLOCK_ROWS, -1)[..., :rows, None]


def raised(weight: Tensor, q: Quantised, version: Version) -> Quantised:
    """Raise scales of a byte that are too small beside the greatest of their 16 rows, and round their weights anew.

    Zero points there become whole codes, so that zeros stay zeros. `weight` is float32 [experts, rows, cols].
    """
    scale = q.scale.float()
    least = least_beside(scale)
    few = scale < least
    if not few.any():
        return q
    larger = scale.maximum(least).to(torch.bfloat16)
    zero = q.zero
    if zero is not None:
        top = (1 << version.bits) - 1
        whole = fix_zero(zero_values(q.scale, zero, version).round().clamp(0, top), version.bits)
        zero = torch.where(few, whole, zero)
    made = round_to_grid(weight, larger, zero, version)
    wide = few.repeat_interleave(version.group_size, -1)[..., : weight.shape[-1]]
    return Quantised(torch.where(wide, made.codes, q.codes), larger, zero)


def round_to_grid(weight: Tensor, scale: Tensor, zero: Tensor | None, version: Version) -> Quantised:
    """The nearest codes for weights float32 [experts, rows, cols], given stored scales and zero points."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    top = (1 << version.bits) - 1
    for at in _parts(weight):
        part = grouped(weight[at], version.group_size) / scale[at].float()[..., None]
        part.add_(zero_values(scale[at], None if zero is None else zero[at], version)[..., None])
        codes[at] = part.round_().clamp_(0, top).flatten(-2)[..., : weight.shape[-1]]
    return Quantised(codes, scale, zero)


def with_zeros(weight: Tensor, q: Quantised, version: Version, symmetric: bool) -> Quantised:
    """Round a batch's zero points to whole codes and its weights to that grid; `symmetric`: to the middle code.

    A symmetric grid reaches the group's largest weight on either side. Otherwise scales stay, and so do codes of groups
    whose zero point is whole. `weight` is float32 [experts, rows, cols].
    """
    if q.zero is None:
        return q
    top = (1 << version.bits) - 1
    middle = 1 << (version.bits - 1)
    if symmetric:
        parts = grouped(weight, version.group_size)
        low = parts.amin(-1).clamp_(max=0)
        high = parts.amax(-1).clamp_(min=0)
        scale = fix_scale(torch.maximum(high / (top - middle), -low / middle), version.scale_bits)
        return round_to_grid(weight, scale, fix_zero(torch.full_like(scale.float(), middle), version.bits), version)
    zero = fix_zero(zero_values(q.scale, q.zero, version).round().clamp(0, top), version.bits)
    made = round_to_grid(weight, q.scale, zero, version)
    same = (zero == q.zero).repeat_interleave(version.group_size, -1)[..., : weight.shape[-1]]
    return Quantised(torch.where(same, q.codes, made.codes), q.scale, zero)


def dequantise(q: Quantised, version: Version) -> Tensor:
    """The values of a batch, float32 [experts, rows, cols], exact."""
    out = torch.empty(q.codes.shape, dtype=torch.float32, device=q.codes.device)
    for at in _parts(out):
        zero = zero_values(q.scale[at], None if q.zero is None else q.zero[at], version)
        values = grouped(levels(q.codes[at], version).float(), version.group_size)
        values.sub_(zero[..., None]).mul_(q.scale[at].float()[..., None])
        out[at] = values.flatten(-2)[..., : out.shape[-1]]
    return out


def _parts(matrices: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield indexes (expert, rows) that cut [experts, rows, cols] into parts that fit a CPU core's cache."""
    experts, rows, cols = matrices.shape
    step = rows if matrices.is_cuda else max(1, _TOGETHER // max(1, cols))
    for e in range(experts):
        for start in range(0, rows, step):
            yield e, slice(start, start + step)
