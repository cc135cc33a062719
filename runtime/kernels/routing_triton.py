"""Routing on a GPU: of a few tokens scores, top-k, gates, counters and blocks of slots; of many, all but counters.

`Routing` describes how a family's router makes gates of logits; of experts and gates that a family chose itself, the
last launch makes blocks and counts. Nothing waits for the device, and every launch of a layer has the same arguments
and grid whatever is routed where, so a CUDA graph may hold it. `reference` is the same in plain torch.

`sort` takes a fill and two launches for any number of tokens. There slots of one expert come in the order in which they
add to its counter, which may differ from run to run. No result depends on it: a slot's sums have nothing to do with the
other slots of its block.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .affine_triton import Geometry
from .forms import Routing

# the most that is routed so
TOKENS = 16
TOP_K = 16
EXPERTS = 512
CHUNK = 512  # slots of a program of `sort`
_LEAST: tl.constexpr = tl.constexpr(-(1 << 62))  # below every key


@dataclass(frozen=True, slots=True)
class Routed:
    """The results of routing some tokens in one launch."""

    index: Tensor  # int64 [tokens, top_k]
    gates: Tensor  # [tokens, top_k]
    geometry: Geometry  # a block a slot; most have no slots
    live: Tensor  # int32 [slots]: whether the slot's expert is in the handle table


@dataclass(frozen=True, slots=True)
class Tally:
    """The device counters of one layer's routing."""

    counts: Tensor  # int64 [experts or more]
    sums: Tensor | None = None  # float64, of gates
    mask: Tensor | None = None  # int64 [tokens], 0 for padding, which is not counted


