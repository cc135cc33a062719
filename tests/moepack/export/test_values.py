"""What writers take of a matrix: weights of every affine width, made piece by piece, are the rounded reference."""

import pytest
import torch
from support import random_matrix

from moepack.export.values import Values, _Packed
from moepack.pack.spec import Matrix, Version
from moepack.pack.values import Expert


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("cols", [1024, 1000])  # whole groups, and a last one that is cut
def test_weights_are_the_rounded_reference(bits, cols):
    """A matrix of more rows than a piece, and no whole blocks of them."""
    version = Version.of(f"w{bits}", 64)
    matrices = (Matrix("gate_up", 6, cols), Matrix("down", 270, cols))
    extent = version.encode(matrices, [random_matrix(m, version, i) for i, m in enumerate(matrices)])[0]
    one = Expert(version, matrices, extent, "here")
    for n, exact in enumerate(one.torch().values()):
        made = Values(version.at(n), _Packed(one), n).weight
        assert made.dtype == torch.bfloat16 and torch.equal(made, exact.to(torch.bfloat16))


@pytest.mark.parametrize("bits", [4, 3, 1])
def test_scales_of_a_byte_leave_as_bf16(bits):
    version = Version.of(f"w{bits}", 64, scale_bits=8)
    matrices = (Matrix("gate_up", 6, 200), Matrix("down", 70, 128))
    values = [random_matrix(m, version, i) for i, m in enumerate(matrices)]
    one = Expert(version, matrices, version.encode(matrices, values)[0], "here")
    for n, value in enumerate(values):
        made = Values(version, _Packed(one), n)
        assert torch.equal(made.scale, torch.from_numpy(value.scale).view(torch.bfloat16))
        assert torch.equal(made.weight, made.exact.to(torch.bfloat16))
