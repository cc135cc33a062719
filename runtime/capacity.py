"""What fits a budget: which low version, and how many experts of each layer may be above it. Pure arithmetic.

Numbers in, numbers out, no torch. Sizes are bytes of blocks; versions are numbers, 0 the most precise.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Sizes = Sequence[Sequence[int]]  # [layers][versions], bytes of one expert


def base_bytes(sizes: Sizes, experts: Sequence[int], version: int) -> int:
    """Bytes of all experts at one version."""
    return sum(n * row[version] for row, n in zip(sizes, experts, strict=True))


def choose_low(sizes: Sizes, experts: Sequence[int], high: int, room: int, share: float = 1 / 8) -> int | None:
    """The most precise version below `high` that all experts can have while a share of them has the high one beside.

    On trained models the top eighth of a layer's experts carries about half of its traffic. Where no version leaves so
    much room, the most precise one that fits; None where none does.
    """
    versions = range(high + 1, len(sizes[0]))
    above = share * base_bytes(sizes, experts, high)
    for spare in (above, 0.0):
        for version in versions:
            if base_bytes(sizes, experts, version) + spare <= room:
                return version
    return None


def even_room(sizes: Sequence[int], experts: Sequence[int], room: int) -> list[int]:
    """How many high experts each layer may have, every layer the same share of its experts, within `room` bytes.

    Args:
        sizes: [layers], bytes of a high expert.
        experts: [layers].
        room: bytes.
    """
    whole = sum(s * n for s, n in zip(sizes, experts, strict=True))
    share = min(1.0, max(0, room) / whole) if whole else 0.0
    out = [int(n * share) for n in experts]
    left = room - sum(s * n for s, n in zip(sizes, out, strict=True))
    for p in sorted(range(len(out)), key=lambda p: out[p] - share * experts[p]):  # the most rounded down first
        if out[p] < experts[p] and sizes[p] <= left:
            out[p] += 1
            left -= sizes[p]
    return out


def room_by_loss(sizes: Sequence[int], gains: Sequence[Sequence[float]], room: int) -> list[int]:
    """How many high experts each layer may have, by what the loss tables say they save a byte, within `room` bytes.

    Args:
        sizes: [layers], bytes of a high expert.
        gains: [layers][experts], loss that an expert's promotion saves on the calibration tokens; which experts they
            are does not matter here, only how fast a layer's gains fall.
        room: bytes.
    """
    queues = [sorted(row, reverse=True) for row in gains]
    out = [0] * len(queues)
    heap = [(-queue[0] / sizes[p], p) for p, queue in enumerate(queues) if queue]
    heapq.heapify(heap)
    left = room
    while heap:
        _, p = heapq.heappop(heap)
        if sizes[p] > left:
            continue
        left -= sizes[p]
        out[p] += 1
        if out[p] < len(queues[p]):
            heapq.heappush(heap, (-queues[p][out[p]] / sizes[p], p))
    return out
