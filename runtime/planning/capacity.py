"""The bytes that each layer's experts may take beyond their base placements. Pure arithmetic on the sizes of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Sizes = Sequence[Sequence[int]]  # [layers][placements], bytes of one expert


def base_bytes(sizes: Sizes, experts: Sequence[int], placement: int = -1) -> int:
    """Return the bytes of all experts at one placement; by default at the base, the last."""
    return sum(n * row[placement] for row, n in zip(sizes, experts, strict=True))


def even_room(sizes: Sequence[int], experts: Sequence[int], room: int) -> list[int]:
    """Return the number of items for each layer, about the same share in every layer, that fit `room` bytes together.

    `sizes` [layers] are the bytes of one item, `experts` [layers] the number of items.
    """
    whole = sum(s * n for s, n in zip(sizes, experts, strict=True))
    share = min(1.0, max(0, room) / whole) if whole else 0.0
    out = [int(n * share) for n in experts]
    left = room - sum(s * n for s, n in zip(sizes, out, strict=True))
    for p in sorted(range(len(out)), key=lambda p: out[p] - share * experts[p]):  # the largest remainder first
        if out[p] < experts[p] and sizes[p] <= left:
            out[p] += 1
            left -= sizes[p]
    return out


def even_bytes(sizes: Sizes, experts: Sequence[int], room: int) -> list[int]:
    """Return the bytes that each layer may use above the base: the same share of its size at the best placement.

    A layer's bytes are a multiple of the smallest step between two placements, so that few of them stay unused.

    `sizes` [layers][placements] have the base last; `experts` are [layers].
    """
    units = []
    spans = []
    for row, n in zip(sizes, experts, strict=True):
        above = sorted({size - row[-1] for size in row} | {0})
        unit = max(1, min((b - a for a, b in pairwise(above)), default=1))
        units.append(unit)
        spans.append(n * (max(row) - row[-1]) // unit)
    return [n * unit for n, unit in zip(even_room(units, spans, room), units, strict=True)]
