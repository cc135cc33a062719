"""The trial of the codec's compiled loops: what they code and decode, at the level in use, against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import exponent, exponent_fast, fp8
from . import exponent_native as loops
from .bits import Bf16Bits
from .exponent import TILE

SIZE = TILE + 1003  # weights: a whole tile, and one that is neither whole nor whole words


def trial() -> str:
    """Return what differs from the reference at the level in use; "" if nothing does."""
    random = np.random.default_rng(0)
    normal = (random.normal(0, 0.02, SIZE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    far = normal.copy()
    far[::97] = random.integers(0, 1 << 16, len(far[::97]))  # exponents without code words
    uniform = random.integers(0, 1 << 16, SIZE).astype(np.uint16)  # nothing to gain: tiles stay as they are
    kinds = {"weights": normal, "weights with patches": far, "raw tiles": uniform}
    wrong = [f"{name}: {what}" for name, bits in kinds.items() for what in _wrong(bits)]
    codes = (random.normal(0, 40, SIZE).astype(np.int8).view(np.uint8) & 0xBF).astype(np.uint8)
    coded, again = fp8.encode_by(None, codes, 1), np.empty_like(codes)
    made = fp8.encode_by(loops, codes, 1)
    if coded is None or made is None or not np.array_equal(made, coded):
        return "; ".join([*wrong, "FP8 codes: coding"])
    exponent_fast.decode_parsed(loops, exponent.parse(coded, SIZE, fp8=True), again, 1)
    if not np.array_equal(again, codes):
        wrong.append("FP8 codes: decoding")
    return "; ".join(wrong)


def _wrong(bits: Bf16Bits) -> Iterator[str]:
    coded = exponent.encode(bits)
    if not np.array_equal(exponent_fast.encode_by(loops, bits, 1), coded):
        yield "coding"
    whole, by_part = np.zeros_like(bits), np.zeros_like(bits)
    exponent_fast.decode_parsed(loops, exponent.parse(coded, SIZE), whole, 1)
    if not np.array_equal(whole, bits):
        yield "decoding"
    opened = loops.open_coded(coded, SIZE, by_part.ctypes.data)
    if opened is None or opened.decode() or not np.array_equal(by_part, bits):
        yield "decoding in parts"
