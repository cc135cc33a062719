"""Attention of one new token of each sequence over a KV cache on a GPU, in two launches that wait for nothing.

The keys of a sequence are divided among programs, so that a long cache fills a GPU (flash decoding, Dao et al., 2023);
the second launch joins what they found. How many tokens the cache holds is read on the device. Heads of queries that
share a head of keys are rows of one product. Sums are float32; weights of values are rounded as values are.

A cache is one tensor for all sequences (`attend`), or has memory of its own for each of them (`attend_rows`). Where
that lies, and how much of it is filled, then stands in a table on the device: so a CUDA graph may hold the launches.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .routing_triton import power

KEYS: tl.constexpr = tl.constexpr(64)  # of a step of a program
QUERIES: tl.constexpr = tl.constexpr(16)  # the least rows that tensor cores take
# about as many as GPUs have multiprocessors; the most of a sequence's head
PROGRAMS = 128
SPLITS = 32
# A layer's table is int64 [4, SEQUENCES]: by sequence the addresses of its keys and of its values, [heads, room, size],
# the tokens that they hold with the new one, and their room.
SEQUENCES: tl.constexpr = tl.constexpr(16)
FIELDS = 4
SIZES = (32, 64, 128, 256)  # of heads


@triton.jit
def _row(field, sequence, OF: tl.constexpr):
    """Return a pointer to what a field of a table says of a sequence."""
    return tl.multiple_of(tl.load(field + sequence).to(tl.pointer_type(OF)), 16)


@triton.jit
def _added(score, values, top, total, out):
    """Add some keys to a running softmax: its greatest score, its sum of exponentials, and its sum of values."""
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(score - base[:, None])
    old = tl.exp(top - base)
    out = out * old[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return higher, total * old + tl.sum(weight, 1), out


@triton.jit(do_not_specialize=["room", "stride", "window"])
def _attend(
    query,
    keys,
    values,
    length,
    mask,
    rows,
    part,
    most,
    sums,
    room,
    stride,
    window,
    scale,
    HEADS: tl.constexpr,
    OF: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    sequence = head // HEADS
    of: tl.constexpr = query.dtype.element_ty
    if ROWS:
        of_keys = _row(rows, sequence, of)
        of_values = _row(rows + SEQUENCES, sequence, of)
        tokens = tl.load(rows + 2 * SEQUENCES + sequence).to(tl.int32)
        begins = head % HEADS * tl.load(rows + 3 * SEQUENCES + sequence)
        low = tl.maximum(tokens - window, 0)
    else:
        of_keys = keys
        of_values = values
        tokens = tl.minimum(tl.load(length).to(tl.int32), room)  # a step past a full cache writes nothing, but counts
        begins = head * room
        low = 0
    share = (tokens - low + SPLITS * KEYS - 1) // (SPLITS * KEYS) * KEYS
    row = tl.arange(0, QUERIES)
    d = tl.arange(0, SIZE)
    there = (row < OF)[:, None]
    q = tl.load(query + (head * OF + row)[:, None] * SIZE + d[None, :], mask=there, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, SIZE], tl.float32)
    for first in range(low + split * share, tl.minimum(low + (split + 1) * share, tokens), KEYS):
        key = first + tl.arange(0, KEYS)
        here = key < tokens
        at = (begins + key)[:, None] * SIZE + d[None, :]
        k = tl.load(of_keys + at, mask=here[:, None], other=0.0)
        v = tl.load(of_values + at, mask=here[:, None], other=0.0)
        if WIDE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            score += tl.load(mask + sequence * stride + key, mask=here, other=0.0).to(tl.float32)[None, :]
        score = tl.where(here[None, :], score, float("-inf"))
        top, total, out = _added(score, v, top, total, out)
    at = (head * SPLITS + split) * OF + row
    tl.store(part + at[:, None] * SIZE + d[None, :], out, mask=there)
    tl.store(most + at, top, mask=row < OF)
    tl.store(sums + at, total, mask=row < OF)


@triton.jit
def _join(
    part, most, sums, sinks, out, OF: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)  # of queries
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, SIZE)
    at = (head // OF * SPLITS + split) * OF + head % OF
    top = tl.load(most + at)
    highest = tl.max(top, 0)
    if SINKS > 0:
        sink = tl.load(sinks + head % SINKS).to(tl.float32)
        highest = tl.maximum(highest, sink)
    scale = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(sums + at) * scale, 0)
    if SINKS > 0:
        total += tl.exp(sink - highest)
    value = tl.sum(tl.load(part + at[:, None] * SIZE + d[None, :]) * scale[:, None], 0)
    tl.store(out + head * SIZE + d, (value / total).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["key_head", "key_token", "value_head", "value_token"])
def _append(
    key,
    value,
    rows,
    key_head,
    key_token,
    value_head,
    value_token,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, COLUMNS)
    room = tl.load(rows + 3 * SEQUENCES + sequence)
    at = head * room + tl.load(rows + 2 * SEQUENCES + sequence) - 1
    k = tl.load(key + head * key_head + sequence * key_token + d, mask=d < K_SIZE)
    tl.store(_row(rows, sequence, key.dtype.element_ty) + at * K_SIZE + d, k, mask=d < K_SIZE)
    v = tl.load(value + head * value_head + sequence * value_token + d, mask=d < V_SIZE)
    tl.store(_row(rows + SEQUENCES, sequence, value.dtype.element_ty) + at * V_SIZE + d, v, mask=d < V_SIZE)


def takes(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` computes this: shapes and dtypes, without a look at values."""
    sequences, _, new, size = query.shape
    if new != 1 or keys.shape != values.shape or keys.dim() != 4 or keys.shape[0] != sequences:
        return False
    if not query.dtype == keys.dtype == values.dtype or keys.shape[3] != size or not _fits(query, keys.shape[1]):
        return False
    if mask is not None and (
        mask.dim() != 4
        or mask.shape[0] not in (1, sequences)
        or mask.shape[1:3] != (1, 1)
        or mask.shape[3] < keys.shape[2]
        or mask.stride(3) != 1
        or not mask.is_floating_point()
    ):
        return False
    return query.is_contiguous() and keys.is_contiguous() and values.is_contiguous()


