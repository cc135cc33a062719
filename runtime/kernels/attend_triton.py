"""Attention of one new token of each sequence over a static KV cache on a GPU, in two launches that wait for nothing.

The keys of a sequence are divided among programs, so that a long cache fills a GPU (flash decoding, Dao et al., 2023);
the second launch joins what they found. How many tokens the cache holds is read on the device. Heads of queries that
share a head of keys are rows of one product. Sums are float32; weights of values are rounded as values are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .routing_triton import power

KEYS: tl.constexpr = tl.constexpr(64)  # of a step of a program
QUERIES: tl.constexpr = tl.constexpr(16)  # the least rows that tensor cores take
PROGRAMS, SPLITS = 128, 32  # about as many as GPUs have multiprocessors; the most of a sequence's head


@triton.jit(do_not_specialize=["room", "stride"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, length, mask, part, most, sums, room, stride, scale,
    HEADS: tl.constexpr, OF: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = head // HEADS
    tokens = tl.minimum(tl.load(length).to(tl.int32), room)  # a step past a full cache writes nothing, but counts
    share = (tokens + SPLITS * KEYS - 1) // (SPLITS * KEYS) * KEYS
    row, d = tl.arange(0, QUERIES), tl.arange(0, SIZE)
    there = (row < OF)[:, None]
    q = tl.load(query + (head * OF + row)[:, None] * SIZE + d[None, :], mask=there, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, SIZE], tl.float32)
    for first in range(split * share, tl.minimum((split + 1) * share, tokens), KEYS):
        key = first + tl.arange(0, KEYS)
        here = key < tokens
        at = (head * room + key)[:, None] * SIZE + d[None, :]
        k = tl.load(keys + at, mask=here[:, None], other=0.0)
        v = tl.load(values + at, mask=here[:, None], other=0.0)
        if WIDE:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            score += tl.load(mask + sequence * stride + key, mask=here, other=0.0).to(tl.float32)[None, :]
        score = tl.where(here[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        old = tl.exp(top - base)
        total = total * old + tl.sum(weight, 1)
        out = out * old[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = higher
    at = (head * SPLITS + split) * OF + row
    tl.store(part + at[:, None] * SIZE + d[None, :], out, mask=there)
    tl.store(most + at, top, mask=row < OF)
    tl.store(sums + at, total, mask=row < OF)


@triton.jit  # type: ignore[untyped-decorator]
def _join(part, most, sums, out, OF: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    head = tl.program_id(0).to(tl.int64)  # of queries
    split, d = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    at = (head // OF * SPLITS + split) * OF + head % OF
    top = tl.load(most + at)
    highest = tl.max(top, 0)
    scale = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(sums + at) * scale, 0)
    value = tl.sum(tl.load(part + at[:, None] * SIZE + d[None, :]) * scale[:, None], 0)
    tl.store(out + head * SIZE + d, (value / total).to(out.dtype.element_ty))


def takes(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` computes this: shapes and dtypes, without a look at values."""
    sequences, heads, new, size = query.shape
    if new != 1 or keys.shape != values.shape or keys.dim() != 4 or keys.shape[0] != sequences:
        return False
    if not query.dtype == keys.dtype == values.dtype or keys.shape[3] != size or size not in (32, 64, 128, 256):
        return False
    if size * query.element_size() > 512:  # spills, and passes some GPUs' shared memory
        return False
    if heads % keys.shape[1] or heads // keys.shape[1] > QUERIES.value:
        return False
    if mask is not None and (
        mask.dim() != 4 or mask.shape[0] not in (1, sequences) or mask.shape[1:3] != (1, 1)
        or mask.shape[3] < keys.shape[2] or mask.stride(3) != 1 or not mask.is_floating_point()
    ):  # fmt: skip
        return False
    return query.is_contiguous() and keys.is_contiguous() and values.is_contiguous()


def attend(query: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return what each head of queries reads of a cache: [sequences, 1, heads, size].

    Args:
        query: [sequences, heads, 1, size].
        keys: and `values`, [sequences, heads of keys, room, size], all contiguous.
        length: an integer on the device, the tokens that the cache holds, those of `query` included.
        mask: [sequences or 1, 1, 1, room or more] is added to products; None adds nothing.
        scaling: of products of queries and keys.
    """
    sequences, heads, _, size = query.shape
    count = keys.shape[1]
    splits = max(1, min(SPLITS, PROGRAMS // (sequences * count), power(triton.cdiv(keys.shape[2], KEYS.value))))
    splits = 1 << (splits.bit_length() - 1)
    rows = sequences * heads * splits
    room = query.new_empty(rows * (size + 2), dtype=torch.float32)
    part, most, sums = room.split((rows * size, rows, rows))
    out = query.new_empty(sequences, 1, heads, size)
    shape, wide = {"OF": heads // count, "SIZE": size, "SPLITS": splits}, size * query.element_size() >= 512
    _attend[sequences * count, splits](
        query, keys, values, length, mask, part, most, sums, keys.shape[2],
        0 if mask is None or mask.shape[0] == 1 else mask.stride(0), scaling,
        HEADS=count, MASKED=mask is not None, WIDE=knobs.runtime.interpret, **shape,
        num_warps=8 if wide else 4, num_stages=2 if wide else 3,  # sm_86, 89 and 120 have 99 KiB of shared memory
    )  # fmt: skip
    _join[(sequences * heads,)](part, most, sums, out, **shape, num_warps=2)
    return out
