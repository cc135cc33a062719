"""Released extents: codes and scales come back as they went in, values are torch's, and bad numbers are found."""

import re

import numpy as np
import pytest
import torch
from codec_mutations import attack_extent

from benchmarks.hostile.small_bundle import RELEASED
from benchmarks.random_matrices import coded, gaussian
from moepack.pack.codec import lossless
from moepack.pack.codec.affine import encode
from moepack.pack.codec.released import E2M1, E4M3, E8M0
from moepack.pack.errors import CodecError
from moepack.pack.spec import Matrix, Version

MATRICES = (Matrix("gate_up", 40, 100, True), Matrix("down", 33, 48))


def made(name, group):
    version = Version.of(name, group)
    return version, [coded(m, version, i) for i, m in enumerate(MATRICES)]


@pytest.mark.parametrize(("name", "group"), RELEASED)
def test_codes_and_scales_come_back(name, group):
    version, values = made(name, group)
    extent, payload = version.encode(MATRICES, values)
    stored, room = version.stored_sizes(MATRICES), np.zeros(version.resident_size(MATRICES), np.uint8)
    assert payload == version.payload(MATRICES, extent) and (stored is None) == (name in ("fp8", "fp8row", "mxfp8"))
    assert stored is None or stored[0] == len(extent)
    version.restore(MATRICES, extent, room)
    assert np.array_equal(room, encode(MATRICES, version, values))
    assert not list(version.check(MATRICES, extent)) and Version.read(version.record()) == version
    for ours, theirs in zip(values, version.decode(MATRICES, extent), strict=True):
        for field in ours.__slots__:
            a, b = getattr(ours, field), getattr(theirs, field)
            assert (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b)), field


def test_numbers_are_those_of_torch():
    every = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(E4M3, every.view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)
    assert np.array_equal(E8M0, every.view(torch.float8_e8m0fnu).float().numpy(), equal_nan=True)
    assert np.array_equal(np.signbit(E4M3[:127]), np.zeros(127)) and np.signbit(E2M1[8]) and E2M1[15] == -6


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32), (4, 128)])
def test_integers_are_the_extents_of_affine_versions(bits, group):
    version, values = made(f"int{bits}", group)
    assert np.array_equal(
        version.encode(MATRICES, values)[0], Version.of(f"w{bits}", group).encode(MATRICES, values)[0]
    )


def drawn(name, group, matrices):
    version = Version.of(name, group)
    return version, [gaussian(m, version, seed) for seed, m in enumerate(matrices)]


@pytest.mark.parametrize(
    ("name", "group", "least", "most"),
    [("fp8", 128, 6.6, 6.75), ("fp8", 32, 6.65, 6.8), ("fp8row", 0, 6.6, 6.8), ("mxfp8", 32, 6.8, 7.0)],
)
def test_e4m3_codes_are_smaller_in_files(name, group, least, most):
    matrices = (Matrix("gate_up", 512, 1024, True), Matrix("down", 1000, 256))
    version, values = drawn(name, group, matrices)
    extent, payload = version.encode(matrices, values)
    assert (
        least < 8 * payload / sum(m.weights for m in matrices) < most and payload <= len(extent) < payload + 4096 + 256
    )
    assert np.array_equal(extent, version.encode(matrices, values, 1)[0]) and not list(version.check(matrices, extent))
    for ours, theirs in zip(values, version.decode(matrices, extent), strict=True):
        assert np.array_equal(ours.codes, theirs.codes) and np.array_equal(ours.scale, theirs.scale)
        assert ours.bias is theirs.bias is None or np.array_equal(ours.bias, theirs.bias)


BLOCKS = (Matrix("gate_up", 64, 100, True), Matrix("down", 9, 32))  # the second is too small to gain


def directory(extent):
    """Offset and size of the first plane, of what is beside it, and likewise of the second."""
    return extent[:32].view("<u4")


def test_planes_that_do_not_gain_are_stored_as_they_are():
    version, values = drawn("fp8", 32, BLOCKS)
    extent, _ = version.encode(BLOCKS, values)
    coded, rest, plain, last = directory(extent).reshape(-1, 2).tolist()
    assert coded[1] < 0.97 * 64 * 100 and rest[1] == 64 + 2 * 64, "16 scales of 4 bytes, and a bias"
    assert plain[1] == 16 * 32 and last[1] == 4
    in_memory = encode(BLOCKS, version, values)
    at = version.sections(BLOCKS)[3].offset
    assert np.array_equal(extent[plain[0] :][: plain[1]], in_memory[at : at + plain[1]])