def _fits(query: Tensor, heads: int) -> bool:
    """Whether queries over so many heads of keys fit the kernel."""
    size = query.shape[3]
    if size not in SIZES or size * query.element_size() > 512:  # spills, and passes some GPUs' shared memory
        return False
    return not query.shape[1] % heads and query.shape[1] // heads <= QUERIES.value


def attend(query: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return attention's output over a static cache: [sequences, 1, heads, size].

    Args:
        query: [sequences, heads, 1, size].
        keys: and `values`, [sequences, heads of keys, room, size], all contiguous.
        length: an integer on the device: the number of tokens in the cache, with those of `query`.
        mask: [sequences or 1, 1, 1, room or more], added to the logits; None adds nothing.
        scaling: factor of the products of queries and keys.
    """
    held = power(triton.cdiv(keys.shape[2], KEYS.value))
    stride = 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)
    return _run(query, keys.shape[1], held, (keys, values, length, mask, None), keys.shape[2], stride, scaling)


def takes_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_rows` computes this, and `append` writes it: [1, heads, sequences, size]."""
    if not query.dtype == key.dtype == value.dtype or not query.shape[3] == key.shape[3] == value.shape[3]:
        return False
    return 0 < query.shape[2] <= SEQUENCES.value and _fits(query, key.shape[1])


def append(key: Tensor, value: Tensor, rows: Tensor) -> None:
    """Write one new token of each sequence where a table says, in one launch.

    Args:
        key: and `value`, [1, heads, sequences, size], each of a size of its own; numbers of a head are contiguous.
        rows: int64 [FIELDS, SEQUENCES], a layer's table.
    """
    _, heads, sequences, size = key.shape
    strides = key.stride(1), key.stride(2), value.stride(1), value.stride(2)
    columns = power(max(size, value.shape[3]))
    _append[sequences, heads](
        key, value, rows, *strides, K_SIZE=size, V_SIZE=value.shape[3], COLUMNS=columns, num_warps=1
    )


def attend_rows(
    query: Tensor, heads: int, rows: Tensor, scaling: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return attention's output over each sequence's own cache and new token: [1, sequences, heads, size].

    Args:
        query: [1, heads of queries, sequences, size].
        heads: of keys.
        rows: int64 [FIELDS, SEQUENCES], a layer's table.
        scaling: factor of the products of queries and keys.
        window: how many of the last tokens are read; None reads all.
        sinks: [heads of queries], a logit beside the keys' in each softmax (gpt-oss).
    """
    own = query[0].transpose(0, 1).contiguous()[:, :, None]
    given = None, None, None, None, rows
    out = _run(own, heads, SPLITS, given, 0, 0, scaling, (1 << 31) - 1 if window is None else window, sinks)
    return out.view(1, len(own), -1, query.shape[3])


def _run(
    query: Tensor,
    heads: int,
    most: int,
    of: tuple[Tensor | None, ...],
    room: int,
    stride: int,
    scaling: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launch both kernels; a head's keys are divided among up to `most` programs."""
    sequences, queries, _, size = query.shape
    splits = max(1, min(SPLITS, PROGRAMS // (sequences * heads), most))
    splits = 1 << (splits.bit_length() - 1)
    rows = sequences * queries * splits
    beside = query.new_empty(rows * (size + 2), dtype=torch.float32)
    parts = beside.split((rows * size, rows, rows))
    out = query.new_empty(sequences, 1, queries, size)
    shape = {"OF": queries // heads, "SIZE": size, "SPLITS": splits}
    wide = size * query.element_size() >= 512
    _attend[sequences * heads, splits](
        query,
        *of,
        *parts,
        room,
        stride,
        window,
        scaling,
        HEADS=heads,
        MASKED=of[3] is not None,
        ROWS=of[4] is not None,
        WIDE=knobs.runtime.interpret,
        **shape,
        num_warps=8 if wide else 4,
        num_stages=2 if wide else 3,  # sm_86, 89 and 120 have 99 KiB of shared memory
    )
    _join[(sequences * queries,)](*parts, sinks, out, **shape, SINKS=0 if sinks is None else queries, num_warps=2)
    return out
