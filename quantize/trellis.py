"""Quantise experts to trellis codes: error feedback between blocks of columns, a search for whole sequences inside.

A state of the trellis is made of the last eight codes of a row (pack/codec/trellis.py), so a row's codes cannot be
chosen one by one. As QTIP does (Tseng et al., 2024, section 3 and algorithm 1), blocks of columns compensate the errors
of the blocks before them, and a search chooses a block's codes together. QTIP's sequences end with their block. These
go on along the row, because kernels then read a row's codes as they read affine ones; so a block is searched together
with the columns that follow it, whose codes are chosen anew when it is their turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.codec import trellis
from moepack.pack.spec import Version

from .factor import Factored, factor
from .grid import Quantised, fix_scale, join, least_beside
from .trellis_search import Columns, search

BLOCK = 48  # columns that get their codes together
AHEAD = 16  # columns after them that are searched with them
WIDE = 4 * BLOCK  # columns that get the errors of all columns before them in one product
# Error of normal numbers over their variance, by bits; magnitudes beyond EDGE deviations of the levels add what they
# exceed it by. A group's scale is the one of SHARES, in deviations of its weights over the levels', with the least
# error by this model.
ERROR = {2: 0.085, 3: 0.021}
EDGE = 1.8
LEAST = 2.0**-40  # the least scale, of weights below 2: of zeros' own, squares of scales and of targets leave float32
SHARES = (1.1, 1.2, 1.35, 1.5, 1.75, 2.1, 2.5, 3.0, 3.5)


def quantise_widths(weight: Tensor, moments: Tensor, versions: Sequence[Version]) -> dict[Version, Quantised]:
    """Quantise a batch of experts to trellis versions; see `methods.quantise_all`."""
    made: dict[Version, list[Quantised]] = {v: [] for v in versions}
    for expert, matrix in enumerate(weight):
        factored = factor(moments[expert : expert + 1], 1)  # columns stay in their order, in which states are made
        largest = matrix.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        unit = 2.0 ** torch.floor(torch.log2(largest))  # a power of two, so that scaling does not round
        exact = matrix / unit
        for version, parts in made.items():
            scale = scales(exact, factored, version)
            codes = coded(exact, factored, version, scale)
            stored = fix_scale(scale * unit, version.scale_bits)
            parts.append(Quantised(codes[None], stored[None], None))
    return {version: join(parts) for version, parts in made.items()}


def scales(weight: Tensor, factored: Factored, version: Version) -> Tensor:
    """The scale of each group of weights, float32 [rows, cols], as stored: float32 [rows, groups].

    They are chosen before any code, because the codes at a group's end are chosen for the levels behind it.
    """
    cost = factored.weight[0]
    times = torch.tensor(SHARES, device=weight.device)
    out = []
    for start in range(0, weight.shape[1], version.group_size):
        block = weight[:, start : start + version.group_size]
        share = cost[start : start + version.group_size]
        share = share / share.mean()
        deviation = block.square().mean(1).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        size = block.abs() / deviation[:, None]
        wrong = []
        for by in SHARES:
            beyond = (size - EDGE * by).clamp_(min=0).square_().mul_(share).mean(1)
            wrong.append(beyond + ERROR[version.bits] * by**2)
        best = torch.stack(wrong).argmin(0)
        out.append(deviation * times[best] / trellis.DEVIATION)
    scale = fix_scale(torch.stack(out, 1).clamp_(min=LEAST), version.scale_bits).float()
    if version.scale_bits == 8:
        scale = scale.maximum(least_beside(scale))
    return scale


def coded(weight: Tensor, factored: Factored, version: Version, scale: Tensor) -> Tensor:
    """Code weights, float32 [rows, cols], to uint8. Each block of columns compensates the errors of those before."""
    feed = factored.feed[0]
    cost = factored.weight[0]
    rows, cols = weight.shape
    error = torch.zeros_like(weight)  # weight less value
    codes = torch.zeros(rows, cols, dtype=torch.uint8, device=weight.device)
    state = torch.zeros(rows, dtype=torch.int32, device=weight.device)
    for first in range(0, cols, WIDE):
        wide = slice(first, min(first + WIDE + AHEAD, cols))
        group = torch.arange(wide.start, wide.stop, device=weight.device) // version.group_size
        by_column = scale[:, group]
        target = weight[:, wide] + error[:, :first] @ feed[:first, wide]
        for start in range(first, min(first + WIDE, cols), BLOCK):
            end = min(start + BLOCK, cols)
            searched = slice(start, min(end + AHEAD, cols))
            fed = error[:, first:start] @ feed[first:start, searched]
            here = slice(start - first, searched.stop - first)
            columns = Columns(
                target[:, here] + fed,
                weight[:, searched],
                by_column[:, here],
                cost[searched],
                feed[searched, searched],
                end - start,
            )
            codes[:, start:end], state = search(version.bits, columns, state)
            before = max(0, start - trellis.MEMORY + 1)
            levels = trellis.levels(codes[:, before:end].int(), version.bits)[:, start - before :]
            error[:, start:end] = (
                weight[:, start:end] - (levels - trellis.ZERO) * by_column[:, start - first : end - first]
            )
    return codes
