"""Bit packing and affine extents: round trips, exact values, sections where FORMAT.md puts them."""

from dataclasses import replace

import numpy as np
import pytest
from support import random_matrix

from moepack.pack.spec import PAGE, SECTION, Matrix, Version


@pytest.mark.parametrize("scale_bits", [16, 8])
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_extent_round_trip(bits, group_size, bias, scale_bits, symmetric):
    version = Version.of(f"w{bits}", group_size, scale_bits=scale_bits, symmetric=symmetric)
    matrices = (Matrix("gate_up", 6, 100, bias), Matrix("down", 5, 33, bias))
    values = [random_matrix(m, version, i) for i, m in enumerate(matrices)]
    extent = version.encode(matrices, values)[0]
    assert len(extent) == version.resident_size(matrices) and len(extent) % PAGE == 0
    for ours, theirs in zip(version.decode(matrices, extent), values, strict=True):
        for field in ("codes", "scale", "zero", "bias"):
            a, b = getattr(ours, field), getattr(theirs, field)
            assert (a is None and b is None) or np.array_equal(a, b), field
    covered = np.zeros(len(extent), bool)
    for s in version.sections(matrices):
        assert s.offset % SECTION == 0 and not covered[s.offset : s.end].any()
        covered[s.offset : s.end] = True
    assert not extent[~covered].any() and covered.sum() == version.stored_sizes(matrices)[1]


def test_bits_per_weight_are_what_the_format_says():
    """4 bits in groups of 64: 4 + 16/64 for the scale + 8/64 for the zero; 1 bit has no zero.

    A scale of a byte saves 8/64, and costs a float for 16 rows: 2 in 256 or 64 columns. Symmetric codes save the zero.
    """
    matrices = (Matrix("gate_up", 128, 256), Matrix("down", 256, 64))
    weights = sum(m.weights for m in matrices)
    for bits, expected in ((8, 8.375), (4, 4.375), (3, 3.375), (2, 2.375), (1, 1.25)):
        assert 8 * Version.of(f"w{bits}", 64).stored_sizes(matrices)[1] / weights == expected
        outer = 2 * (128 + 256) / weights
        small = Version.of(f"w{bits}", 64, scale_bits=8).stored_sizes(matrices)[1]
        assert 8 * small / weights == expected - 0.125 + outer
        symmetric = Version.of(f"w{bits}", 64, symmetric=True).stored_sizes(matrices)[1]
        assert 8 * symmetric / weights == expected - 0.125 * (bits > 1)
    kimi = Version.of("int4", 32, symmetric=True)
    assert 8 * kimi.stored_sizes(matrices)[1] / weights == 4.5, "as the release has"


def test_symmetric_codes_have_the_middle_code_as_zero_point():
    """A matrix whose zero points are stored as the middle code makes the same extent; another one is refused."""
    m, version = Matrix("m", 20, 70), Version.of("w4", 32, symmetric=True)
    value = random_matrix(m, version, 0)
    stored = replace(value, zero=np.full(value.scale.shape, 128, np.uint8))
    assert np.array_equal(version.encode((m,), [value])[0], version.encode((m,), [stored])[0])
    assert np.array_equal(value.dequantise(version), stored.dequantise(Version.of("w4", 32)))
    stored.zero[3, 1] = 144
    with pytest.raises(ValueError, match="m: a zero point is not the middle code"):
        version.encode((m,), [stored])


def test_scales_of_a_byte_are_what_the_format_says():
    """The byte is the exponent and five bits of the mantissa, counted from 16 rows' greatest; padding rows are zero."""
    version, m = Version.of("w4", 32, scale_bits=8), Matrix("down", 17, 64)
    v = random_matrix(m, version, 0)
    v.scale[:16] = 127 << 7  # 1
    v.scale[3, 1], v.scale[5, 0] = (127 << 7) + 0x7C, 120 << 7  # 63 / 32, 2^-7
    v.scale[16] = (1 << 7) + 4  # of the least normal number, 33 / 32
    sections = {s.kind: s for s in version.sections((m,))}
    extent, _ = version.encode((m,), [v])
    scale = extent[sections["scale"].offset : sections["scale"].end].reshape(2, 2, 16)
    outer = extent[sections["outer"].offset : sections["outer"].end].view("<f4")
    assert (scale[0, 1, 3], scale[0, 0, 5], scale[0, 0, 0]) == (255, 0, 7 << 5) and outer[0] == 2.0**-7
    assert scale[1, :, 0].tolist() == [1, 1] and not scale[1, :, 1:].any() and outer[1] == 2.0**-126
    assert not list(version.check((m,), extent))
    for wrong in (3.0, -1.0, 2.0**-127, 2.0**121, float("inf")):
        broken = extent.copy()
        broken[sections["outer"].offset : sections["outer"].end].view("<f4")[1] = wrong
        assert [kind for kind, _ in version.check((m,), broken)] == ["number"], wrong
    for other in (0x8000 | 127 << 7, (127 << 7) + 2, 119 << 7, 0x7F80):  # negative, too fine, too small, infinite
        v.scale[5, 0] = other
        with pytest.raises(ValueError, match="down: a scale is no byte"):
            version.encode((m,), [v])


def test_wrong_shape_is_refused():
    version, matrices = Version.of("w4", 64), (Matrix("gate_up", 4, 64), Matrix("down", 4, 64))
    values = [random_matrix(Matrix("x", 4, 64), version, 0), random_matrix(Matrix("x", 5, 64), version, 0)]
    with pytest.raises(ValueError, match="down"):
        version.encode(matrices, values)[0]