def put(at, value):
    return lambda extent: directory(extent).__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (put(0, 0), "codec", "gate_up at 0, .* is not in its place"),
        (lambda e: directory(e)[:1].__iadd__(4), "codec", "gate_up at 68, .*on a multiple of 64"),
        (put(4, 64), "codec", "down at 64, 512 bytes, .*past the part before it"),
        (lambda e: directory(e)[6:7].__iadd__(1 << 20), "codec", "beside down at .* inside the extent of 8192"),
        (put(7, 28), "codec", "beside down has 28 bytes, not 4"),
        (put(5, 511), "codec", "."), (put(1, 100), "codec", "."), (put(1, 0), "codec", "."),
        (lambda e: directory(e)[6:7].__iadd__(64), "offsets", "part 3 begins at"),
        (lambda e: e.__setitem__(40, 1), "padding", "between its parts"),
        (lambda e: e.__setitem__(-1, 1), "padding", "after them"),
        (lambda e: e.__setitem__(int(directory(e)[4]), 0x7F), "number", "down has a code that is not a number"),
        (lambda e: e.__setitem__(int(directory(e)[4]) + 511, 1), "padding", "rows past the last"),
    ],
)  # fmt: skip
def test_rules_of_stored_extents(change, kind, said):
    version, values = drawn("fp8", 32, BLOCKS)
    extent, _ = version.encode(BLOCKS, values)
    change(extent)
    if kind == "codec":
        for use in (version.decode, lambda m, e: list(version.check(m, e))):
            with pytest.raises(CodecError, match=said):
                use(BLOCKS, extent)
        return
    found = list(version.check(BLOCKS, extent))
    assert {k for k, _ in found} == {kind} and re.search(said, found[0][1]), found


def test_a_part_is_not_larger_than_its_plane():
    version, values = drawn("fp8", 32, BLOCKS)
    parts = lossless.split(BLOCKS, [192, 4], version.encode(BLOCKS, values)[0])
    parts[1] = np.append(parts[1][0], np.uint8(0)), parts[1][1]
    with pytest.raises(CodecError, match="down has 513 bytes of codes, more than its 512 codes"):
        version.decode(BLOCKS, lossless.join(BLOCKS, parts)[0])


def test_a_coded_plane_is_checked_like_a_plain_one():
    version, values = drawn("fp8", 32, BLOCKS)
    values[0].codes[3, 5] = 0xFF
    extent, _ = version.encode(BLOCKS, values)
    assert list(version.check(BLOCKS, extent)) == [("number", "gate_up has a code that is not a number")]
    values[0].codes[3, 5] = 0
    extent, _ = version.encode(BLOCKS, values)
    offset = int(directory(extent)[0])
    words = extent[offset : offset + 64].view("<u4")
    assert words[1] == 1, "one tile, whose last word has bits to spare"
    last = offset + 48 + 16 + 4 * int(words[2]) - 4
    extent[last] ^= 1
    assert list(version.check(BLOCKS, extent)) == [("padding", "gate_up: bits past the end of a tile are not zero")]


def test_hostile_extents_are_refused_or_decoded():
    """A thousand, in memory that ends where it may not be touched."""
    version, values = drawn("fp8", 32, BLOCKS)
    refused, decoded = attack_extent(version, BLOCKS, version.encode(BLOCKS, values)[0], 1000)
    assert refused > 300 and decoded > 100 and refused + decoded == 1000


def test_rows_of_a_block_share_a_scale():
    version, values = made("fp8", 32)
    values[1].scale[5, 1] += 1
    with pytest.raises(ValueError, match="down: rows of one block of 16 have different scales"):
        version.encode(MATRICES, values)


@pytest.mark.parametrize(
    ("name", "field", "bad", "said"),
    [
        ("mxfp8", "scale", 255, "scale"), ("fp8row", "scale", np.inf, "scale"),
        ("mxfp8", "codes", 0xFF, "code"), ("fp8row", "codes", 0x7F, "code"),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_found(name, field, bad, said):
    """In versions that are coded in their files; those of others are tests/helpers/broken_rules/released.py."""
    version, values = made(name, 0)
    getattr(values[0], field)[0] = bad
    (found,) = version.check(MATRICES, version.encode(MATRICES, values)[0])
    assert found[0] == "number" and f"gate_up has a {said}" in found[1]
