"""One input times several matrices in one call: against float64, and the same bits as an expert's product makes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from expert_layers import TOLERANCE, activations, kernel_matrix, native, relative

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels import dense_native as beside

NAMES = ("bf16", "w8", "w4", "w3", "w2", "w1")
LEVELS = range(native.use_level() + 1)


def several(cols, seed=0):
    rows = (1, 17, 64, 100, 33, 300)
    made = [
        kernel_matrix(r, cols, name, seed + i, bias=bool(i % 2))
        for i, (r, name) in enumerate(zip(rows, NAMES, strict=True))
    ]
    return beside.MatrixGroup([m for m, _ in made]), [w for _, w in made]


def expected(weights, x):
    with_one = np.concatenate([x.double().numpy(), np.ones((len(x), 1))], axis=1)
    return [with_one @ w.T for w in weights]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cols", [2048, 130, 33, 1])
def test_against_float64(level, dtype, cols):
    """Few tokens, and so many that they run in tiles, or through torch where there are none."""
    assert native.use_level(level) == level
    of, weights = several(cols)
    for tokens in (1, 3, 40, 150):
        x = activations(tokens, cols, dtype)
        outs = beside.dense(of, x)
        assert [tuple(o.shape) for o in outs] == [(tokens, m.rows) for m in of.matrices]
        for out, want, m in zip(outs, expected(weights, x), of.matrices, strict=True):
            assert out.dtype == dtype and out.is_contiguous()
            assert relative(out, want) <= (1e-5 if dtype == torch.float32 else 6e-3), (tokens, m.form.name)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_an_experts_product_makes_the_same(dtype):
    """Straight from packed bytes and in tiles: whatever matrices share the call, and on however many threads."""
    cols = 200
    of, _ = several(cols)
    for tokens in (1, 6, 70):
        x = activations(tokens, cols, dtype)
        outs = beside.dense(of, x, threads=1)
        for threads in (2, 5):
            assert all(torch.equal(a, b) for a, b in zip(outs, beside.dense(of, x, threads=threads), strict=True))
        for m, out in zip(of.matrices, outs, strict=True):
            (alone,) = beside.dense(beside.MatrixGroup([m]), x)
            assert torch.equal(alone, out)
            if m.form.name == "bf16" or (tokens == 70 and not native.has_tiles(dtype)):
                continue
            bias = m.form.bias >= 0
            layer = native.LayerForms([Matrix("m", m.rows, cols, bias=bias)], [Version.of(m.form.name, 64)])
            got, limits = torch.empty(tokens, m.rows, dtype=dtype), np.array([beside.MatrixGroup([m]).limits[dtype][0]])
            table = np.array([m.data.data_ptr()], np.uint64)
            native.product(layer, 0, table, x, torch.zeros(tokens, 1, dtype=torch.int64), got, limits)
            assert torch.equal(got, out)


def test_limits_are_each_matrixs(monkeypatch):
    """At six tokens BF16 rows run in tiles or through torch and w8 from its bytes; other limits give other bits."""
    (plain, _), (packed, _) = kernel_matrix(40, 256, "bf16", 0), kernel_matrix(40, 256, "w8", 1)
    x = activations(6, 256, torch.bfloat16)

    def outs(limits):
        given = None if limits is None else {torch.bfloat16: limits}
        return tuple(o.view(torch.int16) for o in beside.dense(beside.MatrixGroup([plain, packed], given), x))

    default, few, many = outs(None), outs([99, 99]), outs([5, 5])
    of_plain, of_packed = (beside.MatrixGroup([m]).limits[torch.bfloat16][0] for m in (plain, packed))
    assert of_plain < 6 <= of_packed
    assert torch.equal(default[0], many[0]) and torch.equal(default[1], few[1])
    assert not torch.equal(few[1], many[1])


def test_leading_dimensions_and_no_tokens():
    of, _ = several(64)
    x = activations(6, 64, torch.bfloat16)
    flat = beside.dense(of, x)
    for shape in ((6,), (2, 3), (3, 1, 2), (1, 6)):
        outs = beside.dense(of, x.view(*shape, 64))
        assert all(o.shape[:-1] == shape and torch.equal(o.view(6, -1), f) for o, f in zip(outs, flat, strict=True))
    for shape in ((), (1,), (1, 1)):
        outs = beside.dense(of, x[2].view(*shape, 64))
        for o, (want,) in zip(outs, (beside.dense(beside.MatrixGroup([m]), x[2]) for m in of.matrices), strict=True):
            assert o.shape[:-1] == shape and torch.equal(o.flatten(), want) and o.is_contiguous()
    assert [tuple(o.shape) for o in beside.dense(of, x[:0])] == [(0, m.rows) for m in of.matrices]
    strided = torch.cat([x, x], dim=1)[:, :64]
    assert all(torch.equal(a, b) for a, b in zip(beside.dense(of, strided), flat, strict=True))


def test_what_is_kept_is_within_its_bound():
    of, _ = several(1000)
    for tokens in (1, 20, 600):
        for dtype in TOLERANCE:
            for threads in (1, 3):
                native.release()
                beside.dense(of, activations(tokens, 1000, dtype), threads=threads)
                most = beside.dense_kept_bytes([(m.rows, m.cols) for m in of.matrices], tokens, threads)
                assert native.holds() <= most, (tokens, dtype, threads)


def test_what_does_not_fit_is_refused():
    (m, _), (other, _) = kernel_matrix(20, 64, "w4", 0), kernel_matrix(20, 32, "w4", 0)
    for bad in ([], [m, other], [replace(m, data=m.data[None])]):
        with pytest.raises(ValueError, match=r"matrices|does not fit"):
            beside.MatrixGroup(bad)
    plain, _ = kernel_matrix(20, 64, "bf16", 0)
    for wrong in ({"data": plain.data.float()}, {"data": plain.data.T}, {"bias": torch.zeros(20)}, {"rows": 21}):
        with pytest.raises(ValueError, match="does not fit"):
            beside.MatrixGroup([replace(plain, **wrong)])
    of = beside.MatrixGroup([m])
    for x in (torch.zeros(2, 63), torch.zeros(2, 64).half()):
        with pytest.raises(ValueError, match="these matrices take"):
            beside.dense(of, x)
    unknown = beside.MatrixGroup([m, replace(m, form=replace(m.form, bits=6))])
    with pytest.raises(ValueError, match=r"w4: the compiled kernels do not know its encoding \(number 6"):
        beside.dense(unknown, torch.zeros(1, 64))
