"""Lanes, the rows of a matrix at several widths side by side, and the search for a group's grids.

A lane is one row at one width. Matrices are transposed, [experts, cols, lanes], so that a column is contiguous and a
step along the columns serves all rows and widths at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.pack.spec import Version

from .grid import fix_scale
from .methods import FREE, SYMMETRIC

# Shares of the group's range that a search starts from, and least-squares steps from the best of them. Measured at 2
# bits: five starts and five steps gain 0.5 %, three starts and one step lose 3 %; a fine comb without steps loses 8 %.
STARTS = (0.95, 0.8, 0.65)
FINE_STARTS = (1.02, 1.0, 0.97)  # for more than FINE codes: at 8 bits, clipping by STARTS gives 4.5 times the error
FINE = 16
ROUNDS = 3
# Matrix products add up the lanes beyond a multiple of LANE in another order, so rows are padded to one.
LANE = 64
_CHUNK = 1 << 17  # elements, 512 KiB of float32: a few fit a core's cache


@dataclass(frozen=True, slots=True)
class Lanes:
    """Constants of each lane."""

    top: Tensor  # float32 [lanes], the largest code
    unit: Tensor  # float32 [lanes], steps of a zero point in one code
    most: Tensor  # float32 [lanes], the largest zero point in these steps
    middle: Tensor  # float32 [lanes], the zero point of `midpoint`
    # Bool [lanes], whether the zero point is the middle of the codes; None if no lane has that.
    midpoint: Tensor | None
    scale_bits: int = 16  # of every lane's scales

    @staticmethod
    def of(versions: Sequence[Version], rows: int, device: torch.device, zeros: str = FREE) -> Lanes:
        """The lanes of a matrix's rows, version after version. `zeros`: which zero points, one of `methods.ZEROS`."""
        symmetric = zeros == SYMMETRIC
        (scale_bits,) = {v.scale_bits for v in versions}

        def spread(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).repeat_interleave(rows)

        bits = spread([v.bits for v in versions])
        top = 2.0**bits - 1
        unit = 2.0 ** (8 - bits)
        middle = spread([(2.0**v.bits - (v.zero == "midpoint")) / 2 for v in versions])
        fixed = [symmetric or v.zero == "midpoint" for v in versions]
        midpoint = torch.tensor(fixed, device=device).repeat_interleave(rows) if any(fixed) else None
        if zeros == FREE:
            return Lanes(top, unit, torch.full_like(top, 255), middle, midpoint, scale_bits)
        return Lanes(top, torch.ones_like(top), top, middle, midpoint, scale_bits)

    def part(self, start: int, end: int) -> Lanes:
        """The lanes from `start` to `end`."""
        middle = None if self.midpoint is None else self.midpoint[start:end]
        top, unit, most, point = (t[start:end] for t in (self.top, self.unit, self.most, self.middle))
        return Lanes(top, unit, most, point, middle, self.scale_bits)

    def stored_zero(self, zero: Tensor) -> Tensor:
        """Round zero points [..., lanes], in units of a code, to their nearest stored values."""
        stored = (zero * self.unit).round_().clamp_(min=0).clamp_(max=self.most).div_(self.unit)
        return stored if self.midpoint is None else torch.where(self.midpoint, self.middle, stored)

    def stored_scale(self, scale: Tensor, other: Tensor) -> Tensor:
        """Round scales to their nearest stored values, float32; `other` replaces those that cannot be stored."""
        good = torch.isfinite(scale)
        if self.scale_bits == 8:
            good &= scale > 0
        return fix_scale(torch.where(good, scale, other), self.scale_bits).float()


def column_sums(x: Tensor) -> Tensor:
    """Sum [experts, cols, lanes] over the columns: [experts, lanes].

    If lanes come in multiples of LANE, a lane's sum does not depend on the others. torch's own sum adds up the lanes
    beyond a multiple of 32 in another order.
    """
    return (x.new_ones(len(x), 1, x.shape[1]) @ x)[:, 0]


