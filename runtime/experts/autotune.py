"""Measure up to how many tokens an expert runs faster from packed bytes than from unpacked ones.

A search over a few numbers of tokens, on two experts at a time, takes 0.05 to 0.25 seconds for an encoding and dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.affine_native import LayerForms, has_tiles, product, unpack
from moepack.runtime.kernels.by_torch import multiply, of_matrix, of_packed
from moepack.runtime.kernels.forms import handle
from moepack.runtime.kernels.reference import plain_weights, sections_of

Limits = npt.NDArray[np.int64] | None
ROWS = 768
COLS = 2048
EXPERTS = 2
# from MANY tokens on a run is long enough to be compared
RUNS = 5
MANY = 32
FEW_RUNS = 2
ENOUGH = 0.12  # seconds after which the search stops: on slow machines a longer search gains little
MOST = 512  # tokens: what is faster with so many is so with more


def measure_limit(dtype: torch.dtype, name: str, candidates: Sequence[int], threads: int) -> int:
    """The largest number of tokens of the rising `candidates` at which packed bytes are as fast as unpacked tiles.

    A candidate above MOST is tried with MOST tokens.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter  # thread time leaves other processes out
    fused, unpacked = _ways(dtype, name, threads, clock)
    low = 0
    high = len(candidates) - 1
    began = clock()
    while low < high and clock() - began < ENOUGH:
        middle = (low + high + 1) // 2
        tokens = min(candidates[middle], MOST)
        times = (np.inf, np.inf)
        for _ in range(RUNS if tokens < MANY else FEW_RUNS):
            times = (min(times[0], fused(tokens)), min(times[1], unpacked(tokens)))
        low, high = (middle, high) if times[0] <= times[1] else (low, middle - 1)
    return candidates[low]


def _ways(
    dtype: torch.dtype, name: str, threads: int, clock: Callable[[], float]
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Return two functions from tokens of each expert to seconds: one for packed bytes, one for unpacked weights."""
    m = Matrix("m", ROWS, COLS)
    version = Version.of(name)
    extents = torch.zeros(EXPERTS, version.resident_size((m,)), dtype=torch.uint8)
    extents.random_(0, 256, generator=torch.Generator().manual_seed(0))
    # Make all scales and weights lie between 1/128 and 2: with denormal ones torch's products took ten times as long.
    extents.view(torch.int16).bitwise_and_(0x03FF).bitwise_or_(0x3C00)
    for s in version.sections((m,)) if version.released else ():  # bytes stand for numbers of their own
        part = extents[:, s.offset : s.end]
        if s.kind == "plane0" and version.zero == "none":
            part.bitwise_and_(0x3F if version.bits == 8 else 0xFF)  # E4M3 below 2, no NaN
        elif s.kind == "scale" and s.item == 1:
            part.fill_(127 if version.scale_dtype == "F8_E8M0" else 0x38)  # 1 in E8M0, in E4M3
    forms = LayerForms((m,), (version,))

    def timed(tokens: int, work: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> float:
        x = torch.ones(EXPERTS * tokens, COLS, dtype=dtype)
        index = torch.arange(EXPERTS).repeat_interleave(tokens)[:, None]
        out = torch.empty(len(x), ROWS, dtype=dtype)
        began = clock()
        work(x, index, out)
        return clock() - began

    def by_kernels(limits: Limits, x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        handles = np.array([handle(e.data_ptr(), 0) for e in extents], np.uint64)
        product(forms, 0, handles, x, index, out, limits, threads)

    def by_torch(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        for extent, mine, to in zip(extents, x.chunk(EXPERTS), out.chunk(EXPERTS), strict=True):
            plain = plain_weights(extent, sections_of((m,), version))
            packed = of_packed(COLS, partial(unpack, forms, 0, 0, extent, threads=threads))
            multiply(mine, of_matrix(plain[0]) if plain else packed, to)

    fused = partial(by_kernels, None)
    unpacked = partial(by_kernels, np.zeros(1, np.int64)) if has_tiles(dtype) else by_torch
    return lambda tokens: timed(tokens, fused), lambda tokens: timed(tokens, unpacked)
