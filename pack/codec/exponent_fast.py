"""The exponent codec, fast form: the same bytes as exponent.py, on all cores, straight into the caller's buffer.

The loops are C where installing found a compiler (exponent_native.py); they release the GIL. This module prepares
tables, checks bounds, and shares tiles among threads. Without the loops, exponent.py does the same with NumPy.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar

import numpy as np

from ..errors import CodecError
from ..processors import processors
from ..trials import best_level
from . import exponent
from .bits import Bf16Bits, Buffer, Codes, Words
from .exponent import (
    ESCAPE,
    LANES,
    SAMPLED,
    SYMBOLS,
    TILE,
    Code,
    CodedMatrix,
    code_lengths,
    header,
    make_code,
    parse,
)

T = TypeVar("T")
R = TypeVar("R")
# Messages for the error numbers that the loops add to 8 * tile.
_REASONS = ("", "mode or size", "lane lengths", "patches", "code words")
_GUARD = 9 * TILE // LANES // 32 + 2  # words a lane of a damaged tile could read past the end of the stream
_KEPT = 64 << 20  # most bytes of each of the three scratch arrays that a thread keeps
_SHARE = 64  # tiles a thread takes at least: 1 MiB of weights, some 200 microseconds


@functools.cache
def engine() -> ModuleType | None:
    """The module with the compiled loops; None where they were not compiled, or do not stand their trial here."""
    try:
        from . import exponent_native as loops
    except OSError:
        return None
    names = dict(enumerate(loops.LEVELS[: loops.BEST + 1]))
    best = best_level(loops.PATH, names, loops.use_level, trial)
    return None if best is None else loops


def engine_name() -> str:
    """The name of the loops that `engine` found, for reports."""
    loops = engine()
    return "NumPy" if loops is None else str(loops.LEVELS[loops.level])


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(processors(), thread_name_prefix="moepack-codec")


def _shares(tiles: int, threads: int | None) -> list[tuple[int, int]]:
    count = max(1, min(threads or processors(), tiles // _SHARE))
    edges = [tiles * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def encode(bits: Bf16Bits, threads: int | None = None) -> Buffer:
    """Code BF16 bits, uint16 [n]; the same bytes as `exponent.encode`, with any `threads` (default: all cores)."""
    return encode_by(engine(), bits, threads)


def encode_by(loops: ModuleType | None, bits: Bf16Bits, threads: int | None) -> Buffer:
    """Code as `encode` does, by these compiled loops, or without any."""
    bits = np.ascontiguousarray(bits).reshape(-1)
    if loops is None:
        return exponent.encode(bits)
    counts = np.zeros(256, np.int64)
    loops.count(bits, counts)
    code = make_code(counts, bits.size >= SAMPLED)
    codewords = code.codewords().astype(np.uint16)
    entry = np.full(256, 1 << 12 | int(codewords[ESCAPE]) << 4 | int(code.length[ESCAPE]), np.uint16)
    for s in range(SYMBOLS - 2, -1, -1):
        if code.length[s]:
            entry[code.exponent[s]] = codewords[s] << np.uint16(4) | np.uint16(code.length[s])
    return _encode_with(loops, bits, code, entry, threads)


def encode_fp8(loops: ModuleType, codes: Codes, code: Code, threads: int | None) -> Buffer:
    """Code FP8 codes by these compiled loops, as `exponent.assemble_fp8` does."""
    entry = np.zeros(256, np.uint16)
    entry[:SYMBOLS] = code.codewords().astype(np.uint16) << 4 | code.length
    return _encode_with(loops, codes, code, entry, threads)


def _encode_with(loops: ModuleType, bits: Bf16Bits | Codes, code: Code, entry: Bf16Bits, threads: int | None) -> Buffer:
    """Code BF16 bits or FP8 codes by a code, and by the loops' table of it (exponent_native.encode)."""
    fp8 = bits.dtype == np.uint8
    shares = _shares(-(-bits.size // TILE), threads)
    codewords = code.codewords()
    shortest = int(np.argmax(code.length == code.length[code.length > 0].min())) if bits.size else 0
    fill = int(codewords[shortest]) << 4 | int(code.length[shortest])
    plane_size = -(-bits.size // 2) if fp8 else bits.size
    plane = _room("plane", -(-plane_size // 4)).view(np.uint8)[:plane_size]
    # A tile is written in its coded form only where that is smaller than the raw one, patches included. Patches are
    # written before that is known, so every share has room for the patches of one more tile.
    bound = 1 + TILE // (8 if fp8 else 4)
    stream = _room("stream", bound * shares[-1][1])
    patches = _room("patches", bound * shares[-1][1] + TILE * len(shares))

    def part(i: int) -> tuple[Words, Words, Words, Words]:
        """Encode one share of the tiles: stream, patches, and their ends by tile."""
        a, b = shares[i]
        tile_end = np.zeros(b - a, np.uint32)
        patch_end = np.zeros(b - a, np.uint32)
        s = stream[bound * a : bound * b]
        p = patches[bound * a + TILE * i : bound * b + TILE * (i + 1)]
        o = plane[a * TILE // 2 : b * TILE // 2] if fp8 else plane[a * TILE : b * TILE]
        loops.encode(bits[a * TILE : b * TILE], entry, np.uint16(fill), s, tile_end, patch_end, p, o)
        return s[: tile_end[-1] if b > a else 0], p[: patch_end[-1] if b > a else 0], tile_end, patch_end

    coded = _map(part, range(len(shares)))
    starts: list[list[Words]] = [[np.zeros(1, np.uint32)], [np.zeros(1, np.uint32)]]
    for _, _, *ends in coded:
        for k in range(2):
            starts[k].append(ends[k] + starts[k][-1][-1])
    words, n_patches = (int(starts[k][-1][-1]) if bits.size else 0 for k in range(2))
    parts = [*starts[0], *starts[1], *(c[1] for c in coded), *(c[0] for c in coded)]
    head = header(bits.size, words, n_patches, code)
    return np.concatenate([head, *(p.view(np.uint8) for p in parts), plane])


_scratch = threading.local()


def _room(name: str, size: int) -> Words:
    """Scratch words of this thread, kept for the next call: fresh memory costs as much as the coding."""
    room: Words | None = getattr(_scratch, name, None)
    if room is None or room.size < size:
        room = np.empty(size, np.uint32)
        if room.nbytes <= _KEPT:
            setattr(_scratch, name, room)
    return room


def decode_into(data: Buffer, out: Bf16Bits, threads: int | None = None) -> None:
    """Decode a coded matrix into `out`, uint16 [n], contiguous; the C loops allocate nothing of that size.

    Raises CodecError when `data` is not exactly a well-formed coded matrix of out.size weights; `out` is then partly
    written.
    """
    if out.dtype != np.uint16 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("decode_into needs a contiguous, writeable uint16 array")
    data = aligned(data)
    loops = engine()
    if loops is None:
        out[:] = exponent.decode(data, out.size)
        return
    decode_parsed(loops, parse(data, out.size), out, threads)


def aligned(data: Buffer) -> Buffer:
    """`data` itself where the engines can read words from it, else a copy."""
    return data.copy() if not data.flags.c_contiguous or data.ctypes.data % 4 else data


def decode_parsed(loops: ModuleType, coded: CodedMatrix, out: Bf16Bits | Codes, threads: int | None) -> None:
    """Decode what `parse` found into `out`. Raises CodecError for a malformed tile."""
    stream = coded.stream
    # A damaged tile may read what follows the stream, the plane, as code words, and is then rejected.
    if len(coded.plane) < 4 * _GUARD:
        stream = np.concatenate([stream, np.zeros(_GUARD, np.uint32)])
    table = coded.code.table()
    found = (table & 15, coded.code.exponent[table >> 4], coded.tile_start, coded.patch_start, coded.patches, stream)
    for status in _map(lambda share: loops.decode((*found, coded.plane), out, *share), _shares(coded.tiles, threads)):
        if status:
            raise CodecError(f"tile {status // 8}: bad {_REASONS[status % 8]}")


def _map(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [function(items[0])] if len(items) == 1 else list(_pool().map(function, items))


def decode(data: Buffer, weights: int) -> Bf16Bits:
    """Decode a coded matrix to BF16 bits, uint16 [weights]."""
    out = np.empty(weights, np.uint16)
    decode_into(data, out)
    return out


def trial() -> str:
    """Return what the compiled loops code or decode differently from exponent.py, at the level in use; "" if nothing.

    They are tried on weights, on weights of which some have exponents without code words, on bits that no code makes
    smaller, and on FP8 codes: a whole tile, and one that is neither whole nor whole words.
    """
    from . import exponent_native as loops

    random = np.random.default_rng(0)
    size = TILE + 1003
    uniform = random.integers(0, 1 << 16, size).astype(np.uint16)
    weights = (random.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    patched = weights.copy()
    patched[::97] = uniform[::97]
    wrong = []
    for name, bits in (("weights", weights), ("weights with patches", patched), ("raw tiles", uniform)):
        coded = exponent.encode(bits)
        whole = np.zeros_like(bits)
        parts = np.zeros_like(bits)
        if not np.array_equal(encode_by(loops, bits, 1), coded):
            wrong.append(f"{name}: coding")
        if _fails(loops, coded, whole) or not np.array_equal(whole, bits):
            wrong.append(f"{name}: decoding")
        opened = loops.open_coded(coded, size, parts.ctypes.data)
        if opened is None or opened.decode() or not np.array_equal(parts, bits):
            wrong.append(f"{name}: decoding in parts")
    codes = (uniform & 0xBF).astype(np.uint8)  # half of the exponents, so that coding gains
    counts = np.zeros(256, np.int64)
    loops.count(codes, counts)
    if not np.array_equal(counts, np.bincount(exponent.sample(codes) >> 3 & 15, minlength=256)):
        wrong.append("FP8 codes: counting")
    lengths = np.array(code_lengths([1 + 8 * (e < 8) for e in range(SYMBOLS)]), np.uint8)
    code = Code(np.arange(SYMBOLS, dtype=np.uint8), lengths)
    small = exponent.assemble_fp8(codes, code)
    if not np.array_equal(encode_fp8(loops, codes, code, 1), small):
        wrong.append("FP8 codes: coding")
    again = np.zeros_like(codes)
    if _fails(loops, small, again) or not np.array_equal(again, codes):
        wrong.append("FP8 codes: decoding")
    return "; ".join(wrong)


def _fails(loops: ModuleType, coded: Buffer, out: Bf16Bits | Codes) -> bool:
    """Decode into `out`; whether the loops call well-formed tiles bad."""
    try:
        decode_parsed(loops, parse(coded, out.size, fp8=out.dtype == np.uint8), out, 1)
    except CodecError:
        return True
    return False
