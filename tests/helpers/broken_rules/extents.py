"""Edits of extents, the bytes of an expert or a dense matrix."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.hostile.small_bundle import DENSE as DENSE_MATRICES
from benchmarks.hostile.small_bundle import DENSE_VERSIONS, MATRICES, VERSIONS

from .names import BF16, HEAD, Q1, Q8, W1, W3, W4, Do

SECTIONS = {v.name: v.sections(MATRICES) for v in VERSIONS if not v.plain}


def at(name: str, place: int, value: int, expert: int = 0) -> Do:
    """Set a byte of an extent, and sign it."""
    return lambda v: v.extent(name, expert, lambda room: room.__setitem__(place, value))


def section(version: str, kind: str, matrix: int = 0):
    return next(s for s in SECTIONS[version] if (s.matrix, s.kind) == (matrix, kind))


def gap(version: str) -> int:
    """A byte between two sections that is in neither."""
    return next(a.end for a, b in zip(SECTIONS[version], SECTIONS[version][1:], strict=False) if a.end < b.offset)


def scaled(bits: int) -> Do:
    low = section("w4", "scale").offset
    return lambda v: v.extent(W4, 1, lambda room: room[low : low + 2].view("<u2").__setitem__(0, bits))


def word(place: int, value: int, expert: int = 1, matrix: int = 0) -> Do:
    """Set a 32-bit word of a coded matrix."""

    def change(room: np.ndarray[Any, Any]):
        offset = int(room[16 * matrix : 16 * matrix + 4].view("<u4")[0]) + place
        room[offset : offset + 4].view("<u4")[0] = value

    return lambda v: v.extent(BF16, expert, change)


def coded(change: Callable[[np.ndarray[Any, Any], dict[str, Any]], object], expert: int = 1) -> Do:
    """Change the first coded matrix of an expert, given its bytes and where its parts are in them."""

    def edit(room: np.ndarray[Any, Any]):
        offset, size = (int(x) for x in room[:8].view("<u4"))
        data = room[offset : offset + size]
        _, tiles, words, patches = (int(x) for x in data[:16].view("<u4"))
        at_patches = 48 + 8 * (tiles + 1)
        parts = {
            "patches": data[at_patches : at_patches + 4 * patches].view("<u4"),
            "stream": data[at_patches + 4 * patches : at_patches + 4 * (patches + words)].view("<u4"),
        }
        change(data, parts)

    return lambda v: v.extent(BF16, expert, edit)


def reversed_patches(data: np.ndarray[Any, Any], parts: dict[str, Any]):
    assert len(parts["patches"]) > 1
    parts["patches"][:] = parts["patches"][::-1].copy()


def twice(data: np.ndarray[Any, Any], parts: dict[str, Any]):
    parts["patches"][1] = parts["patches"][0]


def loose(data: np.ndarray[Any, Any], parts: dict[str, Any]):
    """The last bit of a coded tile's last word, which this tile does not fill."""
    stream = parts["stream"]
    total = 32 * int(stream[0] & 0xFFFF) + int(stream[1:9].view(np.uint8).sum())
    assert total % 32 and not stream[-1] & 1 and stream[0] >> 16 == 0
    stream[-1] |= 1


def raw_tail(data: np.ndarray[Any, Any], parts: dict[str, Any]):
    assert parts["stream"][0] >> 16 == 1
    parts["stream"][-1] |= 1 << 31


def unused_symbol(data: np.ndarray[Any, Any], parts: dict[str, Any]):
    """Give up a symbol: its code word's length stands at another, so that the code stays complete."""
    data[16 + 15] = 3


def moved(part: int, by: int) -> Do:
    """Another offset of a part of a lossless extent: 0 the first matrix, 1 its bias, 2 ..."""
    return lambda v: v.extent(BF16, 1, lambda room: room[8 * part : 8 * part + 4].view("<u4").__iadd__(by))


