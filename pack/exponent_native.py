"""The exponent codec's loops in C (exponent.c), where installing could compile them; the same calls as exponent_jit.py.

Called through ctypes, which releases the GIL. `level` is 1 where AVX-512 with VBMI is used, else 0: where the processor
does not have it, or MOEPACK_ISA (isa.py) does not allow it.
"""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from . import isa
from .exponent import Bits16, Bytes, Words

# One name for all Python versions that installing may have built it for; OSError where there is none.
_library = ctypes.CDLL(str(Path(__file__).with_name(f"_exponent{sysconfig.get_config_var('EXT_SUFFIX')}")))
_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_library.moepack_exponent_sample.argtypes = [_pointer, _number, _pointer]
_library.moepack_exponent_encode.argtypes = [_pointer, _number, _pointer, ctypes.c_uint16, *[_pointer] * 5]
_library.moepack_exponent_decode.argtypes = [*[_pointer] * 8, _number, _number, _number]
_library.moepack_exponent_decode.restype = _number

BEST = int(isa.bound(_library.moepack_isa_level()) >= isa.LEVELS.index("avx512"))


def use_level(limit: int = BEST) -> int:
    """Let the library use instruction sets up to `limit`; returns the one it took. For tests and comparisons."""
    return int(_library.moepack_exponent_level(min(limit, BEST)))


level = use_level()


def _at(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def count(bits: Bits16, counts: np.ndarray[Any, Any]) -> None:
    """Add how often each exponent occurs in `exponent.sample(bits)` to counts, int64 [256]."""
    _library.moepack_exponent_sample(_at(bits), bits.size, _at(counts))


def encode(
    bits: Bits16, entry: Bits16, fill: int, out: Words, tile_end: Words, patch_end: Words, patches: Words, plane: Bytes
) -> None:
    """Write stream words, patches and their ends by tile; entry[exponent] is escape << 12 | code word << 4 | length."""
    _library.moepack_exponent_encode(
        _at(bits), bits.size, _at(entry), int(fill), _at(out), _at(tile_end), _at(patch_end), _at(patches), _at(plane)
    )


def decode(
    length_of: Bytes,
    exponent_of: Bytes,
    tile_start: Words,
    patch_start: Words,
    patches: Words,
    stream: Words,
    plane: Bytes,
    out: Bits16,
    first_tile: int,
    last_tile: int,
) -> int:
    """Decode tiles first_tile up to last_tile into `out`; 0, or 8 * tile + the number of what is bad."""
    parts: tuple[np.ndarray[Any, Any], ...]
    parts = (length_of, exponent_of, tile_start, patch_start, patches, stream, plane, out)
    return int(_library.moepack_exponent_decode(*(_at(p) for p in parts), out.size, first_tile, last_tile))
