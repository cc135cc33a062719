"""Released extents: codes and scales come back as they went in, values are torch's, and bad numbers are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from released_values import NAMES, random_released

from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.codec.released import E2M1, E4M3, E8M0, ReleasedMatrix
from moepack.pack.spec import Matrix, Version, needed_format, version_names

MATRICES = (Matrix("gate_up", 40, 100, True), Matrix("down", 33, 48))


def made(name: str, group: int) -> tuple[Version, list[AffineMatrix | ReleasedMatrix]]:
    version = Version.of(name, group)
    return version, [random_released(m, version, i) for i, m in enumerate(MATRICES)]


@pytest.mark.parametrize(("name", "group"), NAMES)
def test_codes_and_scales_come_back(name: str, group: int) -> None:
    version, values = made(name, group)
    extent, payload = version.encode(MATRICES, values)
    assert len(extent) == version.resident_size(MATRICES) and payload == version.payload(MATRICES, extent)
    assert not list(version.check(MATRICES, extent)) and Version.read(version.record()) == version
    for ours, theirs in zip(values, version.decode(MATRICES, extent), strict=True):
        for field in ours.__slots__:
            a, b = getattr(ours, field), getattr(theirs, field)
            assert (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b)), field


def test_numbers_are_those_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(E4M3, every.view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)
    assert np.array_equal(E8M0, every.view(torch.float8_e8m0fnu).float().numpy(), equal_nan=True)
    assert np.array_equal(np.signbit(E4M3[:127]), np.zeros(127)) and np.signbit(E2M1[8]) and E2M1[15] == -6


def test_values_by_hand() -> None:
    code = np.array([[1, 9, 7, 15] * 8], np.uint8)
    bits = ReleasedMatrix(code, np.array([[128]], np.uint8)).dequantise(Version.of("mxfp4"))
    assert bits[0, :4].tolist() == [1.0, -1.0, 12.0, -12.0]
    scale = np.array([[0x38, 0x40]], np.uint8)  # 1 and 2
    outer = np.array([0.5], np.float32)
    values = ReleasedMatrix(code, scale, outer).dequantise(Version.of("nvfp4"))
    assert values[0, 2] == 3.0 and values[0, 18] == 6.0
    eight = ReleasedMatrix(np.array([[0x38, 0xB8]], np.uint8), np.array([[3.0]], np.float32))
    assert eight.dequantise(Version.of("fp8row")).tolist() == [[3.0, -3.0]]
    half = AffineMatrix(np.array([[9, 8]], np.uint8), np.array([[0x3E00]], np.uint16), np.array([[128]], np.uint8))
    assert half.dequantise(Version.of("int4fp16", 32)).tolist() == [[1.5, 0.0]]


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32), (4, 128)])
def test_integers_are_the_extents_of_affine_versions(bits: int, group: int) -> None:
    version, values = made(f"int{bits}", group)
    assert np.array_equal(
        version.encode(MATRICES, values)[0], Version.of(f"w{bits}", group).encode(MATRICES, values)[0]
    )


def test_bits_per_weight() -> None:
    matrices = (Matrix("gate_up", 1536, 2048), Matrix("down", 2048, 1024))
    weights = sum(m.weights for m in matrices)
    wanted = {
        ("mxfp4", 32): 4.25, ("nvfp4", 16): 4.5 + 32 * (96 + 128) / weights, ("mxfp8", 32): 8.25,
        ("fp8", 128): 8 + 32 / (16 * 128), ("fp8", 32): 8 + 32 / (16 * 32), ("int4", 32): 4 + 24 / 32,
        ("fp8row", 0): 8 + 32 * (1536 + 2048) / weights,
    }  # fmt: skip
    for (name, group), bits in wanted.items():
        assert 8 * Version.of(name, group).stored_sizes(matrices)[1] / weights == bits, name


def test_rows_of_a_block_share_a_scale() -> None:
    version, values = made("fp8", 32)
    values[1].scale[5, 1] += 1
    with pytest.raises(ValueError, match="down: rows of one block of 16 have different scales"):
        version.encode(MATRICES, values)


@pytest.mark.parametrize(
    ("name", "field", "bad", "said"),
    [
        ("mxfp4", "scale", 255, "scale"), ("mxfp8", "scale", 255, "scale"), ("nvfp4", "scale", 0x7F, "scale"),
        ("nvfp4", "outer", np.inf, "scale"),
        ("fp8row", "scale", np.inf, "scale"), ("int4fp16", "scale", 0x7C00, "scale"),
        ("mxfp8", "codes", 0xFF, "code"), ("fp8row", "codes", 0x7F, "code"),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_found(name: str, field: str, bad: float, said: str) -> None:
    version, values = made(name, 0)
    getattr(values[0], field)[0 if field != "outer" else slice(16)] = bad
    (found,) = version.check(MATRICES, version.encode(MATRICES, values)[0])
    assert found[0] == "number" and f"gate_up has a {said}" in found[1]


def test_the_format_has_them_since_version_4() -> None:
    assert "mxfp4" not in version_names(3) and "mxfp4" in version_names(4)
    w4, fp4 = Version.of("w4"), Version.of("mxfp4")
    assert needed_format("MXFP4", (w4,)) == 3 == needed_format("BF16", ())
    assert needed_format("MXFP4", (w4, fp4)) == 4 == needed_format("INT4", (w4,))
