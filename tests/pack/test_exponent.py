"""The exponent codec: every bit pattern survives, the fast paths write the reference's bytes, damage is caught."""

import heapq
import multiprocessing

import numpy as np
import pytest
import torch
from codec_mutations import attack, attack_fp8
from exponent_inputs import KINDS, draw, every_engine

from moepack.pack.codec import exponent, exponent_fast
from moepack.pack.codec.checks import check_lossless
from moepack.pack.codec.exponent import HEADER, TILE, make_code
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.errors import CodecError
from moepack.pack.spec import Matrix, Version

LENGTHS = [0, 1, 2, 3, 4, 5, 127, 128, 129, 4095, TILE - 1, TILE, TILE + 1, 10007, 3 * TILE]


def test_the_compiled_engine_is_there():
    """Where a compiler was at hand when moepack was installed; it is wherever these tests run."""
    assert exponent_fast.engine_name().startswith("C")


def both_ways(bits):
    coded = exponent.encode(bits)
    assert np.array_equal(exponent.decode(coded, bits.size), bits)
    for engine in every_engine():
        assert np.array_equal(exponent_fast.encode(bits), coded), engine
        assert np.array_equal(exponent_fast.decode(coded, bits.size), bits), engine
    return coded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", LENGTHS)
def test_round_trip(kind, n):
    both_ways(draw(kind, n, n))


def test_every_bit_pattern():
    patterns = np.arange(1 << 16).astype(np.uint16)
    both_ways(patterns)
    both_ways(np.random.default_rng(0).permutation(patterns))


@pytest.mark.parametrize("kind", ["gaussian", "lanes"])
@pytest.mark.parametrize("tiles", [64, 128, 191.5])
def test_threads_change_no_byte(kind, tiles):
    bits = draw(kind, int(tiles * TILE), 7)
    coded = exponent_fast.encode(bits, threads=1)
    assert np.array_equal(exponent_fast.encode(bits, threads=3), coded)
    for threads in (1, 2, 3):
        out = np.zeros_like(bits)
        exponent_fast.decode_into(coded, out, threads)
        assert np.array_equal(out, bits)


def test_size_on_gaussian_weights():
    """Within 1.2 % of sign, mantissa and the exponents' entropy, at an expert's size (2048 by 768)."""
    bits = draw("gaussian", 2048 * 768, 1)
    exponents = bits >> 7 & 0xFF
    p = np.bincount(exponents) / bits.size
    entropy = -(p[p > 0] * np.log2(p[p > 0])).sum()
    assert 8 * len(exponent_fast.encode(bits)) / bits.size <= 1.012 * (8 + entropy)


@pytest.mark.parametrize("n", [TILE, 10 * TILE, 1 << 20])
def test_incompressible_grows_by_half_a_percent_at_most(n):
    assert len(exponent_fast.encode(draw("uniform", n, 2))) <= 1.005 * 2 * n


def test_decodes_from_any_offset_and_into_a_slice():
    bits = draw("gaussian", 10007, 3)
    coded = exponent_fast.encode(bits)
    for shift in (1, 2, 3, 64):
        room = np.zeros(len(coded) + shift, np.uint8)
        room[shift:] = coded
        out = np.zeros(bits.size + 8, np.uint16)
        exponent_fast.decode_into(room[shift:], out[4:-4])
        assert np.array_equal(out[4:-4], bits) and not out[:4].any() and not out[-4:].any()


def huffman_cost(weights):
    """Total code bits of an unlimited Huffman code, by the textbook heap."""
    heap, total = list(weights), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        total += a + b
        heapq.heappush(heap, a + b)
    return total


def test_code_lengths_are_optimal_and_capped():
    counts = np.zeros(256, np.int64)
    counts[100:108] = [5, 9, 12, 13, 16, 45, 3, 7]
    code = make_code(counts)
    cost = sum(int(counts[code.exponent[s]]) * int(code.length[s]) for s in range(8))
    assert cost == huffman_cost([5, 9, 12, 13, 16, 45, 3, 7])
    counts[:] = 0
    counts[:15] = [2**k for k in range(15)]  # an unlimited code would need 14 bits
    capped = make_code(counts)
    used = capped.length[capped.length > 0]
    assert used.max() == 8 and sum(2.0 ** -int(v) for v in used) == 1


