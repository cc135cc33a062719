"""Hostile coded matrices against the codec's fast path.

Input and output end at pages that may not be touched, so that a read or write beyond them ends the process. Every
stream must raise CodecError or decode to something (which the extent's digest would then have caught), and memory
allocated must stay below what the header's checked sizes allow.
"""

import contextlib
import ctypes
import mmap
import tracemalloc
from typing import Any

import numpy as np
from exponent_inputs import draw

from moepack.pack.codec import exponent_fast, fp8
from moepack.pack.codec.exponent import HEADER, TILE
from moepack.pack.errors import CodecError
from moepack.pack.spec import Matrix, Version

PAGE = mmap.PAGESIZE
SIZES = (1, 100, 128, 1000, TILE, TILE + 1, 20000)


class Fenced:
    """Room for bytes that end (but for alignment to 4) at a page that may not be touched."""

    def __init__(self, size: int):
        self._pages = -(-size // PAGE) * PAGE
        self._map = mmap.mmap(-1, self._pages + PAGE)
        self._all = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        fence = ctypes.c_void_p(self._all.ctypes.data + self._pages)
        assert libc.mprotect(fence, ctypes.c_size_t(PAGE), 0) == 0

    def room(self, size: int) -> np.ndarray[Any, Any]:
        """The last `size` bytes, beginning on a multiple of 4."""
        start = (self._pages - size) // 4 * 4
        return self._all[start : start + size]


def mutate(coded: np.ndarray[Any, Any], others: list[np.ndarray[Any, Any]], rng: np.random.Generator):
    """One of: flipped bits, noise over a stretch, truncation, another stream's header or table, forged lengths."""
    out = coded.copy()
    kind = rng.integers(6)
    if kind == 0:
        for at in rng.integers(0, len(out), rng.integers(1, 9)):
            out[at] ^= 1 << rng.integers(8)
    elif kind == 1:
        at, length = rng.integers(0, len(out)), int(rng.integers(1, 64))
        out[at : at + length] = rng.integers(0, 256, len(out[at : at + length]))
    elif kind == 2:
        out = out[: rng.integers(0, len(out))]
    elif kind == 3:
        other = others[rng.integers(len(others))]
        span = slice(16, HEADER) if rng.integers(2) else slice(HEADER, HEADER + 64)
        length = min(len(out[span]), len(other[span]))
        out[span][:length] = other[span][:length]
    elif kind == 4:
        word = 4 * int(rng.integers(0, min(len(out) // 4, 40)))
        value = rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, int(rng.integers(1 << 32)), len(out)])
        out[word : word + 4] = np.array([value], np.uint32).view(np.uint8)
    else:  # a lane's length, and one that makes up for it: sizes stay right, lanes do not
        start = HEADER + 8 * (-(-int(out[:4].view("<u4")[0]) // TILE) + 1) + 4 * int(out[12:16].view("<u4")[0]) + 4
        if start + 32 <= len(out):
            a, b = rng.integers(0, 32, 2)
            d = int(rng.integers(1, 255))
            out[start + a] = (int(out[start + a]) + d) % 256
            out[start + b] = (int(out[start + b]) - d) % 256
    return out


def attack_extent(version: Version, matrices: tuple[Matrix, ...], extent, count: int) -> tuple[int, int]:
    """Restore and check `count` mutations of a stored extent; return how many were refused, and how many decoded."""
    rng, refused = np.random.default_rng(0), 0
    stored, memory = Fenced(len(extent)), Fenced(version.resident_size(matrices))
    for _ in range(count):
        made = mutate(extent, [extent], rng)
        data, out = stored.room(len(made)), memory.room(version.resident_size(matrices))
        data[:] = made
        try:
            version.restore(matrices, data, out)
            list(version.check(matrices, data))
        except CodecError:
            refused += 1
    return refused, count - refused


def attack(count: int, overrun: int):
    """Decode `count` mutated streams of BF16 weights, on every level in turn. `overrun` plants a fault."""
    kinds = ("gaussian", "cauchy", "uniform", "constant")
    whole = [(n, exponent_fast.encode(draw(kind, n, n))) for n in SIZES for kind in kinds]
    _on_every_level(whole, np.dtype(np.uint16), exponent_fast.decode_into, count, overrun)


def attack_fp8(count: int, overrun: int):
    """Decode `count` mutated streams of FP8 codes, on every level in turn."""
    rng = np.random.default_rng(1)
    whole: list[tuple[int, np.ndarray[Any, Any]]] = []
    for n in (1000, 1029, TILE, TILE + 900, 20000):
        codes = np.clip(np.abs(rng.normal(0, 20, n)), 0, 127).astype(np.uint8)
        apart = np.where(np.arange(n) // 4 % 16 == 5, 3, codes).astype(np.uint8)
        whole += [(n, coded) for kind in (codes, apart) if (coded := fp8.encode(kind)) is not None]
    assert len(whole) == 10
    _on_every_level(whole, np.dtype(np.uint8), fp8.decode_into, count, overrun)


def _on_every_level(
    whole: list[tuple[int, np.ndarray[Any, Any]]], dtype: np.dtype[Any], decode_into, count: int, overrun: int
):
    native = exponent_fast.engine()
    for level in range(native.BEST + 1) if native and not overrun else [None]:
        if native and level is not None:
            native.use_level(level)
        _attack(whole, dtype, decode_into, count, overrun)


def _attack(whole: list[tuple[int, np.ndarray[Any, Any]]], dtype: np.dtype[Any], decode_into, count: int, overrun: int):
    rng, width = np.random.default_rng(0), dtype.itemsize
    most = max(n for n, _ in whole)
    room_in, room_out = Fenced(max(len(c) for _, c in whole)), Fenced(width * most + 4)
    others = [c for _, c in whole]
    tracemalloc.start()
    for _ in range(count):
        n, coded = whole[rng.integers(len(whole))]
        data = mutate(coded, others, rng)
        fenced = room_in.room(len(data))
        fenced[:] = data
        out = room_out.room(width * (n + overrun))[width * overrun :].view(dtype)
        if overrun:
            ctypes.memset(out.ctypes.data + out.nbytes, 0, 4 * overrun)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with contextlib.suppress(CodecError):
            decode_into(fenced, out)
        used = tracemalloc.get_traced_memory()[1] - before
        assert used < 64 * 1024, f"decoding {len(data)} bytes allocated {used}"
