"""Attention of one new token of each sequence over the latents in a KV cache on a GPU, in two launches.

A key of all heads is [latent | rotated], and its value is the latent. As in attend_triton.py, a sequence's keys are
divided among programs, what the cache holds is read on the device, and sums are float32. A program has QUERIES heads
and reads each latent once for both products, in blocks as small as SGLang's kernel has them for 512 + 64 numbers
(`_fwd_grouped_kernel_stage1` of its triton_ops/decode_attention.py), because GPUs have 99 KiB of shared memory.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from . import attend_triton
from .attend_triton import QUERIES, SEQUENCES, SPLITS, _added, _join, _row
from .routing_triton import power

SIZES = (16, 32, 64, 128, 256, 512)  # of latents, and of rotated parts


@triton.jit(do_not_specialize=["room", "stride"])
def _over_latents(
    query,
    asked,
    latents,
    rotated,
    length,
    mask,
    rows,
    part,
    most,
    sums,
    room,
    stride,
    query_sequence,
    query_head,
    asked_sequence,
    asked_head,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    FILLED: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    head = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    of: tl.constexpr = query.dtype.element_ty
    if ROWS:
        of_latents = _row(rows, sequence, of)
        of_rotated = _row(rows + SEQUENCES, sequence, of)
        tokens = tl.load(rows + 2 * SEQUENCES + sequence).to(tl.int32)
    else:
        of_latents = latents + sequence * room * RANK
        of_rotated = rotated + sequence * room * ROTATED
        tokens = room
        if FILLED:
            tokens = tl.minimum(tl.load(length).to(tl.int32), room)  # a step past a full cache writes nothing
    share = (tokens + SPLITS * KEYS - 1) // (SPLITS * KEYS) * KEYS
    c = tl.arange(0, RANK)
    r = tl.arange(0, ROTATED)
    there = (head < HEADS)[:, None]
    q = tl.load(query + sequence * query_sequence + head[:, None] * query_head + c[None, :], mask=there, other=0.0)
    a = tl.load(asked + sequence * asked_sequence + head[:, None] * asked_head + r[None, :], mask=there, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
        a = a.to(tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, RANK], tl.float32)
    for first in range(split * share, tl.minimum((split + 1) * share, tokens), KEYS):
        key = first + tl.arange(0, KEYS)
        here = key < tokens
        k = tl.load(of_latents + key.to(tl.int64)[:, None] * RANK + c[None, :], mask=here[:, None], other=0.0)
        t = tl.load(of_rotated + key.to(tl.int64)[:, None] * ROTATED + r[None, :], mask=here[:, None], other=0.0)
        if WIDE:
            k = k.to(tl.float32)
            t = t.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.dot(a, tl.trans(t), score, input_precision="ieee") * scale
        if MASKED:
            here = here & (tl.load(mask + sequence * stride + key, mask=here, other=0) != 0)
        score = tl.where(here[None, :], score, float("-inf"))
        top, total, out = _added(score, k, top, total, out)
    at = (sequence * SPLITS + split) * HEADS + head
    tl.store(part + at[:, None] * RANK + c[None, :], out, mask=there)
    tl.store(most + at, top, mask=head < HEADS)
    tl.store(sums + at, total, mask=head < HEADS)


def fits(rank: int, rotated: int) -> bool:
    """Whether the kernel has blocks for latents and rotated parts of so many numbers."""
    return rank in SIZES[1:] and rotated in SIZES[:4]


def takes(latents: Tensor, rotated: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` reads these tensors and this mask."""
    return (
        latents.is_contiguous()
        and rotated.is_contiguous()
        and latents.shape[:3] == rotated.shape[:3]
        and (mask is None or (mask.dtype == torch.bool and mask.stride(3) == 1))
    )


def attend(
    query: Tensor,
    asked: Tensor,
    latents: Tensor,
    rotated: Tensor,
    length: Tensor | None,
    mask: Tensor | None,
    scaling: float,
) -> Tensor:
    """Return each head's sum of latents over a cache, [sequences, heads, rank].

    Args:
        query: lifted, [sequences, heads, rank]; the numbers of a head are contiguous.
        asked: the rotated part of queries, [sequences, heads, rotated], likewise.
        latents: [sequences, 1, room, rank], and so `rotated`.
        length: an integer on the device: the number of tokens in the cache, with the new one; None for `room`.
        mask: bool [sequences, 1, 1, room]: the keys that are seen; None for all.
        scaling: factor of the products of queries and keys.
    """
    seen = None if mask is None else mask.view(torch.uint8)
    room = latents.shape[2]
    stride = 0 if mask is None or len(mask) == 1 else mask.stride(0)
    return _run(query, asked, (latents, rotated, length, seen, None), room, stride, scaling)


def attend_rows(query: Tensor, asked: Tensor, rows: Tensor, scaling: float) -> Tensor:
    """`attend` over each sequence's own cache and new token; `rows` is int64 [FIELDS, SEQUENCES], a layer's table."""
    return _run(query, asked, (None, None, None, None, rows), 0, 0, scaling)


def _run(query: Tensor, asked: Tensor, of: tuple[Tensor | None, ...], room: int, stride: int, scaling: float) -> Tensor:
    """Launch both kernels."""
    sequences, heads, rank = query.shape
    wide = query.element_size() > 2
    keys = 16 if wide else 32
    blocks = triton.cdiv(heads, QUERIES.value)
    most = power(triton.cdiv(room, keys)) if of[4] is None else SPLITS
    splits = max(1, min(SPLITS, attend_triton.PROGRAMS // (sequences * blocks), most))
    splits = 1 << (splits.bit_length() - 1)
    rows = sequences * heads * splits
    parts = query.new_empty(rows * (rank + 2), dtype=torch.float32).split((rows * rank, rows, rows))
    out = query.new_empty(sequences, heads, rank)
    _over_latents[blocks, sequences, splits](
        query,
        asked,
        *of,
        *parts,
        room,
        stride,
        *query.stride()[:2],
        *asked.stride()[:2],
        scaling,
        HEADS=heads,
        RANK=rank,
        ROTATED=asked.shape[2],
        SPLITS=splits,
        KEYS=keys,
        FILLED=of[2] is not None,
        MASKED=of[3] is not None,
        ROWS=of[4] is not None,
        WIDE=knobs.runtime.interpret,
        num_warps=4 if rank < 256 else 8,
        num_stages=1 if wide else 2,  # sm_86, 89 and 120 have 99 KiB of shared memory
    )
    warps = 2 if rank < 256 else 8
    _join[(sequences * heads,)](*parts, None, out, OF=heads, SIZE=rank, SPLITS=splits, SINKS=0, num_warps=warps)
    return out
