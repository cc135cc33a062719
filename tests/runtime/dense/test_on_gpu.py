"""Packed dense matrices by the GPU's kernel, in Triton's interpreter, against the reference's dequantised weights."""

import pytest
import torch
import torch_products
from expert_layers import RELEASED, make_layer
from gpu_stand_in import kernels
from torch.utils._python_dispatch import TorchDispatchMode

from moepack.pack.errors import InputError
from moepack.pack.spec import Matrix, Version
from moepack.runtime.dense.gpu_projections import _joined
from moepack.runtime.dense.packed import PackedLinear, joined
from moepack.runtime.kernels import forms, reference

WIDTHS = [Version.of(*w) for w in (("w8", 128), ("w4", 64), ("w3", 32), ("w2", 64), ("w1", 128))]
VERSIONS = WIDTHS + list({v.name: v for v in RELEASED}.values())
# Of what a result is rounded to; the interpreter cuts BF16 numbers off, where a device rounds.
LEAST = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 5e-4}


def packed(matrix, version, seed):
    module = PackedLinear(matrix, version)
    module.packed = make_layer(matrix, [version], [0], seed).extents[0]
    return module


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    kernels(monkeypatch, real_products=True)

    def never(*args):
        raise AssertionError("a whole matrix was dequantised")

    monkeypatch.setattr(PackedLinear, "weights", never)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.name}-{v.group_size}")
def test_every_encoding(version):
    """With and without a bias, odd sizes, few tokens and many, every dtype of activations."""
    cases = [(36, 200, 1, d) for d in LEAST] + [(70, 200, 3, torch.bfloat16)] + [(33, 131, 16, torch.bfloat16)]
    cases += [(17, 65, 33, torch.float16)]
    for k, (rows, cols, tokens, dtype) in enumerate(cases):
        matrix = Matrix("m", rows, cols, bias=bool(k % 2))
        module = packed(matrix, version, k)
        (sections,) = reference.sections_of((matrix,), version)
        weights = reference.dequantise(module.packed, sections, matrix, version, torch.float32).double()
        x = (torch.randn(1, tokens, cols, generator=torch.Generator().manual_seed(k)) + 0.3).to(dtype)
        want = x.double() @ weights.T
        if matrix.bias:
            want += reference.section(module.packed, sections["bias"]).double()
        got = module(x)
        assert got.shape == (1, tokens, rows) and got.dtype == dtype
        assert (got - want).norm() <= LEAST[dtype] * want.norm(), (rows, cols, tokens, dtype)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.name}-{v.group_size}")
def test_maps_of_one_input_become_one(version, monkeypatch):
    """The bits of each alone, by the joined map and by each in its new place; none moves where it could not be read."""
    if version.name not in ("w3", "fp8row"):  # of all encodings the interpreter takes minutes
        torch_products.install(monkeypatch)
    sizes = [(64, False), (32, False), (32, False)], [(32, True), (16, True)], [(33, True), (16, True)]
    for n, rows in enumerate(sizes):
        maps = [packed(Matrix("m", r, 200, bias=b), version, i) for i, (r, b) in enumerate(rows)]
        x = torch.randn(2, 200, generator=torch.Generator().manual_seed(n))
        want, before = [m(x) for m in maps], [m.packed.data_ptr() for m in maps]
        whole = joined(maps)
        if n == 2 or whole is None:  # rows are padded; scales of 16 rows would not begin at a multiple of 16 bytes
            assert whole is None and [m.packed.data_ptr() for m in maps] == before
            assert n == 2 or version.name in ("fp8", "nvfp4")
        else:
            assert torch.equal(whole(x), torch.cat(want, 1)) and len({m.packed.data_ptr() for m in maps}) == 1
        for m, alone in zip(maps, want, strict=True):
            assert torch.equal(m(x), alone)
        assert torch.equal(_joined(maps)(x), torch.cat(want, 1)), (
            "one after another where they have no extent in common"
        )
    other = packed(Matrix("m", 16, 200), Version.of("w4", 32), 0)
    assert joined([maps[0], other]) is None


@pytest.mark.parametrize("version", VERSIONS, ids=lambda v: f"{v.name}-{v.group_size}")
def test_many_tokens_are_torchs_product(version, monkeypatch):
    """Of the reference's weights, bit for bit, in slices of rows that end anywhere, with and without a bias."""
    monkeypatch.setattr(forms, "SLICE", 2 * 200 * 16)
    for bias in (False, True):
        module = packed(matrix := Matrix("m", 40, 200, bias=bias), version, 3)
        (sections,) = reference.sections_of((matrix,), version)
        whole = reference.dequantise(module.packed, sections, matrix, version, torch.float32)
        cut = (whole.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()  # as the interpreter rounds
        of = reference.section(module.packed, sections["bias"]).bfloat16() if bias else torch.zeros(40).bfloat16()
        x = torch.eye(200, dtype=torch.bfloat16)
        want = [torch.nn.functional.linear(x, cut[i : i + 16], of[i : i + 16]) for i in (0, 16, 32)]
        normal = (whole == 0) | (whole.abs() >= 2.0**-126)  # the interpreter rounds others in a way of its own
        assert torch.equal(module(x).T[normal], torch.cat(want, 1).T[normal])


def test_what_a_slice_takes_is_what_is_counted(monkeypatch):
    """Weights of one slice, and a slice's results where there are several: the numbers that torch allocates."""
    taken = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.new_empty.default:
                taken.append(out.nbytes)
            return out

    module = packed(Matrix("m", 40, 200), Version.of("w4", 64), 0)
    x = torch.zeros(17, 200, dtype=torch.bfloat16)
    for size in (forms.SLICE, 2 * 200 * 16):
        monkeypatch.setattr(forms, "SLICE", size)
        taken.clear()
        with Counted():
            module(x)
        assert sum(taken) == 17 * 40 * 2 + forms.slice_bytes(40, 200, 17)


def test_other_inputs(monkeypatch):
    """No tokens, float64, a view with gaps; and a gradient, for which torch multiplies."""
    module = packed(Matrix("m", 33, 64), Version.of("w4", 64), 0)
    assert module(torch.zeros(2, 0, 64)).shape == (2, 0, 33)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    out = module(x[:, ::2])
    assert torch.equal(out, module(x[:, ::2].contiguous())) and torch.equal(module(x[:, ::2].double()), out.double())
    monkeypatch.undo()
    leaf = x[:, :64].clone().requires_grad_()
    module(leaf).sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, module.weights(torch.float32).sum(0).expand(3, 64), atol=1e-5)


def test_what_does_not_fit_is_refused():
    from moepack.runtime.kernels.affine_triton import dense
    from moepack.runtime.kernels.forms import make_forms

    matrix, version = Matrix("m", 16, 64), Version.of("w4", 64)
    (form,), extent = make_forms((matrix,), version), packed(matrix, version, 0).packed
    x, out = torch.zeros(2, 64), torch.zeros(2, 16)
    wrong = [
        (extent, torch.zeros(2, 63), out), (extent, x, torch.zeros(1, 16)), (extent, x.double(), out),
        (extent[8:], x, out), (extent.view(torch.int32), x, out), (extent, x, torch.zeros(2, 32)[:, ::2]),
    ]  # fmt: skip
    for case in wrong:
        with pytest.raises(ValueError, match="m:"):
            dense(matrix, form, *case)
    with pytest.raises(InputError, match="before its weights were loaded"):
        PackedLinear(matrix, version)(x)
