"""The exponent codec's loops compiled with numba: for machines where the C form (exponent_native.py) was not built.

numba carries its own compiler. Functions release the GIL, are compiled on first use, and are cached on disk beside the
package (or in NUMBA_CACHE_DIR). exponent_fast.py is what calls them, and has checked all offsets.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .exponent import BLOCK, CODED, LANE_WORDS, LANES, RAW, SAMPLED, TILE


@njit(nogil=True, cache=True)
def count(bits, counts):  # type: ignore[no-untyped-def]
    """Add how often each exponent occurs in `exponent.sample(bits)` to counts, int64 [256]."""
    if bits.size < SAMPLED:
        for i in range(bits.size):
            counts[(bits[i] >> 7) & 0xFF] += 1
        return
    for group in range(bits.size // BLOCK // 4):
        begin = (4 * group + ((group * 2654435761 & 0xFFFFFFFF) >> 30)) * BLOCK
        for i in range(begin, begin + BLOCK):
            counts[(bits[i] >> 7) & 0xFF] += 1


@njit(nogil=True, cache=True)
def encode(bits, entry, fill, out, tile_end, patch_end, patches, plane):  # type: ignore[no-untyped-def]
    """Write stream words, patches and their ends by tile; entry[exponent] is escape << 12 | code word << 4 | length."""
    n = bits.size
    word = 0
    n_patches = 0
    lane_bits = np.empty(LANES, np.int64)
    for i in range(n):
        b = bits[i]
        plane[i] = (b >> 8 & 0x80) | (b & 0x7F)
    for t in range(tile_end.size):
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
        tile_end[t] = word
        patch_end[t] = n_patches


@njit(nogil=True, cache=True)
def decode(length_of, exponent_of, tile_start, patch_start, patches, stream, plane, out, first_tile, last_tile):  # type: ignore[no-untyped-def]  # fmt: skip
    """Decode tiles first_tile up to last_tile into `out`; 0, or 8 * tile + the number of what is bad."""
    n = out.size
    for t in range(first_tile, last_tile):
        begin = t * TILE
        size = min(TILE, n - begin)
        quads = (size + 4 * LANES - 1) // (4 * LANES)
        first = np.int64(tile_start[t])
        words = np.int64(tile_start[t + 1]) - first
        n_patches = np.int64(patch_start[t + 1]) - np.int64(patch_start[t])
        if words < 1:
            return 8 * t + 1
        mode = stream[first] >> np.uint32(16)
        base = np.int64(stream[first] & np.uint32(0xFFFF))
        if mode == RAW:
            if words != 1 + (size + 3) // 4 or base or n_patches:
                return 8 * t + 1
            for i in range(size):
                e = np.uint16(stream[first + 1 + (i >> 2)] >> np.uint32(8 * (i & 3)) & np.uint32(0xFF))
                p = np.uint16(plane[begin + i])
                out[begin + i] = (p & np.uint16(0x80)) << np.uint16(8) | e << np.uint16(7) | (p & np.uint16(0x7F))
            continue
        if mode != CODED or words < LANE_WORDS:
            return 8 * t + 1
        total = np.int64(0)
        for lane in range(LANES):
            delta = stream[first + 1 + (lane >> 2)] >> np.uint32(8 * (lane & 3)) & np.uint32(0xFF)
            total += base + np.int64(delta)
        if LANE_WORDS + (total + 31) // 32 != words:
            return 8 * t + 2
        position = (first + LANE_WORDS) * 32
        for lane in range(LANES):
            delta = stream[first + 1 + (lane >> 2)] >> np.uint32(8 * (lane & 3)) & np.uint32(0xFF)
            end = position + base + np.int64(delta)
            for q in range(quads):
                at = position >> 5
                window = np.uint64(stream[at]) << np.uint64(32) | np.uint64(stream[at + 1])
                window <<= np.uint64(position & 31)
                for k in range(4):
                    top = window >> np.uint64(56)
                    window <<= np.uint64(length_of[top])
                    position += length_of[top]
                    i = 4 * (q * LANES + lane) + k
                    if i < size:
                        p = np.uint16(plane[begin + i])
                        x = np.uint16(exponent_of[top])
                        out[begin + i] = (
                            (p & np.uint16(0x80)) << np.uint16(8) | x << np.uint16(7) | (p & np.uint16(0x7F))
                        )
            if position != end:
                return 8 * t + 4
        for i in range(n_patches):
            patch = patches[np.int64(patch_start[t]) + i]
            where = np.int64(patch & np.uint32(0xFFFF))
            if where >= size or patch >> np.uint32(24):
                return 8 * t + 3
            out[begin + where] = (out[begin + where] & np.uint16(0x807F)) | np.uint16(patch >> np.uint32(16)) << 7
    return 0
