"""The search for trellis codes: on a CPU by the compiled library (c/search.c), else by torch, with the same results."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moepack.pack import isa, trials
from moepack.pack.codec import trellis

KEPT = 8  # bits of the last codes that tell survivors apart
NEVER = 1e30  # the cost of a beginning that is none
LONGEST = 64  # columns of a search
PART = 64  # rows that torch searches at once: 4 MiB of targets
SLOW = (
    "torch searches for the codes of t3, t2d3 and t2, which takes about 50 times as long as the compiled search does: "
    "install moepack again where there is a C compiler"
)
PATH = Path(__file__).with_name("_search.so")  # installing builds it where there is a compiler (setup.py)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that are searched together, at most LONGEST."""

    targets: Tensor  # weights, and what the errors before these columns add to them, float32 [rows, cols]
    weights: Tensor  # float32 [rows, cols]
    scale: Tensor  # of a level, float32 [rows, cols]
    cost: Tensor  # of squared distances to targets, float32 [cols]
    feed: Tensor  # float32 [cols, cols]: what an error in one column (first index) adds to the targets of later ones
    taken: int  # how many of the columns get their codes; the others are looked at

    @property
    def square(self) -> Tensor:
        """The cost of squared distances in levels, float32 [rows, cols]."""
        return self.cost * (self.scale * self.scale)


def search(bits: int, columns: Columns, state: Tensor) -> tuple[Tensor, Tensor]:
    """Choose codes of 2 or 3 bits with little error, and go on from the codes before.

    `state` is int32 [rows], of the codes before: the low bits of the last eight as in a state of the trellis, and from
    bit 16 on their third bits; 0 at a row's beginning. Returns the codes, uint8 [rows, taken], and the state behind
    them.
    """
    if columns.targets.device.type == "cpu" and (level := _level()) is not None:
        return _compiled(bits, columns, state, level)
    if columns.targets.device.type == "cpu":
        _warn()
    parts = []
    for start in range(0, len(state), PART):
        rows = slice(start, start + PART)
        some = replace(columns, targets=columns.targets[rows], weights=columns.weights[rows], scale=columns.scale[rows])
        parts.append(by_torch(bits, some, state[rows]))
    return torch.cat([codes for codes, _ in parts]), torch.cat([after for _, after in parts])


