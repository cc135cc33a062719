"""Products by codes of released encodings: activations of any size, denormal codes, what is read of an extent."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from codec_mutations import Fenced
from expert_layers import RELEASED, activations, expected, make_layer, native, product, relative

from moepack.pack.spec import Matrix
from moepack.runtime.kernels.forms import handle

ONE_EACH = list({v.name: v for v in RELEASED}.values())


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1.0, 1e30])
def test_fp8_activations_of_any_size(size):
    """They are scaled up before the codes multiply, whose bits count from 2^-120: sums are as precise at any size.

    AVX-512 BF16 takes activations below 2^-126 for zeros.
    """
    layer = make_layer(Matrix("m", 33, 300), [v for v in RELEASED if v.name == "fp8"], [0])
    best = native.use_level()
    for level in range(best + 1 if size > 1e-37 else min(best, native.LEVELS.index("avx512-vnni")) + 1):
        native.use_level(level)
        for dtype in (torch.float32, torch.bfloat16):
            x = (activations(2, 300, torch.float32) * size).to(dtype)
            index = torch.zeros(2, 1, dtype=torch.int64)
            assert relative(product(layer, x, index), expected(layer, x, index)) <= 1e-5, (level, dtype)


def test_flushed_denormals_drop_no_codes():
    """torch.set_flush_denormal changes no bit of a product of subnormal codes, and is still set after it."""
    x, index = activations(2, 300, torch.float32), torch.zeros(2, 1, dtype=torch.int64)
    for version in (v for v in RELEASED if v.name in ("fp8", "fp8row", "mxfp8", "nvfp4")):
        layer = make_layer(Matrix("m", 33, 300), [version], [0], seed=7)  # no other test shares what is changed here
        plane = version.sections((Matrix("m", 33, 300),))[0]
        layer.extents[0][plane.end - plane.size : plane.end] &= 0x87 if version.bits == 8 else 0xFF
        for level in range(native.BEST + 1):
            native.use_level(level)
            for dtype in (torch.float32, torch.bfloat16):
                want = product(layer, x.to(dtype), index)
                assert torch.set_flush_denormal(True)
                try:
                    got = product(layer, x.to(dtype), index)
                    assert float(torch.tensor([1e-40]) * 1) == 0
                finally:
                    torch.set_flush_denormal(False)
                assert bool(want.any()) and torch.equal(got, want), (version.name, level, dtype)


def test_activations_that_are_not_finite_make_no_numbers():
    for number, version in enumerate(ONE_EACH):
        layer = make_layer(Matrix("m", 40, 300), ONE_EACH, [number])
        x = activations(3, 300, torch.bfloat16)
        x[1, 299] = torch.inf
        got = product(layer, x, torch.zeros(3, 1, dtype=torch.int64))
        assert got[1].isnan().all() and not got[[0, 2]].isnan().any(), version.name


@pytest.mark.parametrize("version", RELEASED, ids=lambda v: f"{v.name}-{v.group_size}")
def test_nothing_is_read_past_an_extent(version):
    """Memory ends where the last section does, to a line of cache."""
    m = Matrix("m", 2048, 1024)
    layer = make_layer(m, [version], [0])
    ends = version.sections((m,))[-1].end
    fenced = Fenced(-(-ends // 64) * 64)
    room = fenced.room(-(-ends // 64) * 64)
    room[:ends] = layer.extents[0].numpy()[:ends]
    table = np.array([handle(room.ctypes.data, 0)], np.uint64)
    for level in range(native.BEST + 1):
        native.use_level(level)
        for dtype in (torch.float32, torch.bfloat16):
            x, index = activations(2, m.cols, dtype), torch.zeros(2, 1, dtype=torch.int64)
            got = product(replace(layer, table=table), x, index)
            assert torch.equal(got, product(layer, x, index)), (level, dtype)
