"""Products of BF16 activations in integers: the same bits on every instruction set, within the bound they state.

Then products by codes of released encodings: activations of any size, denormal codes, what is read of an extent.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from codec_mutations import Fenced
from expert_layers import (
    RELEASED,
    SMALL,
    TRELLIS,
    activations,
    expected,
    make_layer,
    native,
    product,
    relative,
)

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.forms import handle

LEVELS = range(min(native.use_level(), native.LEVELS.index("avx512-vnni")) + 1)
SHAPES = [(96, 2048), (33, 100), (65, 33), (17, 257), (1, 1), (16, 14336)]


def run(layer, x):
    return product(layer, x, torch.zeros(len(x), 1, dtype=torch.int64), threads=1)


def hard(n, cols):
    """Columns of very different sizes: outliers, zeros, denormal numbers, blocks of those, 255/256 of a power."""
    x = activations(n, cols, torch.float32) * torch.logspace(-6, 3, cols).flip(0)[torch.randperm(cols)]
    x[:, ::7] = 0
    x[0, : cols // 3] = 1e-39
    x[-1, :] *= 1e-36
    x[n // 2, cols // 2] = 255.0
    return x.bfloat16()


WHOLE = [Version.of(f"w{b}", size) for b in (8, 4, 3, 2, 1) for size in (128, 64, 32)]
WHOLE += [Version.of(f"w{b}", 64, symmetric=True) for b in (8, 4, 3, 2)]
WHOLE += [
    *(v for v in RELEASED if v.bits == 4 or v.zero == "stored"),
    *SMALL,
    *TRELLIS,
]  # FP8 codes are multiplied as floats


@pytest.mark.parametrize("version", WHOLE, ids=lambda v: f"{v.name}-{v.group_size}-{v.scale_bits}")
def test_every_level_makes_the_same_bits(version):
    """One token, and as many as take all tile sizes."""
    for k, (rows, cols) in enumerate(SHAPES):
        layer = make_layer(Matrix("m", rows, cols, bias=bool(k % 2)), [version], [0], seed=k)
        for x in (activations(7, cols, torch.bfloat16), hard(8, cols), hard(3, cols), hard(1, cols)):
            outs = []
            for level in LEVELS:
                assert native.use_level(level) == level
                outs.append(run(layer, x).view(torch.int32))
            assert not any(o.view(torch.float32).isnan().any() for o in outs)
            assert all(torch.equal(o, outs[0]) for o in outs), (rows, cols, [native.LEVELS[i] for i in LEVELS])


def test_tokens_that_several_experts_share_are_prepared_for_all_of_them():
    """Of one token's experts one has few slots and another many, in versions whose integers lie in other orders."""
    versions = [Version.of(name, 64) for name in ("w4", "w2", "w3", "w8")]
    layer = make_layer(Matrix("m", 80, 200), versions, [0, 1, 2, 3, 0, 1], seed=3)
    x, generator = activations(23, 200, torch.bfloat16), torch.Generator().manual_seed(1)
    chance = torch.tensor([8.0, 6, 5, 4, 1, 1])  # of each expert
    index = torch.stack([torch.multinomial(chance, 2, generator=generator) for _ in x])
    outs = [product(layer, x, index, threads=n) for level in LEVELS for n in (1, 2) if native.use_level(level) == level]
    counts = torch.bincount(index.flatten(), minlength=6)
    assert min(counts[:4]) > 4 > max(counts[4:]) > 0 and any(counts % 4)
    assert all(torch.equal(o, outs[0]) for o in outs)
    alone = [product(layer, x[t : t + 1], index[t : t + 1], threads=1) for t in range(len(x))]
    assert torch.equal(outs[0], torch.cat(alone))


def bound(layer, x, group_size):
    """What affine_fixed.h allows: 1/32640 of the greatest of 128 columns for each; and rounding to float32."""
    weight, values = np.abs(layer.weights[0]), x.double().numpy()
    blocks = np.arange(weight.shape[1]) // 128
    greatest = np.maximum.reduceat(np.abs(values), np.arange(0, weight.shape[1], 128), axis=1)[:, blocks]
    least = 2.0**-126  # below that no integer stands for anything
    integers = (np.maximum(greatest / 32640, least)) @ weight.T
    sums = np.abs(values) @ weight.T * 2.0**-23 * (2 + weight.shape[1] / group_size)
    return integers + sums + 1e-38


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_errors_stay_within_the_bound(bits):
    for k, (rows, cols) in enumerate(SHAPES):
        layer = make_layer(Matrix("m", rows, cols), [Version.of(f"w{bits}", 64)], [0], seed=k)
        for x in (activations(5, cols, torch.bfloat16), hard(6, cols)):
            error = np.abs(run(layer, x).double().numpy() - x.double().numpy() @ layer.weights[0].T)
            assert (error <= bound(layer, x, 64)).all(), (rows, cols, (error / bound(layer, x, 64)).max())


def test_activations_of_nearly_one_size_are_exact():
    """None below 2^-7 of the greatest: what is left are the sums' roundings. Then a smaller one that is not exact."""
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(4, 512, generator=generator) * 1.9 + 0.02
    x = (size * (1 - 2 * torch.randint(0, 2, size.shape, generator=generator))).bfloat16()
    x[:, ::128] = 1.9
    layer = make_layer(Matrix("m", 64, 512), [Version.of("w4", 128)], [0])
    exact = x.double().numpy() @ layer.weights[0].T
    error = np.abs(run(layer, x).double().numpy() - exact) / (np.abs(x.double().numpy()) @ np.abs(layer.weights[0]).T)
    assert error.max() < 2.0**-22
    x[:, 1::128] = 2.0**-15 * 1.4921875
    error = np.abs(run(layer, x).double().numpy() - x.double().numpy() @ layer.weights[0].T)
    assert error.max() > 1e-7, "the integers are 16 bits"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("version", [Version.of("w4", 64), *RELEASED], ids=lambda v: f"{v.name}-{v.group_size}")
def test_what_is_no_number_does_not_become_one(level, version):
    """Of integers nothing would tell: results of that activation are NaN, the others are what they were."""
    native.use_level(level)
    layer = make_layer(Matrix("m", 40, 300), [version], [0])
    x = activations(3, 300, torch.bfloat16)
    want = run(layer, x)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[1, 299] = value
        got = run(layer, x)
        assert got[1].isnan().all() and torch.equal(got[[0, 2]], want[[0, 2]])


# --- codes of released encodings


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


@pytest.mark.parametrize("version", RELEASED, ids=lambda v: f"{v.name}-{v.group_size}")
def test_nothing_is_read_past_an_extent(version):
    """Memory ends where the last section does, to a line of cache."""
    m = Matrix("m", 256, 1024)
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
