"""The exponent codec compiled with numba: the same bytes as exponent.py, hundreds of times faster.

Releases the GIL; decodes straight into the caller's buffer. numba carries its own compiler, so a machine without one
runs this too. Functions are compiled on first use and cached on disk beside the package (or in NUMBA_CACHE_DIR).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .errors import CodecError
from .exponent import (
    CODED,
    ESCAPE,
    LANE_WORDS,
    LANES,
    RAW,
    SYMBOLS,
    TILE,
    Bits16,
    Bytes,
    Coded,
    make_code,
    parse,
)

# What `_decode` answers: 0, or 1 + 4 * tile + one of these reasons.
_REASONS = ("mode or size", "lane lengths", "patches", "code words")
_GUARD = 9 * TILE // LANES // 32 + 2  # words a lane of a damaged tile could read past the end of the stream


@njit(nogil=True, cache=True)
def _histogram(bits, counts):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        counts[(bits[i] >> 7) & 0xFF] += 1


@njit(nogil=True, cache=True)
def _encode(bits, entry, fill, out, tile_start, patch_start, patches, plane):  # type: ignore[no-untyped-def]
    """Write stream words and patches; entry[exponent] is escape << 12 | code word << 4 | length."""
    n = bits.size
    word = 0
    n_patches = 0
    lane_bits = np.empty(LANES, np.int64)
    for i in range(n):
        b = bits[i]
        plane[i] = (b >> 8 & 0x80) | (b & 0x7F)
    for t in range(tile_start.size - 1):
        begin = t * TILE
        size = min(TILE, n - begin)
        quads = (size + 4 * LANES - 1) // (4 * LANES)
        lane_bits[:] = 0
        escapes = 0
        for i in range(size):
            e = entry[(bits[begin + i] >> 7) & 0xFF]
            lane_bits[(i >> 2) & (LANES - 1)] += e & 15
            escapes += e >> 12
        for i in range(size, quads * 4 * LANES):
            lane_bits[(i >> 2) & (LANES - 1)] += fill & 15
        base = lane_bits.min()
        total = lane_bits.sum()
        coded_words = LANE_WORDS + (total + 31) // 32
        raw_words = 1 + (size + 3) // 4
        if lane_bits.max() - base > 255 or coded_words + escapes >= raw_words:
            out[word] = np.uint32(RAW << 16)
            for i in range(raw_words - 1):
                v = np.uint32(0)
                for k in range(4):
                    if 4 * i + k < size:
                        v |= np.uint32((bits[begin + 4 * i + k] >> 7) & 0xFF) << np.uint32(8 * k)
                out[word + 1 + i] = v
            word += raw_words
        else:
            out[word] = np.uint32(base)
            for i in range(LANES // 4):
                v = np.uint32(0)
                for k in range(4):
                    v |= np.uint32(lane_bits[4 * i + k] - base) << np.uint32(8 * k)
                out[word + 1 + i] = v
            at = word + LANE_WORDS
            acc = np.uint64(0)
            held = np.uint64(0)
            for lane in range(LANES):
                for q in range(quads):
                    for k in range(4):
                        i = 4 * (q * LANES + lane) + k
                        e = entry[(bits[begin + i] >> 7) & 0xFF] if i < size else fill
                        length = np.uint64(e & 15)
                        acc = (acc << length) | np.uint64((e >> 4) & 0xFF)
                        held += length
                    if held >= 32:
                        held -= np.uint64(32)
                        out[at] = np.uint32(acc >> held)
                        at += 1
            if held:
                out[at] = np.uint32(acc << (np.uint64(32) - held))
            for i in range(size):
                e = (bits[begin + i] >> 7) & 0xFF
                if entry[e] >> 12:
                    patches[n_patches] = np.uint32(i) | np.uint32(e) << np.uint32(16)
                    n_patches += 1
            word += coded_words
        tile_start[t + 1] = word
        patch_start[t + 1] = n_patches


@njit(nogil=True, cache=True)
def _decode(table, exponent, tile_start, patch_start, patches, stream, plane, out):  # type: ignore[no-untyped-def]
    """Decode every tile into `out`. `stream` must be readable _GUARD words past tile_start[-1]."""
    n = out.size
    for t in range(tile_start.size - 1):
        begin = t * TILE
        size = min(TILE, n - begin)
        quads = (size + 4 * LANES - 1) // (4 * LANES)
        first = np.int64(tile_start[t])
        words = np.int64(tile_start[t + 1]) - first
        n_patches = np.int64(patch_start[t + 1]) - np.int64(patch_start[t])
        if words < 1:
            return 1 + 4 * t
        mode = stream[first] >> np.uint32(16)
        base = np.int64(stream[first] & np.uint32(0xFFFF))
        if mode == RAW:
            if words != 1 + (size + 3) // 4 or base or n_patches:
                return 1 + 4 * t
            for i in range(size):
                e = np.uint16(stream[first + 1 + (i >> 2)] >> np.uint32(8 * (i & 3)) & np.uint32(0xFF))
                p = np.uint16(plane[begin + i])
                out[begin + i] = (p & np.uint16(0x80)) << np.uint16(8) | e << np.uint16(7) | (p & np.uint16(0x7F))
            continue
        if mode != CODED or words < LANE_WORDS:
            return 1 + 4 * t
        total = np.int64(0)
        for lane in range(LANES):
            delta = stream[first + 1 + (lane >> 2)] >> np.uint32(8 * (lane & 3)) & np.uint32(0xFF)
            total += base + np.int64(delta)
        if LANE_WORDS + (total + 31) // 32 != words:
            return 2 + 4 * t
        position = (first + LANE_WORDS) * 32
        for lane in range(LANES):
            delta = stream[first + 1 + (lane >> 2)] >> np.uint32(8 * (lane & 3)) & np.uint32(0xFF)
            end = position + base + np.int64(delta)
            for q in range(quads):
                at = position >> 5
                window = np.uint64(stream[at]) << np.uint64(32) | np.uint64(stream[at + 1])
                window <<= np.uint64(position & 31)
                for k in range(4):
                    e = table[window >> np.uint64(56)]
                    window <<= np.uint64(e & 15)
                    position += e & 15
                    i = 4 * (q * LANES + lane) + k
                    if i < size:
                        p = np.uint16(plane[begin + i])
                        x = np.uint16(exponent[e >> 4])
                        out[begin + i] = (
                            (p & np.uint16(0x80)) << np.uint16(8) | x << np.uint16(7) | (p & np.uint16(0x7F))
                        )
            if position != end:
                return 4 + 4 * t
        for i in range(n_patches):
            patch = patches[np.int64(patch_start[t]) + i]
            where = np.int64(patch & np.uint32(0xFFFF))
            if where >= size or patch >> np.uint32(24):
                return 3 + 4 * t
            out[begin + where] = (out[begin + where] & np.uint16(0x807F)) | np.uint16(patch >> np.uint32(16)) << 7
    return 0


def encode(bits: Bits16) -> Bytes:
    """Code BF16 bits, uint16 [n]; the same bytes as `exponent.encode`."""
    bits = np.ascontiguousarray(bits).reshape(-1)
    counts = np.zeros(256, np.int64)
    _histogram(bits, counts)
    code = make_code(counts)
    codewords = code.codewords().astype(np.uint16)
    entry = np.full(256, 1 << 12 | int(codewords[ESCAPE]) << 4 | int(code.length[ESCAPE]), np.uint16)
    for s in range(SYMBOLS - 2, -1, -1):
        if code.length[s]:
            entry[code.exponent[s]] = codewords[s] << np.uint16(4) | np.uint16(code.length[s])
    shortest = int(np.argmax(code.length == code.length[code.length > 0].min())) if bits.size else 0
    fill = int(codewords[shortest]) << 4 | int(code.length[shortest])
    tiles = -(-bits.size // TILE)
    tile_start, patch_start = np.zeros(tiles + 1, np.uint32), np.zeros(tiles + 1, np.uint32)
    # A tile is written in its coded form only where that is smaller than the raw one, patches included.
    bound = tiles * (1 + TILE // 4)
    stream, patches = np.empty(bound, np.uint32), np.empty(bound, np.uint32)
    plane = np.empty(bits.size, np.uint8)
    _encode(bits, entry, np.uint16(fill), stream, tile_start, patch_start, patches, plane)
    words, n_patches = int(tile_start[-1]), int(patch_start[-1])
    return Coded(bits.size, code, tile_start, patch_start, patches[:n_patches], stream[:words], plane).to_bytes()


def decode_into(data: Bytes, out: Bits16) -> None:
    """Decode a coded matrix into `out`, uint16 [n], contiguous.

    Raises:
        CodecError: when `data` is not a well-formed coded matrix of out.size weights; `out` is then partly written.
    """
    coded = parse(data, out.size)
    stream = coded.stream
    after = data[len(data) - out.size - 4 * len(stream) :]
    if len(after) >= 4 * (len(stream) + _GUARD):
        # What follows the stream (the plane) may be read as code words by a damaged tile, and is then rejected.
        stream = after[: 4 * (len(stream) + _GUARD)].view("<u4")
    else:
        stream = np.concatenate([stream, np.zeros(_GUARD, np.uint32)])
    status = _decode(
        coded.code.table(), coded.code.exponent, coded.tile_start, coded.patch_start, coded.patches, stream,
        coded.plane, out,
    )  # fmt: skip
    if status:
        raise CodecError(f"tile {(status - 1) // 4}: bad {_REASONS[(status - 1) % 4]}")


def decode(data: Bytes, weights: int) -> Bits16:
    """BF16 bits, uint16 [weights], of a coded matrix."""
    out = np.empty(weights, np.uint16)
    decode_into(data, out)
    return out
