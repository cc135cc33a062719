"""Quantise experts to trellis codes: error feedback between blocks of columns, a search for whole sequences inside.

A state of the trellis is made of the last eight codes of a row (pack/codec/trellis.py), so a row's codes cannot be
chosen one by one. As QTIP does (Tseng et al., 2024, section 3 and algorithm 1), blocks of columns compensate the errors
of the blocks before them, and a search chooses a block's codes together. QTIP's sequences end with their block. These
go on along the row, because kernels then read a row's codes as they read affine ones; so a block is searched together
with the columns that follow it, whose codes are chosen anew when it is their turn. Of normal numbers at 2 bits that
leaves 0.085 of the variance as error; a search of the whole row 0.082, and none beyond the block 0.150.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.codec import trellis
from moepack.pack.sections import BLOCK_ROWS
from moepack.pack.spec import Version

from .factor import Factored, factor
from .grid import Quantised, fix_scale, join
from .trellis_search import Columns, search

BLOCK = 48  # columns that get their codes together
AHEAD = 16  # columns after them that are searched with them
# Error of normal numbers over their variance, by bits; magnitudes beyond EDGE deviations of the levels add what they
# exceed it by. A group's scale is the one of SHARES, in deviations of its weights over the levels', with the least
# error by this model. Beginning at 0.96 instead of 1.15, with an edge of 2.75, generated experts lose 11 to 39 % more.
ERROR = {2: 0.085, 3: 0.021}
EDGE = 1.8
SHARES = (1.15, 1.25, 1.4, 1.6, 1.85, 2.1)


def quantise_widths(
    weight: Tensor, moments: Tensor | None, versions: Sequence[Version], zeros: str = ""
) -> dict[Version, Quantised]:
    """Quantise a batch of experts to trellis versions; see `methods.quantise_all`.

    Without moments, columns count alike. `zeros` is of no consequence: these codes have no zero points.
    """
    made: dict[Version, list[Quantised]] = {v: [] for v in versions}
    for expert in range(len(weight)):
        cols = weight.shape[-1]
        own = torch.eye(cols, device=weight.device)[None] if moments is None else moments[expert : expert + 1]
        factored = factor(own, 1)  # columns stay in their order, in which states are made
        for version, parts in made.items():
            parts.append(_Work(weight[expert], factored, version).result())
    return {version: join(parts) for version, parts in made.items()}


class _Work:
    """One matrix at one version."""

    def __init__(self, weight: Tensor, factored: Factored, version: Version) -> None:
        rows, cols = weight.shape
        self._version = version
        self._factored = factored
        largest = weight.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        self._unit = 2.0 ** torch.floor(torch.log2(largest))  # a power of two, so that scaling does not round
        self._exact = weight / self._unit
        self._error = torch.zeros_like(self._exact)  # weight less value
        self._codes = torch.zeros(rows, cols, dtype=torch.uint8, device=weight.device)
        self._groups = -(-cols // version.group_size)
        self._scale = weight.new_empty(rows, self._groups)
        for group in range(self._groups):  # until its turn, by the exact weights
            at = self._columns(group)
            self._scale[:, group] = self._fitted(self._exact[:, at], at)
        self._least = self._smallest() if version.scale_bits == 8 else None
        if self._least is not None:
            self._scale = self._scale.maximum(self._least)
        self._feed_forward()

    def _columns(self, group: int) -> slice:
        size = self._version.group_size
        return slice(group * size, min((group + 1) * size, self._exact.shape[1]))

    def _smallest(self) -> Tensor:
        """The least scale of each row, float32 [rows, 1], such that a byte holds its ratio to the greatest of 16 rows.

        A byte has eight powers of two (FORMAT.md, "Scales of a byte"). Half of them are kept for scales that grow.
        """
        rows = len(self._scale)
        most = torch.nn.functional.pad(self._scale.amax(1), (0, -rows % BLOCK_ROWS)).unflatten(0, (-1, BLOCK_ROWS))
        least: Tensor = (most.amax(1) * 2.0**-6).repeat_interleave(BLOCK_ROWS)[:rows, None]
        return least

    def _fitted(self, block: Tensor, at: slice) -> Tensor:
        """The scale of each row of a group's targets, float32 [rows, columns]: as stored, float32 [rows]."""
        share = self._factored.weight[0, at]
        share = share / share.sum()
        deviation = (block.square() @ share).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        size = (block.abs() / deviation[:, None])[..., None]
        shares = torch.tensor(SHARES, device=block.device)
        beyond = (size - EDGE * shares).clamp(min=0).square()
        wrong = ERROR[self._version.bits] * shares.square() + (beyond * share[:, None]).sum(1)
        chosen = shares[wrong.argmin(1)]
        return fix_scale(deviation * chosen / trellis.DEVIATION, self._version.scale_bits).float()

    def _feed_forward(self) -> None:
        """Code block after block: each compensates the errors of the columns before it."""
        feed = self._factored.feed[0]
        cost = self._factored.weight[0]
        rows, cols = self._exact.shape
        state = torch.zeros(rows, dtype=torch.int32, device=feed.device)
        for group in range(self._groups):
            whole = self._columns(group)
            wide = slice(whole.start, min(whole.stop + AHEAD, cols))
            target = self._exact[:, wide] + self._error[:, : whole.start] @ feed[: whole.start, wide]
            scale = self._fitted(target[:, : whole.stop - whole.start], whole)
            self._scale[:, group] = scale if self._least is None else scale.maximum(self._least[:, 0])
            size = self._version.group_size
            scales = self._scale[:, torch.arange(wide.start, wide.stop, device=scale.device) // size]
            for start in range(whole.start, whole.stop, BLOCK):
                end = min(start + BLOCK, whole.stop)
                last = min(end + AHEAD, cols)
                here = slice(start - whole.start, last - whole.start)
                inside = target[:, here] + self._error[:, whole.start : start] @ feed[whole.start : start, start:last]
                own = self._exact[:, start:last]
                fed = feed[start:last, start:last]
                columns = Columns(inside, own, scales[:, here], cost[start:last], fed, end - start)
                codes, state = search(self._version.bits, columns, state)
                self._codes[:, start:end] = codes
                self._error[:, start:end] = self._exact[:, start:end] - self._values(start, end)

    def _values(self, start: int, end: int) -> Tensor:
        """The values of columns [start, end), float32."""
        before = max(0, start - 7)
        part = self._codes[:, before:end].int()
        levels: Tensor = trellis.levels(part, self._version.bits)[:, start - before :]
        group = torch.arange(start, end, device=part.device) // self._version.group_size
        return (levels - trellis.ZERO) * self._scale[:, group]

    def result(self) -> Quantised:
        """The matrix as a batch of one."""
        scale = fix_scale(self._scale * self._unit, self._version.scale_bits)
        return Quantised(self._codes[None], scale[None], None)