def search(block: Tensor, weight: Tensor, lanes: Lanes) -> tuple[Tensor, Tensor]:
    """Find a group's scales and zero points, as stored, with the least squared error weighted by column.

    `block` is float32 [experts, group_size, lanes], `weight` float32 [experts, group_size], summing to 1. Returns scale
    and zero (in codes), float32 [experts, lanes].
    """
    count = block.shape[-1]
    step = count if block.is_cuda else max(LANE, _CHUNK // (block.shape[0] * block.shape[1]) // LANE * LANE)
    parts = []
    for a in range(0, count, step):
        b = min(a + step, count)
        parts.append(_Search(block[..., a:b], weight, lanes.part(a, b)).run())
    return torch.cat([p[0] for p in parts], dim=-1), torch.cat([p[1] for p in parts], dim=-1)


class _Search:
    def __init__(self, block: Tensor, weight: Tensor, lanes: Lanes) -> None:
        self._block = block
        self._lanes = lanes
        self._share = weight[:, None, :]
        self._low = block.amin(1).clamp_(max=0)
        self._high = block.amax(1).clamp_(min=0)
        self._range = (self._high - self._low) / lanes.top
        self._weighted = block * weight[..., None]
        self._mean = column_sums(self._weighted)
        self._codes = torch.empty_like(block)

    def run(self) -> tuple[Tensor, Tensor]:
        best: tuple[Tensor, ...] = ()
        for share, fine in zip(STARTS, FINE_STARTS, strict=True):
            best = _better(best, self._measure(*self._start(torch.where(self._lanes.top < FINE, share, fine))))
        at = best
        for _ in range(ROUNDS):
            at = self._measure(*self._fit(*at))
            best = _better(best, at)
        return best[1], best[2]

    def _start(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """The grid over a share [lanes] of the group's range; at one bit, from the mean magnitude instead."""
        lanes = self._lanes
        scale = self._range * share
        zero = torch.nan_to_num(self._low * share / -scale)
        if lanes.midpoint is not None:
            wide = torch.maximum(self._high / (lanes.top - lanes.middle), -self._low / lanes.middle) * share
            mean = 2 * (self._share @ self._block.abs())[:, 0]
            scale = torch.where(lanes.midpoint, torch.where(lanes.top == 1, mean, wide), scale)
        return lanes.stored_scale(scale, self._range), lanes.stored_zero(zero)

    def _measure(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, ...]:
        """Round values x to codes c: error (up to a constant), scale, zero, and weighted sums of c, x c and c c."""
        codes = torch.addcmul(zero[:, None], self._block, (1 / scale)[:, None], out=self._codes)
        codes.round_().clamp_(min=0).clamp_(max=self._lanes.top)
        c = (self._share @ codes)[:, 0]
        xc = column_sums(self._weighted * codes)
        cc = (self._share @ codes.mul_(codes))[:, 0]
        error = scale * (scale * (cc - zero * (2 * c - zero)) - 2 * (xc - zero * self._mean))
        return error, scale, zero, c, xc, cc

    def _fit(self, _: Tensor, scale: Tensor, zero: Tensor, c: Tensor, xc: Tensor, cc: Tensor) -> tuple[Tensor, Tensor]:
        """The least-squares grid for the codes; the old grid if no fit exists."""
        slope = (xc - c * self._mean) / (cc - c * c)
        offset = c - self._mean / slope
        if self._lanes.midpoint is not None:
            middle = (xc - zero * self._mean) / (cc - zero * (2 * c - zero))
            slope = torch.where(self._lanes.midpoint, middle, slope)
        good = (slope > 0) & torch.isfinite(slope) & torch.isfinite(offset)
        return (
            self._lanes.stored_scale(torch.where(good, slope, scale), scale),
            self._lanes.stored_zero(torch.where(good, offset, zero)),
        )


def _better(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not old:
        return new
    less = new[0] < old[0]
    return tuple(torch.where(less, n, o) for n, o in zip(new, old, strict=True))