@triton.jit
def _key(value, number, MOST: tl.constexpr):
    """Return int64 numbers in the order of float32 values, NaN the greatest; of equal values, lower numbers first."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 is 0
    bits = tl.where(value != value, 0x7FFFFFFF, bits)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 16) | (MOST - 1 - number).to(tl.int64)


@triton.jit
def _in_groups(
    choice,
    lane,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
):
    """Return whether each expert's group is among the KEPT best, int32 [ROWS, LANES]."""
    number = tl.arange(0, MOST)[None, :]
    best = tl.full([ROWS, MOST], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        key = tl.where(lane // EACH == g, _key(choice, lane, LANES), _LEAST)
        top = tl.max(key, 1)[:, None]
        value = tl.sum(tl.where(key == top, choice, 0.0), 1)
        if TWO:
            key = tl.where(key == top, _LEAST, key)
            value += tl.sum(tl.where(key == tl.max(key, 1)[:, None], choice, 0.0), 1)
        best = tl.where(number == g, value[:, None], best)
    key = tl.where(number < GROUPS, _key(best, number, MOST), _LEAST)
    inside = tl.zeros([ROWS, LANES], tl.int32)
    for _ in tl.static_range(KEPT):
        top = tl.max(key, 1)[:, None]
        inside = tl.where(lane // EACH == MOST - 1 - (top & 0xFFFF).to(tl.int32), 1, inside)
        key = tl.where(key == top, _LEAST, key)
    return inside


@triton.jit
def _choose(
    logits,
    bias,
    tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    NORMED: tl.constexpr,
    SCALE: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Return experts, int32, and gates, float32, [ROWS, SLOTS], of logits."""
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    column = tl.arange(0, SLOTS)[None, :]
    here = (row < tokens) & (lane < EXPERTS)
    x = tl.load(logits + row * EXPERTS + lane, mask=here, other=float("-inf")).to(tl.float32)
    x = tl.where(row < tokens, x, 0.0)  # rows past the tokens hold numbers that nobody reads
    if SCORES == "softmax":
        e = tl.exp(x - tl.max(x, 1)[:, None])
        score = e / tl.sum(e, 1)[:, None]
    elif SCORES == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = x
    choice = score
    if BIASED:
        choice += tl.load(bias + lane, mask=lane < EXPERTS, other=0.0)
    if GROUPS > 1:
        choice = tl.where(lane < EXPERTS, choice, float("-inf"))
        inside = _in_groups(choice, lane, GROUPS, EXPERTS // GROUPS, KEPT, TWO, ROWS, LANES, MOST)
        choice = tl.where(inside > 0, choice, float("-inf") if TWO else 0.0)
        if not TWO:
            score = choice
    key = tl.where(lane < EXPERTS, _key(choice, lane, LANES), _LEAST)
    index = tl.zeros([ROWS, SLOTS], tl.int32)
    gates = tl.full([ROWS, SLOTS], float("-inf") if SCORES == "top" else 0.0, tl.float32)
    for j in tl.static_range(TOP_K):
        expert = LANES - 1 - (tl.max(key, 1) & 0xFFFF).to(tl.int32)
        hit = lane == expert[:, None]
        index = tl.where(column == j, expert[:, None], index)
        gates = tl.where(column == j, tl.sum(tl.where(hit, score, 0.0), 1)[:, None], gates)
        key = tl.where(hit, _LEAST, key)
    if SCORES == "top":
        e = tl.exp(gates - tl.max(gates, 1)[:, None])
        gates = e / tl.sum(e, 1)[:, None]
    if NORMED:
        gates = gates / (tl.sum(gates, 1)[:, None] + (1e-20 if SCORES == "sigmoid" else 0.0))
    return index, gates * SCALE


@triton.jit
def _count(
    index,
    gates,
    valid,
    mask,
    tokens,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return for each slot, [ROWS x SLOTS], what holds of its expert's slots.

    Their number; how many of them are before it; the first one; and over tokens that are not padding, their number
    and the sum of their gates.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SLOTS)
    flat = tl.reshape(index, [ROWS * SLOTS])[:, None]
    mine = tl.arange(0, ROWS * SLOTS)[:, None]
    number = tl.zeros([ROWS * SLOTS], tl.int32)
    before = tl.zeros([ROWS * SLOTS], tl.int32)
    first = tl.full([ROWS * SLOTS], 1 << 30, tl.int32)
    counted = tl.zeros([ROWS * SLOTS], tl.int64)
    weighed = tl.zeros([ROWS * SLOTS], tl.float64)
    for t in range(tokens):
        of = row == t
        there = tl.sum(tl.where(of, tl.where(valid, index, -1), 0), 0)[None, :]
        gate = tl.sum(tl.where(of, gates, 0.0), 0)[None, :]
        same = flat == there
        number += tl.sum(same.to(tl.int32), 1)
        before += tl.sum((same & (t * SLOTS + column[None, :] < mine)).to(tl.int32), 1)
        first = tl.minimum(first, tl.min(tl.where(same, t * TOP_K + column[None, :], 1 << 30), 1))
        text = same
        if MASKED:
            text = same & (tl.load(mask + t) != 0)
        counted += tl.sum(text.to(tl.int64), 1)
        weighed += tl.sum(tl.where(text, gate, 0.0).to(tl.float64), 1)
    return number, before, first, counted, weighed


@triton.jit
def _one(
    logits,
    bias,
    index_to,
    gates_to,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    NORMED: tl.constexpr,
    SCALE: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SLOTS)[None, :]
    index, gates = _choose(
        logits + token * EXPERTS,
        bias,
        1,
        EXPERTS,
        TOP_K,
        SCORES,
        NORMED,
        SCALE,
        BIASED,
        GROUPS,
        KEPT,
        TWO,
        1,
        LANES,
        SLOTS,
        MOST,
    )
    at = token * TOP_K + column
    tl.store(index_to + at, index.to(tl.int64), mask=column < TOP_K)
    tl.store(gates_to + at, gates.to(gates_to.dtype.element_ty), mask=column < TOP_K)


@triton.jit(do_not_specialize=["tokens"])
def _routing(
    logits,
    bias,
    chosen,
    weights,
    table,
    counts,
    sums,
    mask,
    index_to,
    gates_to,
    room,
    tokens,
    GIVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORES: tl.constexpr,
    NORMED: tl.constexpr,
    SCALE: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TWO: tl.constexpr,
    COUNTS: tl.constexpr,
    SUMS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SLOTS)[None, :]
    real = (row < tokens) & (column < TOP_K)
    at = row * TOP_K + column
    if GIVEN:
        index = tl.load(chosen + at, mask=real, other=EXPERTS).to(tl.int32)
        index = tl.minimum(tl.maximum(index, 0), EXPERTS)
        gates = tl.load(weights + at, mask=real, other=0.0).to(tl.float32)
    else:
        index, gates = _choose(
            logits,
            bias,
            tokens,
            EXPERTS,
            TOP_K,
            SCORES,
            NORMED,
            SCALE,
            BIASED,
            GROUPS,
            KEPT,
            TWO,
            ROWS,
            LANES,
            SLOTS,
            MOST,
        )
        rounded = gates.to(gates_to.dtype.element_ty)
        tl.store(index_to + at, index.to(tl.int64), mask=real)
        tl.store(gates_to + at, rounded, mask=real)
        gates = rounded.to(tl.float32)
    valid = real & (index < EXPERTS)
    number, before, first, counted, weighed = _count(index, gates, valid, mask, tokens, TOP_K, ROWS, SLOTS, MASKED)
    index = tl.reshape(index, [ROWS * SLOTS])
    valid = tl.reshape(valid, [ROWS * SLOTS])
    at = tl.reshape(at, [ROWS * SLOTS])
    real = tl.reshape(real, [ROWS * SLOTS])
    leads = valid & (before == 0)
    if COUNTS:
        old = tl.load(counts + index, mask=leads, other=0)
        tl.store(counts + index, old + counted, mask=leads)
    if SUMS:
        older = tl.load(sums + index, mask=leads, other=0.0)
        tl.store(sums + index, older + weighed, mask=leads)
    live = valid & (tl.load(table + index, mask=valid, other=0) != 0)
    alone = before >= WIDTH  # a router that chooses an expert twice for a token may give it more slots than a block has
    size = tl.where(alone, 1, tl.where(before == 0, tl.minimum(number, WIDTH), 0))
    slots = tokens * TOP_K
    tl.store(room + at, tl.where(live, index, 0), mask=real)
    tl.store(room + slots + at, at * WIDTH, mask=real)
    tl.store(room + 2 * slots + at, tl.where(live, size, 0), mask=real)
    tl.store(room + 3 * slots + at, live.to(tl.int32), mask=real)
    to = tl.where(alone, at * WIDTH, first * WIDTH + before)
    tl.store(room + 4 * slots + to, at, mask=live)


def power(of: int) -> int:
    """Return the least power of two that is not below a positive number. Triton's own takes 50 us on the host."""
    return 1 << (of - 1).bit_length()


def fits(tokens: int, top_k: int, experts: int) -> bool:
    """Return whether `route` accepts this many tokens."""
    return 0 < tokens <= TOKENS and 0 < top_k <= TOP_K and experts <= EXPERTS


def choose(
    form: Routing, logits: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return experts and gates, [tokens, top_k], of any number of tokens by one launch; arguments as of `route`."""
    index, gates = _chosen(form, logits, dtype)
    choice, warps = _choice(form, logits.shape[1])
    _one[(len(logits),)](logits, bias, index, gates, **choice, num_warps=warps)
    return index, gates


def _chosen(form: Routing, logits: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return memory for experts and gates."""
    shape = len(logits), form.top_k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=dtype or logits.dtype)


def _choice(form: Routing, experts: int) -> tuple[dict[str, Any], int]:
    """Return a form as the kernels' constants, and the warps of a program."""
    lanes = power(experts)
    return {
        "EXPERTS": experts,
        "TOP_K": form.top_k,
        "SCORES": form.scores,
        "NORMED": form.normed,
        "SCALE": form.scale,
        "BIASED": form.biased,
        "GROUPS": form.groups,
        "KEPT": form.kept,
        "TWO": form.by == "two",
        "LANES": lanes,
        "SLOTS": power(form.top_k),
        "MOST": power(form.groups),
    }, 1 if lanes <= 256 else 4


def route(
    form: Routing,
    table: Tensor,
    width: int,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    tally: Tally | None = None,
    dtype: torch.dtype | None = None,
) -> Routed:
    """Route up to TOKENS tokens on the current stream, without waiting: up to eight slots by one launch, more by two.

    Args:
        form: of `given` experts only `top_k` is read.
        table: int64 [experts], handles; slots of experts with 0 there get no block.
        width: the most slots of a block.
        logits: [tokens, experts], contiguous.
        bias: float32 [experts], for a form that is `biased`.
        given: experts and gates, [tokens, top_k], contiguous, in place of logits; what is past the experts has none.
        tally: where to count.
        dtype: of gates; by default the logits'.

    Raises ValueError for shapes that do not fit.
    """
    count = len(table)
    x = logits if given is None else given[0]
    if x is None or x.ndim != 2 or not fits(len(x), form.top_k, count) or not x.is_contiguous():
        raise ValueError(f"routing of {None if x is None else tuple(x.shape)} among {count} experts does not fit")
    if x.shape[1] != (count if given is None else form.top_k) or form.biased != (bias is not None):
        raise ValueError(f"routing of {tuple(x.shape)} among {count} experts: {form}")
    tokens = len(x)
    slots = len(x) * form.top_k
    room = torch.empty(slots * (4 + width), dtype=torch.int32, device=x.device)
    index, gates = _chosen(form, x, dtype) if given is None else given
    made = tally or _NOWHERE
    masked = tally is not None and tally.mask is not None
    choice, warps = _choice(form, count)
    if given is None and tokens * choice["SLOTS"] > 8:  # more scores or slots take more registers than a thread has
        given = index, gates = choose(form, x, bias, dtype)
        x = index
    if given is not None:
        warps = 4 if power(tokens) * choice["SLOTS"] <= 64 else 8
    _routing[(1,)](
        x,
        bias,
        index,
        gates,
        table,
        made.counts,
        made.sums,
        made.mask,
        index,
        gates,
        room,
        tokens,
        GIVEN=given is not None,
        COUNTS=tally is not None,
        SUMS=made.sums is not None,
        MASKED=masked,
        WIDTH=width,
        ROWS=power(tokens),
        **choice,
        num_warps=warps,
    )
    expert, first, size, live = room[: 4 * slots].view(4, slots).unbind()
    return Routed(index, gates, Geometry(room[4 * slots :], expert, first, size, width), live)


_NOWHERE = Tally(None)  # type: ignore[arg-type]


@triton.jit(do_not_specialize=["slots"])
def _rank(index, table, counts, live, rank, slots, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    real = slot < slots
    expert = tl.load(index + slot, mask=real, other=-1)
    known = (expert >= 0) & (expert < EXPERTS)
    here = known & (tl.load(table + expert, mask=known, other=0) != 0)
    tl.store(live + slot, here.to(tl.int32), mask=real)
    tl.store(rank + slot, tl.atomic_add(counts + expert, 1, mask=here), mask=here)


@triton.jit(do_not_specialize=["slots"])
def _place(
    index,
    counts,
    live,
    rank,
    order,
    block_expert,
    block_first,
    block_count,
    slots,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
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
            some = j < blocks
            block = first + j
            tl.store(block_expert + block, lane, mask=some)
            tl.store(block_first + block, begins + j * TOKENS, mask=some)
            tl.store(block_count + block, tl.minimum(each - j * TOKENS, TOKENS), mask=some)


def sort(index: Tensor, table: Tensor, tokens: int) -> tuple[Geometry, Tensor, Tensor]:
    """Sort slots by expert and cut them into blocks of `tokens` slots.

    Args:
        index: int64 [tokens, top_k], contiguous.
        table: int64 [experts], handles; slots of experts with 0 there get no block, nor do those of other indices.

    Returns:
        the blocks, whether each slot is in one, int32 [slots], and how many of each expert are, int32 [experts].
    """
    slots = index.numel()
    experts = len(table)
    blocks = min(slots, experts) + slots // tokens  # enough for any routing
    sizes = experts, slots, slots, slots, blocks, blocks, blocks
    apart = [-(-n // 16) * 16 for n in sizes]  # all begin on multiples of 16 bytes, for which kernels were compiled
    room = torch.zeros(sum(apart), dtype=torch.int32, device=index.device).split(apart)
    counts, live, rank, order, expert, first, count = (part[:n] for part, n in zip(room, sizes, strict=True))
    grid = (triton.cdiv(slots, CHUNK),)
    some = {"EXPERTS": experts, "CHUNK": CHUNK}
    _rank[grid](index, table, counts, live, rank, slots, **some)
    _place[grid](
        index, counts, live, rank, order, expert, first, count, slots, **some, LANES=power(experts), TOKENS=tokens
    )
    return Geometry(order, expert, first, count, tokens), live, counts


def reference(form: Routing, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return experts and gates, float32, of logits [tokens, experts] in plain torch: what `route` is held against."""
    x = logits.float()
    scores = x
    if form.scores == "softmax":
        scores = x.softmax(-1)
    elif form.scores == "sigmoid":
        scores = x.sigmoid()
    choice = scores if bias is None else scores + bias
    if form.groups > 1:
        of = choice.view(len(x), form.groups, -1)
        best = of.amax(-1) if form.by == "max" else of.topk(2, dim=-1)[0].sum(-1)
        kept = torch.sort(best, dim=-1, descending=True, stable=True)[1][:, : form.kept]
        inside = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)[:, :, None].expand_as(of).flatten(1)
        choice = choice.masked_fill(~inside, 0.0 if form.by == "max" else float("-inf"))
        scores = choice if form.by == "max" else scores
    index = torch.sort(choice, dim=-1, descending=True, stable=True)[1][:, : form.top_k]
    gates = scores.gather(1, index)
    if form.scores == "top":
        gates = gates.softmax(-1)
    if form.normed:
        gates = gates / (gates.sum(-1, keepdim=True) + (1e-20 if form.scores == "sigmoid" else 0.0))
    return index, gates * form.scale
