"""Coded FP8 codes: every code survives, all engines write the reference's bytes, sizes hold, damage is caught."""

import numpy as np
import pytest
import torch
from exponent_inputs import every_engine

from moepack.pack.codec import exponent, exponent_fast, fp8
from moepack.pack.codec.checks import check_coded
from moepack.pack.codec.exponent import HEADER, RAW, TILE, WIDE, parse
from moepack.pack.errors import CodecError


def normal(n, seed=0, spread=1.0):
    """Codes of normally distributed weights whose greatest stands for 448; `spread` scales the others down."""
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(n, np.float32))
    values *= 448 * spread / values.abs().max()
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def rows_apart(n):
    """Codes of blocks of 16 rows, four of each in turn, one of which is small: lanes of very different lengths."""
    codes = normal(n, 3)
    return np.where(np.arange(n) // 4 % 16 == 5, normal(n, 4, 1e-3), codes).astype(np.uint8)


def check(data, codes):
    """Raise CodecError for the first rule of FORMAT.md that coded codes break."""
    fp8.decode_into(data, np.empty(codes, np.uint8))
    for _, message in check_coded(parse(exponent_fast.aligned(data), codes, fp8=True)):
        raise CodecError(message)


@pytest.mark.parametrize("n", [1024, 1151, 4099, TILE, TILE + 1, 3 * TILE + 7, 70000])
@pytest.mark.parametrize("draw", [normal, rows_apart], ids=["normal", "rows apart"])
def test_round_trip_on_every_engine(draw, n):
    codes, coded = draw(n), None
    for engine in every_engine():
        made = fp8.encode(codes)
        assert made is not None, engine
        coded = made if coded is None else coded
        assert np.array_equal(made, coded), engine
        out = np.empty_like(codes)
        fp8.decode_into(coded, out)
        assert np.array_equal(out, codes), engine
        check(coded, n)


def test_every_code_survives_in_every_place():
    """All 256 codes, NaNs too, among zeros, so that coding gains."""
    codes = np.zeros(20 * 256, np.uint8)
    for shift in range(4):
        codes[16 * np.arange(256) + shift] = np.arange(256)
        for engine in every_engine():
            coded = fp8.encode(codes)
            assert coded is not None, engine
            out = np.ones_like(codes)
            fp8.decode_into(coded, out)
            assert np.array_equal(out, codes), engine


def test_size_on_normal_weights():
    """Within 1.8 % of the exponents' entropy and four bits, and 6.9 bits: 2048 by 768 in blocks of 128 by 128."""
    codes = np.concatenate([normal(16384, seed) for seed in range(96)])
    p = np.bincount(codes >> 3 & 15) / codes.size
    entropy = -(p[p > 0] * np.log2(p[p > 0])).sum()
    coded = fp8.encode(codes)
    assert coded is not None
    bits = 8 * len(coded) / codes.size
    assert 4 + entropy < bits <= 1.018 * (4 + entropy) and bits <= 6.9


def test_what_does_not_gain_three_percent_is_left():
    uniform = np.random.default_rng(0).integers(0, 256, 5 * TILE).astype(np.uint8)
    assert fp8.encode(uniform) is None and fp8.encode(uniform[:0]) is None
    codes = normal(1000)
    sizes = [(n, fp8.encode(codes[:n])) for n in range(300, 1000, 10)]
    assert sizes[0][1] is None and sizes[-1][1] is not None
    assert all(coded is None or len(coded) <= 0.97 * n for n, coded in sizes)


def test_threads_change_no_byte():
    codes = normal(int(191.5 * TILE), 5)
    coded = fp8.encode(codes, threads=1)
    assert coded is not None and np.array_equal(fp8.encode(codes, threads=3), coded)
    for threads in (1, 2, 3):
        out = np.zeros_like(codes)
        fp8.decode_into(coded, out, threads)
        assert np.array_equal(out, codes)


def modes(coded, n):
    parts = parse(coded, n, fp8=True)
    return (parts.stream[parts.tile_start[:-1]] >> 16).tolist()


def test_tiles_of_all_modes_in_one():
    """A tile of uneven rows is wide, not raw, and one of noise is raw, at 8 bits a code and a word."""
    noise = np.random.default_rng(1).integers(0, 256, TILE).astype(np.uint8)
    codes = np.concatenate([normal(5 * TILE), rows_apart(TILE), noise, normal(1000)])
    coded = fp8.encode(codes)
    assert coded is not None
    assert modes(coded, codes.size) == [0] * 5 + [WIDE, RAW, 0]
    starts = parse(coded, codes.size, fp8=True).tile_start.astype(int)
    assert starts[7] - starts[6] == 1 + TILE // 8
    for engine in every_engine():
        out = np.zeros_like(codes)
        fp8.decode_into(coded, out)
        assert np.array_equal(out, codes), engine


N = 10007
STREAM = HEADER + 8 * 3


def put(at, value):
    return lambda data: data.__setitem__(at, value)


def with_patch(data):
    at = STREAM
    patched = np.concatenate([data[:at], np.zeros(4, np.uint8), data[at:]])
    patched[12], patched[at - 4] = 1, 1
    return patched


DAMAGE = {  # of coded codes, and a word of the error
    "short": (lambda data: data[: HEADER - 1], "header"),
    "truncated": (lambda data: data[:-1], "bytes"),
    "another number of codes": (put(0, (N + 2) % 256), "holds"),
    "odd half": (put(-1, 0x10), "half byte"),
    "stream words": (put(8, 0xFF), "bytes"),
    "patches": (put(12, 1), "bytes"),
    "a patch": (with_patch, "patches"),
    "symbol": (put(16, 1), "16 exponents"),
    "length 9": (put(32, 9), "prefix code"),
    "incomplete": (put(32, 7), "prefix code"),
    "offsets": (put(HEADER, 1), "offsets"),
    "patch offsets": (put(HEADER + 12, 1), "offsets"),
    "mode": (put(STREAM + 2, 3), "tile 0"),
    "delta": (put(STREAM + 4, 0xFF), "tile 0"),
    "wide base": (put(STREAM, 1), "tile 0"),
    "wide length": (put(STREAM + 5, 0x77), "tile 0"),
    "wide as coded": (put(STREAM + 2, 0), "tile 0"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(kind):
    change, word = DAMAGE[kind]
    coded = fp8.encode(rows_apart(N) if kind.startswith("wide") else normal(N)).copy()
    changed = change(coded)
    for _ in every_engine():
        with pytest.raises(CodecError, match=word):
            check(coded if changed is None else changed, N)


def test_padding_bits_of_tiles_are_checked():
    """Of a coded tile, and of a raw one whose codes do not fill a word: decoders pass over them, `check` does not."""
    noise = np.random.default_rng(1).integers(0, 256, 9).astype(np.uint8)
    for codes in (normal(N), rows_apart(TILE), np.concatenate([normal(3 * TILE), noise])):
        coded = fp8.encode(codes)
        parts = parse(coded, codes.size, fp8=True)
        check(coded, codes.size)
        last = len(coded) - len(parts.plane) - 4
        parts.stream[-1] |= 1 if parts.stream[parts.tile_start[-2]] >> 16 != RAW else 1 << 31
        assert coded[last:].size and exponent_fast.engine() is not None
        fp8.decode_into(coded, np.empty_like(codes))
        with pytest.raises(CodecError, match="past the end of a tile"):
            check(coded, codes.size)


def test_bf16_matrices_are_never_wide():
    bits = np.where(np.arange(TILE) // 4 % 32 < 3, np.arange(TILE) * 7 % (1 << 16), 0x3C00).astype(np.uint16)
    data = exponent.encode(bits).copy()
    at = HEADER + 8 * 2 + 4 * int(data[12:16].view("<u4")[0])
    data[at : at + 4] = np.array([WIDE << 16], "<u4").view(np.uint8)
    for _ in every_engine():
        with pytest.raises(CodecError, match="tile 0"):
            exponent_fast.decode(data, TILE)


def test_decode_into_wants_bytes():
    with pytest.raises(ValueError, match="uint8"):
        fp8.decode_into(np.zeros(64, np.uint8), np.zeros(4, np.uint16))
