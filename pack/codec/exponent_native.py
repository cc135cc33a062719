"""The exponent codec's loops in C (exponent_*.c), where installing could compile them.

They are called through ctypes, which releases the GIL. Arrays of weights are uint16, BF16 bits, or uint8, FP8 codes.
`level` is 2 with AVX-512 VBMI, 1 with AVX2 and BMI2, else 0; MOEPACK_ISA (isa.py) bounds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import isa
from ..trials import open_library
from .bits import Bf16Bits, Buffer, Codes
from .exponent import TILE as TILE

# Installing builds it where there is a compiler (setup.py). OSError if there was none.
PATH = Path(__file__).with_name("_exponent.so")
_library = open_library(PATH, PATH.parent)
_pointer = ctypes.c_void_p
_number = ctypes.c_int64
_library.moepack_exponent_sample.argtypes = [_pointer, _number, _number, _pointer]
_library.moepack_exponent_encode.argtypes = [_pointer, _number, _number, _pointer, ctypes.c_uint16, *[_pointer] * 5]
_library.moepack_exponent_decode.argtypes = [*[_pointer] * 8, *[_number] * 4]
_library.moepack_exponent_decode.restype = _number
_library.moepack_exponent_open.argtypes = [_pointer, _number, _number, _pointer, _pointer]
_library.moepack_exponent_open.restype = _library.moepack_exponent_opened.restype = _number
_library.moepack_exponent_part.argtypes = [_pointer, _number, _number]
_library.moepack_exponent_part.restype = _number

LEVELS = ("C", "C, AVX2", "C, AVX-512")
BEST = min(isa.bound(_library.moepack_isa_level()), isa.LEVELS.index("avx512"))


def use_level(limit: int = BEST) -> int:
    """Let the library use levels up to `limit`, and return the level taken. For trials, tests and comparisons."""
    global level
    level = int(_library.moepack_exponent_level(min(limit, BEST)))
    return level


level = 0  # set by `use_level`
use_level()


def _at(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def count(bits: Bf16Bits | Codes, counts: npt.NDArray[np.generic]) -> None:
    """Add how often each exponent occurs in `exponent.sample(bits)` to counts, int64 [256]."""
    _library.moepack_exponent_sample(_at(bits), bits.itemsize, bits.size, _at(counts))


def encode(bits: Bf16Bits | Codes, entry: Bf16Bits, fill: int, *to: npt.NDArray[np.generic]) -> None:
    """Encode weights to the arrays `to`: stream words, their ends by tile, the patches' ends by tile, patches, plane.

    entry[exponent] is escape << 12 | code word << 4 | length.
    """
    _library.moepack_exponent_encode(_at(bits), bits.itemsize, bits.size, _at(entry), int(fill), *map(_at, to))


def decode(parts: Sequence[npt.NDArray[np.generic]], out: Bf16Bits | Codes, first_tile: int, last_tile: int) -> int:
    """Decode tiles first_tile up to last_tile into `out`; returns 0, or 8 * tile + the number of an error.

    `parts` are the table's lengths and exponents, tile starts, patch starts, patches, stream and plane.
    """
    addresses = (*map(_at, parts), _at(out))
    return int(_library.moepack_exponent_decode(*addresses, out.itemsize, out.size, first_tile, last_tile))


class Opened:
    """A coded matrix whose header and offsets were checked once, to be decoded in parts."""

    def __init__(self, data: Buffer, room: npt.NDArray[np.int64]) -> None:
        # kept, as C holds pointers into them
        self._data = data
        self._room = room
        self.address = _at(room)

    def decode(self) -> int:
        """Decode the whole matrix on this thread; returns 0, or 8 * tile + the number of an error."""
        tiles = -(-int(self._room[6]) // TILE)
        return int(_library.moepack_exponent_part(self.address, 0, tiles))


def open_coded(data: Buffer, weights: int, out: int) -> Opened | None:
    """Check a coded matrix and make its tables; None for one that is malformed or too small.

    `data` is exactly the coded matrix, 4-byte aligned; it must not change while it is decoded. `out` is the address
    to decode to: BF16 [weights].
    """
    room = np.empty(-(-_library.moepack_exponent_opened() // 8), np.int64)
    if _at(data) % 4 or _library.moepack_exponent_open(_at(data), len(data), weights, out, _at(room)):
        return None
    return Opened(data, room)
