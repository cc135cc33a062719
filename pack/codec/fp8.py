"""FP8 (E4M3) codes to a smaller byte string and back, code for code (after ECF8, Yang et al., 2025, arXiv 2510.02676).

Weights scaled to E4M3's range use its 16 exponents unevenly: some 2.55 bits of entropy, where 4 are stored. They are
coded as BF16's exponents are, in the same tiles; sign and mantissa are stored as they are, two codes a byte (FORMAT.md,
"Coded FP8 codes"). This module makes the code; exponent.py and exponent_fast.py do the work.
What the codes mean, and whether NaNs are allowed among them, is the caller's.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt

from . import exponent_fast
from .bits import Codes
from .exponent import (
    SYMBOLS,
    Code,
    assemble_fp8,
    code_lengths,
    decode_exponents,
    parse,
    sample,
    unpack_nibbles,
)

MOST = 0.97  # of the plain codes' bytes: where coding gains less, decoding does not pay


def encode(codes: Codes, threads: int | None = None) -> Codes | None:
    """Code FP8 codes, uint8 [n], in any order, into the byte string of FORMAT.md; None where that gains under 3 %.

    The bytes are the same with any `threads` (default: all cores) and without the compiled loops.
    """
    return encode_by(exponent_fast.engine(), codes, threads)


def encode_by(loops: ModuleType | None, codes: Codes, threads: int | None) -> Codes | None:
    """Code as `encode` does, by these compiled loops, or without any."""
    codes = np.ascontiguousarray(codes, np.uint8).reshape(-1)
    if not codes.size:
        return None
    counts = np.zeros(256, np.int64)
    if loops is None:
        counts += np.bincount(sample(codes) >> 3 & 15, minlength=256)
    else:
        loops.count(codes, counts)
    code = _make_code(counts[:SYMBOLS])
    if loops is None:
        coded = assemble_fp8(codes, code)
    else:
        coded = exponent_fast.encode_fp8(loops, codes, code, threads)
    return coded if len(coded) <= MOST * codes.size else None


def _make_code(counts: npt.NDArray[np.int64]) -> Code:
    """The best code for exponents that occur counts[0..15] times; every exponent gets a code word."""
    lengths = code_lengths(np.maximum(counts, 1).tolist())
    return Code(np.arange(SYMBOLS, dtype=np.uint8), np.array(lengths, np.uint8))


def decode_into(data: Codes, out: Codes, threads: int | None = None) -> None:
    """Decode coded FP8 codes into `out`, uint8 [n], contiguous; the C loops allocate nothing of that size.

    Raises CodecError when `data` is not exactly a well-formed byte string of out.size codes; `out` is then partly
    written.
    """
    if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("decode_into needs a contiguous, writeable uint8 array")
    coded = parse(exponent_fast.aligned(data), out.size, fp8=True)
    loops = exponent_fast.engine()
    if loops is not None:
        exponent_fast.decode_parsed(loops, coded, out.reshape(-1), threads)
        return
    nibbles = unpack_nibbles(coded.plane, out.size)
    out.reshape(-1)[:] = (nibbles & 8) << 4 | decode_exponents(coded) << 3 | nibbles & 7
