"""The quantiser on grids that no version has: what an idea would give before anyone builds it.

The same steps as moepack.quantize.gptq (feedback in the order of `factor`, two sweeps of descent), one width at a time
and slower, with its search for grids. On a version's own grid it has the version's errors. Values come back, no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moepack.pack.codec.rotation import rotate
from moepack.pack.spec import BLOCKS, Rotation, Version
from moepack.quantize.factor import factor
from moepack.quantize.gptq import SWEEPS
from moepack.quantize.grid import fix_scale
from moepack.quantize.lanes import Lanes, search

from . import trellis

GROWN = (1.0, 1.15, 1.3)  # starts for unequal levels, over the scale of equal ones: they reach farther out
ROUNDS = 4  # of choosing levels and fitting scales from such a start


@dataclass(frozen=True, slots=True)
class Trial:
    """A grid for one matrix."""

    bits: float  # of a code
    group: int = 64
    zero_bits: int = 0  # of a stored zero point; 0: the grid is symmetric
    scale_bits: int = 16  # BF16; fewer: whole steps of a scale that others share
    shared: tuple[int, int] = (8, 1)  # groups of a row, and rows, that share it
    mantissa: int = 0  # bits of it, where scales of fewer bits are floats below a power of two for the matrix instead
    zero_rows: int = 1  # rows that share a zero point
    trellis: bool = False  # twice the levels, by `trellis`
    levels: tuple[float, ...] = ()  # unequal levels, in place of 2^bits equal ones
    learned: bool = False  # these learned, of a layer's experts together: weighted k-means, then least squares
    rotated: bool = False  # columns times random signs, then Hadamard's matrix by blocks

    def size(self, cols: int) -> float:
        """Bits a weight of rows of so many columns."""
        groups, (along, down) = -(-cols // self.group), self.shared
        shared = 16 * -(-groups // along) / down if self.scale_bits < 16 and not self.mantissa else 0
        return self.bits + ((self.scale_bits + self.zero_bits / self.zero_rows) * groups + shared) / cols

    def values(self, weight: Tensor, moments: Tensor) -> Tensor:
        """Quantise float32 [experts, rows, cols] by moments [experts, cols, cols]; the values that come back."""
        if not self.rotated:
            return _Fit(self, weight, moments).run()
        turn = largest_rotation(weight.shape[-1])
        made = _Fit(self, rotate(weight, turn), rotated_moments(moments, turn)).run()
        return rotate(made, turn, back=True)  # type: ignore[no-any-return]


def largest_rotation(cols: int) -> Rotation:
    """The rotation of inputs of so many columns in the largest blocks that there are."""
    return Rotation(min(cols & -cols, BLOCKS[-1]))


def rotated_moments(moments: Tensor, rotation: Rotation) -> Tensor:
    """Second moments [experts, cols, cols] of rotated inputs."""
    rows = rotate(moments, rotation).mT.contiguous()
    return rotate(rows, rotation)  # type: ignore[no-any-return]


def gaussian_levels(bits: int) -> tuple[float, ...]:
    """Lloyd's and Max's levels for normally distributed numbers, from 0 to 2^bits - 1."""
    x = torch.erfinv(torch.linspace(-1, 1, 20001)[1:-1].double()) * 2**0.5
    levels = torch.linspace(-2.5, 2.5, 2**bits, dtype=torch.float64)
    for _ in range(300):
        nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        levels = torch.zeros_like(levels).index_add_(0, nearest, x) / torch.bincount(nearest, minlength=len(levels))
    return tuple(((levels - levels[0]) / (levels[-1] - levels[0]) * (2**bits - 1)).tolist())


class _Fit:
    """One batch on one grid. Matrices are [experts, cols, rows], as in `gptq.Work`."""

    def __init__(self, trial: Trial, weight: Tensor, moments: Tensor) -> None:
        self._trial, self._factored = trial, factor(moments, trial.group)
        largest = weight.abs().amax((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
        self._unit = 2.0 ** torch.floor(torch.log2(largest))
        turned = [(w / u)[:, o].T for w, u, o in zip(weight, self._unit, self._factored.order, strict=True)]
        self._weight = torch.stack(turned).contiguous()
        self._levels = torch.tensor(trial.levels)
        plain = round(2**trial.bits) - 1  # 1.6 bits, five codes a byte: 0, 1 and 2
        self._plain, self._top = plain, 2 * plain + 1 if trial.trellis else plain
        base = replace(Version.of("w2", 64), bits=max(1, round(trial.bits)))
        version = replace(base, zero="stored" if trial.zero_bits else "midpoint")
        lanes = Lanes.of([version], weight.shape[1], weight.device)
        grid = {"top": plain, "middle": plain / 2}
        if trial.zero_bits:
            grid |= {"unit": 2.0**trial.zero_bits / (plain + 1), "most": 2.0**trial.zero_bits - 1}
        own: dict[str, Any] = {name: torch.full_like(lanes.top, value) for name, value in grid.items()}
        self._lanes = replace(lanes, **own)
        cols, group = weight.shape[2], trial.group
        self._blocks = [(a, min(a + group, cols)) for a in range(0, cols, group)]
        self._shared: list[Tensor] = []
        if trial.scale_bits < 16:
            found = [search(self._weight[:, a:b], self._even(a, b), self._lanes)[0] for a, b in self._blocks]
            along, down = (len(found), weight.shape[1]) if trial.mantissa else trial.shared
            for i in range(0, len(found), along):
                # Few codes: feedback makes scales grow. With a quarter to spare one bit has a fifth more error.
                spare = (1 + 2.0 ** (1 - trial.bits)) / (1 + trial.trellis)
                most = torch.stack(found[i : i + along]).amax(0) * spare
                self._shared += [most.unflatten(-1, (-1, down)).amax(-1).repeat_interleave(down, -1)] * along
        self._error, self._codes = torch.empty_like(self._weight), torch.empty_like(self._weight)
        if trial.learned:
            self._learn()

    def _even(self, start: int, end: int) -> Tensor:
        return torch.full((len(self._weight), end - start), 1 / (end - start))

    def _scale(self, group: int, scale: Tensor, other: Tensor) -> Tensor:
        """Scales as they would be stored; `other` where one is not finite."""
        scale = torch.where(torch.isfinite(scale), scale, other)
        bits, mantissa = self._trial.scale_bits, self._trial.mantissa
        if not self._shared:
            return fix_scale(scale).float()
        if not mantissa:
            step = fix_scale(self._shared[group] / (2**bits - 1)).float()
            return (scale / step).round().clamp(1, 2**bits - 1) * step
        above = torch.exp2(self._shared[group].log2().ceil())  # what no scale reaches
        part, exponent = torch.frexp(torch.maximum(scale, above * 2.0 ** -(2 ** (bits - mantissa))))
        rounded = torch.ldexp((part * 2 ** (mantissa + 1)).round(), exponent - mantissa - 1)
        return torch.minimum(rounded, above * (1 - 2.0 ** -(mantissa + 1)))

    def _as_one(self, x: Tensor, share: Tensor | None = None) -> Tensor:
        """The mean of a row's figure over the rows that share its zero point, weighted by `share`."""
        n = self._trial.zero_rows
        if n == 1:
            return x
        whole = torch.ones_like(x) if share is None else share
        total, over = ((y * whole).unflatten(-1, (-1, n)).sum(-1) for y in (x, 1))
        mean: Tensor = (total / over).repeat_interleave(n, -1)
        return mean

    def _zero(self, zero: Tensor) -> Tensor:
        """Zero points as they would be stored."""
        bits = self._trial.zero_bits
        unit = 2.0**bits / (self._top + 1)
        return (zero * unit).round().clamp(0, 2**bits - 1) / unit if bits else torch.full_like(zero, self._top / 2)

    def _grid(self, group: int, block: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """A first scale and zero point; of twice the levels, the same range."""
        scale, zero = search(block, share, self._lanes)
        ratio = 2.0 if self._trial.trellis else 1.0
        zero = self._zero(self._as_one(self._top / 2 - (self._plain / 2 - zero) * ratio, scale * scale))
        if not len(self._levels) and self._trial.zero_rows == 1:
            return self._scale(group, scale / ratio, scale), zero
        best: tuple[Tensor, ...] = ()
        for grown in GROWN if len(self._levels) else GROWN[:1]:
            at = self._scale(group, scale * grown, scale)
            for _ in range(ROUNDS):
                steps = self._choose(block / at[:, None] + zero[:, None], at) - zero[:, None]
                lost = ((block - at[:, None] * steps).square() * share[..., None]).sum(1)
                less = lost < best[0] if best else torch.ones_like(lost, dtype=torch.bool)
                best = (lost, at) if not best else (lost.minimum(best[0]), torch.where(less, at, best[1]))
                weighted = steps * share[..., None]
                at = self._scale(group, (weighted * block).sum(1) / (weighted * steps).sum(1), at)
        return best[1], zero

    def _learn(self) -> None:
        """Levels by k-means of the weights on their first grids, weighted by what an error there costs."""
        places, costs = [], []
        for g, (a, b) in enumerate(self._blocks):
            share = self._factored.weight[:, a:b]
            scale, zero = self._grid(g, self._weight[:, a:b], share / share.sum(-1, keepdim=True))
            places.append((self._weight[:, a:b] / scale[:, None] + zero[:, None]).flatten())
            costs.append((share[..., None] * scale.square()[:, None]).flatten())
        place, cost = torch.cat(places), torch.cat(costs)
        for _ in range(20):
            nearest = self._index(place)
            total, mean = (torch.bincount(nearest, v, len(self._levels)) for v in (cost, cost * place))
            self._levels = torch.where(total > 0, mean / total, self._levels).float()

    def _relearn(self, grids: list[tuple[Tensor, Tensor]]) -> None:
        """Levels anew, for the chosen codes: those of least error of a quarter of the rows, by the normal equations."""
        spread = [s[:, None].expand(-1, b - a, -1) for (s, _), (a, b) in zip(grids, self._blocks, strict=True)]
        scale = torch.cat(spread, 1)
        index, count = self._index(self._codes), len(self._levels)
        own, part, moments = index[..., ::4], scale[..., ::4], self._factored.damped

        def summed(change: Tensor) -> Tensor:
            return torch.bincount(own.flatten(), (part * (moments @ change)).flatten(), count)

        pull = summed(self._error[..., ::4])
        normal = torch.stack([summed(part * (own == k)) for k in range(count)])
        normal += torch.eye(count) * 1e-6 * normal.diagonal().mean()
        move = torch.linalg.solve(normal, pull).float()
        self._error -= scale * move[index]
        self._levels = self._levels + move
        self._codes = self._levels[index]
        self._levels = self._levels.sort().values

    def _index(self, x: Tensor) -> Tensor:
        return torch.bucketize(x, (self._levels[1:] + self._levels[:-1]) / 2)

    def _choose(self, target: Tensor, scale: Tensor) -> Tensor:
        """The best levels for a column [experts, rows], in units of a level."""
        if self._trial.trellis:
            return trellis.nearest(target, scale * scale, self._top)
        if len(self._levels):
            return self._levels[self._index(target)]
        return target.round().clamp_(0, self._top)

    def run(self) -> Tensor:
        grids = [self._feed(g, a, b) for g, (a, b) in enumerate(self._blocks)]
        for _ in range(SWEEPS):
            if self._trial.learned:
                self._relearn(grids)
            grids = [self._sweep(g, a, b, *grids[g]) for g, (a, b) in enumerate(self._blocks)]
        place = self._factored.order.argsort(-1)
        made = self._weight - self._error
        return torch.stack([v[p].T for v, p in zip(made, place, strict=True)]) * self._unit[:, None, None]

    def _feed(self, group: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        feed, weight = self._factored.feed, self._factored.weight[:, start:end]
        block = self._weight[:, start:end].clone()
        if start:
            block.baddbmm_(feed[:, :start, start:end].mT, self._error[:, :start])
        scale, zero = self._grid(group, block, weight / weight.sum(-1, keepdim=True))
        for k in range(start, end):
            level = self._choose(block[:, k - start] / scale + zero, scale)
            wrong = self._weight[:, k] - scale * (level - zero)
            self._error[:, k], self._codes[:, k] = wrong, level
            block[:, k - start + 1 :] += feed[:, k, k + 1 : end, None] * wrong[:, None]
        return scale, zero

    def _sweep(self, group: int, start: int, end: int, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        moments = self._factored.damped
        inside, slope = moments[:, start:end, start:end], moments[:, start:end] @ self._error
        codes, error = self._codes[:, start:end], self._error[:, start:end]
        new, new_zero = self._regrid(group, codes, slope, inside, scale, zero)
        step, offset = (new - scale)[:, None], (new * new_zero - scale * zero)[:, None]
        error -= codes * step - offset
        slope -= (inside @ codes) * step - inside.sum(-1)[..., None] * offset
        for k in range(end - start):
            target = codes[:, k] + slope[:, k] / inside[:, k, k, None] / new
            level = self._choose(target, new)
            change = (codes[:, k] - level) * new
            slope[:, k + 1 :] += inside[:, k + 1 :, k, None] * change[:, None]
            error[:, k] += change
            codes[:, k] = level
        return new, new_zero

    def _regrid(
        self, group: int, codes: Tensor, slope: Tensor, inside: Tensor, scale: Tensor, zero: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `gptq.Work._regrid`: the best of scale and zero point, scale alone, and what there is."""
        ones, product = inside.sum(-1)[:, None], inside @ codes
        total, cc, c1 = ones.sum(-1), (codes * product).sum(1), (ones @ codes)[:, 0]
        gc, g1 = (codes * slope).sum(1), slope.sum(1)
        determinant = cc * total - c1 * c1
        moved = (scale * zero - (cc * g1 - c1 * gc) / determinant) / (scale + (gc * total - g1 * c1) / determinant)
        best: tuple[Tensor, Tensor, Tensor] = torch.zeros_like(scale), scale, zero
        moved = self._as_one(torch.where(torch.isfinite(moved), moved, zero), scale * scale)
        for z in (zero, self._zero(moved)):
            dd, old = (cc - 2 * a * c1 + a * a * total for a in (z, zero))
            both, gd = cc - (z + zero) * c1 + z * zero * total, gc - z * g1
            s = self._scale(group, (gd + scale * both) / dd, scale)
            gain = s * s * dd - 2 * s * scale * both + scale * scale * old - 2 * (s * gd - scale * (gc - zero * g1))
            gain = self._as_one(gain)
            less = gain < best[0]
            best = torch.where(less, gain, best[0]), torch.where(less, s, best[1]), torch.where(less, z, best[2])
        return best[1], best[2]
