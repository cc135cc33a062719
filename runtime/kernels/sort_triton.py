"""Slots of many tokens sorted by expert and cut into blocks: a fill and two launches, without waiting for the device.

Slots of one expert come in the order in which they add to its counter, which may differ from run to run. No result
depends on it: a slot's sums have nothing to do with the other slots of its block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .affine_triton import Geometry
from .routing_triton import power

CHUNK = 512  # slots of a program


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]
def _rank(index, table, counts, live, rank, slots, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    real = slot < slots
    expert = tl.load(index + slot, mask=real, other=-1)
    known = (expert >= 0) & (expert < EXPERTS)
    here = known & (tl.load(table + expert, mask=known, other=0) != 0)
    tl.store(live + slot, here.to(tl.int32), mask=real)
    tl.store(rank + slot, tl.atomic_add(counts + expert, 1, mask=here), mask=here)


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    index, counts, live, rank, order, block_expert, block_first, block_count, slots,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    each = tl.load(counts + lane, mask=lane < EXPERTS, other=0)
    begins = tl.cumsum(each, 0) - each
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    here = tl.load(live + slot, mask=slot < slots, other=0) != 0
    expert = tl.load(index + slot, mask=here, other=0).to(tl.int32)
    to = tl.gather(begins, expert, 0) + tl.load(rank + slot, mask=here, other=0)
    tl.store(order + to, slot, mask=here)
    if tl.program_id(0) == 0:
        blocks = (each + TOKENS - 1) // TOKENS
        first = tl.cumsum(blocks, 0) - blocks
        for j in range(0, tl.max(blocks, 0)):
            some, block = j < blocks, first + j
            tl.store(block_expert + block, lane, mask=some)
            tl.store(block_first + block, begins + j * TOKENS, mask=some)
            tl.store(block_count + block, tl.minimum(each - j * TOKENS, TOKENS), mask=some)


def sort(index: Tensor, table: Tensor, tokens: int) -> tuple[Geometry, Tensor]:
    """Sort slots by expert and cut them into blocks of `tokens` slots.

    Args:
        index: int64 [tokens, top_k], contiguous.
        table: int64 [experts], handles; slots of experts with 0 there get no block, nor do those of other indices.

    Returns:
        the blocks, and whether each slot is in one, int32 [slots].
    """
    slots, experts = index.numel(), len(table)
    blocks = min(slots, experts) + slots // tokens  # enough for any routing
    sizes = experts, slots, slots, slots, blocks, blocks, blocks
    apart = [-(-n // 16) * 16 for n in sizes]  # all begin on multiples of 16 bytes, for which kernels were compiled
    room = torch.zeros(sum(apart), dtype=torch.int32, device=index.device).split(apart)
    counts, live, rank, order, expert, first, count = (part[:n] for part, n in zip(room, sizes, strict=True))
    grid, some = (triton.cdiv(slots, CHUNK),), {"EXPERTS": experts, "CHUNK": CHUNK}
    _rank[grid](index, table, counts, live, rank, slots, **some)
    _place[grid](
        index, counts, live, rank, order, expert, first, count, slots, **some, LANES=power(experts), TOKENS=tokens
    )
    return Geometry(order, expert, first, count, tokens), live