Q8_SECTIONS = DENSE_VERSIONS[1].sections((DENSE_MATRICES[0].matrix,))
EXTENTS: dict[str, tuple[Do, str]] = {
    "a byte of a dense matrix that is not signed": (
        lambda v: v.write(Q8, (v.path / Q8).read_bytes()[:-1] + b"\x01"), "digest"
    ),
    "a dense scale that is NaN": (
        lambda v: v.extent(Q8, 0, lambda r: r[(o := Q8_SECTIONS[1].offset) : o + 2].view("<u2").__setitem__(0, 0x7FC0)),
        "number",
    ),
    "a dense row past the last": (at(Q8, Q8_SECTIONS[0].end - 1, 1), "padding"),
    "a dense column past the last": (at(Q8, Q8_SECTIONS[0].offset + 4 * 9 * 16 + 3, 1), "padding"),
    "the end of a dense page": (at(HEAD, -1, 1), "padding"),
    "bf16: an offset of a dense matrix that leaves": (
        lambda v: v.extent(Q1, 0, lambda r: r[:4].view("<u4").__iadd__(1 << 20)), "codec"
    ),
    "bf16: the end of a dense page": (at(Q1, -1, 1, 1), "padding"),
    "a byte that is not signed": (
        lambda v: v.write(W4, (v.path / W4).read_bytes()[:-1] + b"\x01"), "digest"
    ),
    "a scale that is NaN": (scaled(0x7FC0), "number"),
    "a scale that is infinite": (scaled(0xFF80), "number"),
    "a gap": (at(W4, gap("w4"), 1), "padding"),
    "the end of a page": (at(W1, -1, 1), "padding"),
    "a row past the last: codes": (at(W4, section("w4", "plane0").end - 1, 0x10), "padding"),
    "a row past the last: scales": (at(W3, section("w3", "scale").end - 1, 1), "padding"),
    "a row past the last: zeros": (at(W4, section("w4", "zero").end - 1, 1), "padding"),
    "a column past the last": (at(W4, section("w4", "plane0").offset + 4 * 4 * 16 + 3, 0x10), "padding"),
    "a column past the last, of one bit": (at(W3, section("w3", "plane1").offset + 4 * 16 + 3, 0x80), "padding"),
    "bf16: an offset that leaves": (moved(0, 1 << 20), "codec"),
    "bf16: an offset between multiples of 64": (moved(2, 4), "codec"),
    "bf16: a part out of place": (moved(2, 64), "codec"),
    "bf16: a bias of another size": (lambda v: v.extent(BF16, 1, lambda r: r.__setitem__(12, 2)), "codec"),
    "bf16: a bias out of place": (moved(3, 64), "offsets"),
    "bf16: a gap": (at(BF16, 40, 1, 1), "padding"),
    "bf16: the end of a page": (at(BF16, -1, 1, 1), "padding"),
    "bf16: another count of weights": (word(0, 667), "codec"),
    "bf16: another count of tiles": (word(4, 2), "codec"),
    "bf16: another size of the stream": (word(8, 1), "codec"),
    "bf16: a code that is not complete": (coded(lambda d, p: d[32:48].__setitem__(0, 8)), "codec"),
    "bf16: a code word of 9 bits": (coded(lambda d, p: d[32:48].__setitem__(0, 9)), "codec"),
    "bf16: tiles that do not begin at 0": (word(48, 1), "codec"),
    "bf16: patches that end elsewhere": (word(48 + 12, 1), "codec"),
    "bf16: patches out of order": (coded(reversed_patches), "order"),
    "bf16: two patches of one weight": (coded(twice), "order"),
    "bf16: a patch past the tile": (coded(lambda d, p: p["patches"].__setitem__(-1, 700)), "codec"),
    "bf16: a patch with more bits": (coded(lambda d, p: p["patches"].__ior__(1 << 24)), "codec"),
    "bf16: the exponent of the escape": (coded(unused_symbol), "padding"),
    "bf16: another mode": (coded(lambda d, p: p["stream"].__setitem__(0, 2 << 16)), "codec"),
    "bf16: a lane's length": (coded(lambda d, p: p["stream"][1:2].__iadd__(1)), "codec"),
    "bf16: bits past the last lane": (coded(loose), "padding"),
    "bf16: a raw tile with a base": (coded(lambda d, p: p["stream"][:1].__iadd__(1), 2), "codec"),
    "bf16: a raw tile's last word": (coded(raw_tail, 2), "padding"),
}  # fmt: skip
