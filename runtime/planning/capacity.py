"""What fits a budget: how many experts of each layer may be high, and what is then lost. Pure arithmetic.

Numbers in, numbers out, no torch. Sizes are bytes of blocks; versions are numbers, 0 the most precise.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moepack.runtime.allocation.knapsack import Table

Sizes = Sequence[Sequence[int]]  # [layers][versions], bytes of one expert


def base_bytes(sizes: Sizes, experts: Sequence[int], version: int) -> int:
    """Bytes of all experts at one version."""
    return sum(n * row[version] for row, n in zip(sizes, experts, strict=True))


def expected_loss(traffic: Table, losses: Sequence[Table], high: int, low: int, room: Sequence[int]) -> float:
    """Summed squared error on the calibration tokens, with the experts that save most at `high`, the others at `low`.

    Args:
        traffic: [layers][experts], tokens.
        losses: [layers][experts][versions], squared error a token.
        high: a version.
        low: another.
        room: [layers], how many experts may be at the high one.
    """
    total = 0.0
    for tokens, rows, n in zip(traffic, losses, room, strict=True):
        both = sorted(((t * row[low], t * row[high]) for t, row in zip(tokens, rows, strict=True)), key=_saved)
        total += sum(loss for _, loss in both[:n]) + sum(loss for loss, _ in both[n:])
    return total


def _saved(losses: tuple[float, float]) -> float:
    return losses[1] - losses[0]


def even_room(sizes: Sequence[int], experts: Sequence[int], room: int) -> list[int]:
    """How many high experts each layer may have, every layer the same share of its experts, within `room` bytes.

    Args:
        sizes: [layers], bytes that a high expert takes more than a low one.
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


def room_by_loss(sizes: Sequence[int], gains: Table, room: int) -> list[int]:
    """How many high experts each layer may have, by what the loss tables say they save a byte, within `room` bytes.

    Args:
        sizes: [layers], bytes that a high expert takes more than a low one.
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