def test_full_tiles_of_a_large_matrix_have_no_loose_bits():
    rng = np.random.default_rng(0)
    matrices = (Matrix("up", 100, 333), Matrix("down", 333, 100))
    values = []
    for m in matrices:
        bits = (rng.standard_cauchy((m.rows, m.cols)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        bits[: m.rows // 2] = rng.integers(0, 1 << 16, (m.rows // 2, m.cols))  # raw tiles beside coded ones
        values.append(LosslessMatrix(bits))
    extent, _ = Version.of("bf16").encode(matrices, values)
    assert list(check_lossless(matrices, extent)) == []


# Damage. Each entry: what is done to a coded matrix of 10007 weights, and a word of the error.
def _put(at, value, kind="<u4"):
    def change(data):
        new = np.array([value], kind).view(np.uint8)
        data[at : at + len(new)] = new
        return data

    return change


DAMAGE = {
    "short": (lambda d: d[: HEADER - 1], "header"),
    "truncated": (lambda d: d[:-1], "bytes"),
    "longer": (lambda d: np.concatenate([d, d[:4]]), "bytes"),
    "weights": (_put(0, 10008), "weights"),
    "tiles": (_put(4, 3), "tiles"),
    "stream words": (_put(8, 0xFFFFFFFF), "bytes"),
    "patches": (_put(12, 0x7FFFFFFF), "bytes"),
    "first tile": (_put(HEADER, 1), "offsets"),
    "falling tiles": (_put(HEADER + 4, 0xFFFFFFF0), "offsets"),
    "code length 9": (_put(32, 9, "u1"), "prefix code"),
    "code not complete": (_put(32, 0, "u1"), "prefix code"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("decode", [exponent.decode, exponent_fast.decode], ids=["reference", "compiled"])
def test_damage_is_refused(name, decode):
    change, word = DAMAGE[name]
    data = change(exponent.encode(draw("gaussian", 10007, 4)).copy())
    with pytest.raises(CodecError, match=word):
        decode(data, 10007)


@pytest.mark.parametrize("change", ["mode", "base", "delta", "patch"])
@pytest.mark.parametrize("decode", [exponent.decode, exponent_fast.decode], ids=["reference", "compiled"])
def test_damaged_tile_is_refused(change, decode):
    data = exponent.encode(draw("cauchy", 10007, 5)).copy()
    coded = exponent.parse(data, 10007)
    patches = HEADER + 4 * 2 * (coded.tiles + 1)
    stream = patches + 4 * len(coded.patches)
    assert len(coded.patches)
    if change == "patch":
        data[patches : patches + 2] = 0xFF
    else:
        data[stream + {"mode": 2, "base": 0, "delta": 4}[change]] ^= 0x55
    with pytest.raises(CodecError, match="tile 0"):
        decode(data, 10007)


@pytest.mark.parametrize("run, count, overrun", [(attack, 3000, 0), (attack, 1, 1), (attack_fp8, 1500, 0)])
def test_mutated_streams_never_reach_outside(run, count, overrun):
    """In a process of its own, which a bad access ends; a decoder that writes one weight too far is detected."""
    child = multiprocessing.get_context("spawn").Process(target=run, args=(count, overrun))
    child.start()
    child.join()
    assert (child.exitcode == 0) == (not overrun)


def test_what_is_not_well_formed_is_not_opened():
    """As exponent.parse: sizes, offsets, code lengths; and what is too small to be read past its end."""
    opened = pytest.importorskip("moepack.pack.codec.exponent_native", exc_type=OSError).open_coded
    generator = torch.Generator().manual_seed(64)
    good = exponent_fast.encode(torch.randn(64, 48, generator=generator).bfloat16().view(torch.uint16).numpy())
    at = np.zeros(64 * 48, np.uint16).ctypes.data
    assert opened(good, 64 * 48, at) is not None
    assert opened(good, 64 * 48 + 1, at) is None and opened(good[:-1], 64 * 48, at) is None
    for where in (0, 4, 8, 12, 32, 48, 52, 56, 60):
        bad = good.copy()
        bad[where] ^= 0x11
        assert opened(bad, 64 * 48, at) is None, where
    tiny = exponent_fast.encode(np.arange(64, dtype=np.uint16))
    assert opened(tiny, 64, at) is None, "its stream is not followed by enough"
    assert opened(np.zeros(10, np.uint8), 64, at) is None