def by_torch(bits: int, columns: Columns, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `search`. Of the sequences that end in the same KEPT bits, the one with the least error survives."""
    targets = columns.targets
    rows, cols = targets.shape
    taken = columns.taken
    ways = 1 << bits
    square = columns.square
    inverse = 1 / columns.scale
    own = targets[:, None].repeat(1, 1 << KEPT, 1)  # each survivor's targets
    shape = (rows, ways, 1, (1 << KEPT) >> bits)  # survivors by their first bits, and by the others
    code = torch.arange(ways, device=targets.device, dtype=torch.int32)[:, None]
    low = (state & 0xFFFF)[:, None].repeat(1, 1 << KEPT)
    high = (state >> 16)[:, None].repeat(1, 1 << KEPT)
    cost = torch.full_like(low, NEVER, dtype=torch.float32)
    begin = _last_codes(low[:, :1], high[:, :1], bits) & ((1 << KEPT) - 1)
    cost.scatter_(1, begin.long(), 0.0)
    kept = []
    for column in range(cols):
        new_low = low.view(shape) >> 2 | (code & 3) << 14
        new_high = high.view(shape) >> 1 | code >> 2 << 7
        x = own[..., column] * inverse[:, column, None] + trellis.ZERO
        distance = x.view(shape) - trellis.level_of(new_low ^ new_high).float()
        every = cost.view(shape) + distance * distance * square[:, column, None, None, None]
        least, best = every.min(1, keepdim=True)

        def of_best(values: Tensor, best: Tensor = best) -> Tensor:
            return values.gather(1, best)[:, 0].transpose(1, 2).flatten(1)

        cost = least[:, 0].transpose(1, 2).flatten(1)
        low = of_best(new_low)
        high = of_best(new_high)
        kept.append((low, high))
        source = _last_codes(low, high, bits).long() >> bits & ((1 << KEPT) - 1)
        fed = own[..., column].gather(1, source) - columns.weights[:, column, None]
        error = of_best(distance) * columns.scale[:, column, None] - fed
        own = own.gather(1, source[..., None].expand_as(own)) + error[..., None] * columns.feed[column]
    at = cost.argmin(1, keepdim=True)
    codes = torch.empty(rows, taken, dtype=torch.uint8, device=targets.device)
    for column in reversed(range(cols)):
        own_low, own_high = (values.gather(1, at) for values in kept[column])
        if column == taken - 1:
            state = (own_low | own_high << 16)[:, 0]
        if column < taken:
            codes[:, column] = (at & (ways - 1))[:, 0].to(torch.uint8)
        at = _last_codes(own_low, own_high, bits).long() >> bits & ((1 << KEPT) - 1)
    return codes, state


def _last_codes(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """The last codes, at least KEPT and `bits` bits of them, the last one in the lowest bits."""
    out = torch.zeros_like(low)
    for back in reversed(range(-(-KEPT // bits) + 1)):
        code = low >> 14 - 2 * back & 3
        if bits == 3:
            code = code | (high >> 7 - back & 1) << 2
        out = out << bits | code
    return out


class _Search(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("cols", "taken", "bits")),
        *(
            (name, ctypes.c_void_p)
            for name in ("targets", "weights", "scale", "inverse", "cost", "feed", "state", "codes")
        ),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = trials.open_library(PATH, PATH.parent / "c")
    except OSError:
        return None
    library.moepack_search.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]
    library.moepack_search.restype = None
    library.moepack_search_level.restype = ctypes.c_int64
    return library


@cache
def _warn() -> None:
    trials.log.warning(SLOW)


def compiled() -> bool:
    """Whether the compiled library searches on a CPU; without it, SLOW says what that costs."""
    return _level() is not None


@cache
def _level() -> int | None:
    """The level of instructions (isa.py) at which the library chooses torch's codes; None without one."""
    library = _library()
    if library is None:
        return None
    best = min(isa.bound(library.moepack_search_level()), isa.LEVELS.index("avx2"))
    names = dict(enumerate(isa.LEVELS[: best + 1]))
    used = [0]

    def use(level: int) -> int:
        used[0] = level
        return level

    return trials.best_level(PATH, names, use, lambda: trial(used[0]))


def trial(level: int) -> str:
    """What the library finds otherwise than torch at a level, in words, or ""."""
    made = torch.Generator().manual_seed(0)
    for bits in (2, 3):
        targets = torch.randn(5, 28, generator=made)
        scale = (1 + torch.rand(5, 28, generator=made)) / trellis.DEVIATION
        weights = targets + torch.randn(5, 28, generator=made) / 8
        cost = torch.rand(28, generator=made)
        feed = torch.randn(28, 28, generator=made).triu(1) / 4
        state = torch.randint(1 << 16, (5,), generator=made, dtype=torch.int32)
        if bits == 3:
            state |= torch.randint(1 << 8, (5,), generator=made, dtype=torch.int32) << 16
        columns = Columns(targets, weights, scale, cost, feed, 20)
        wanted = by_torch(bits, columns, state)
        found = _compiled(bits, columns, state, level)
        if not all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)):
            return f"codes of {bits} bits"
    return ""


def _compiled(bits: int, columns: Columns, state: Tensor, level: int) -> tuple[Tensor, Tensor]:
    library = _library()
    assert library is not None
    rows, cols = columns.targets.shape
    state = state.clone()
    codes = torch.empty(rows, columns.taken, dtype=torch.uint8)
    feed = torch.zeros(cols, LONGEST)
    feed[:, :cols] = columns.feed
    of_rows = columns.targets, columns.weights, columns.scale, 1 / columns.scale
    read = [t.contiguous() for t in (*of_rows, columns.cost, feed)]
    pointers = [tensor.data_ptr() for tensor in (*read, state, codes)]
    call = _Search(cols, columns.taken, bits, *pointers)
    threads = min(torch.get_num_threads(), -(-rows // 16))
    ends = [rows * i // threads for i in range(threads + 1)]

    def some(first: int, last: int) -> None:
        library.moepack_search(ctypes.addressof(call), first, last, level)

    if threads == 1:
        some(0, rows)
        return codes, state
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, ends, ends[1:]))
    return codes, state
