"""A decoding token's steps in one call: the same bits as the separate calls, at every level and number of threads."""

import ctypes

import numpy as np
import pytest
import torch
from expert_layers import kernel_matrix, native

from benchmarks.hostile.small_bundle import extent
from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels import dense_native as beside
from moepack.runtime.kernels.forms import Routing, handle
from moepack.runtime.kernels.token_native import Choices, GatedExperts, Norm, Projection, silu_gate

LEVELS = range(native.use_level() + 1)
HEAD, HEADS, COLS = 32, (4, 2, 2), 96


def rotated(x, cos, sin):
    """transformers' rotation of the first numbers of a head; x is [batch, heads, tokens, head]."""
    turned = cos.shape[-1]
    part, rest = x[..., :turned], x[..., turned:]
    first, second = part.chunk(2, -1)
    part = part * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
    return torch.cat((part, rest), -1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("turned", "shared"), [(0, False), (10, False), (HEAD, False), (HEAD, True)])
@pytest.mark.parametrize("norms", ["none", "heads", "rows"])
def test_projection(level, turned, shared, norms):
    native.use_level(level)
    torch.manual_seed(turned)
    made = [
        kernel_matrix(n * HEAD, COLS, name, i)[0]
        for i, (n, name) in enumerate(zip(HEADS, ("w8", "w4", "bf16"), strict=True))
    ]
    of = beside.MatrixGroup(made)
    sizes = [HEAD if norms == "heads" else n * HEAD for n in HEADS[:2]]
    found = [
        None if norms == "none" else Norm(torch.randn(n).bfloat16(), form, 1e-6)
        for n, form in zip(sizes, (0, 2), strict=True)
    ]
    for batch, tokens in ((1, 1), (3, 1), (2, 2)):
        x, angle = torch.randn(batch, tokens, COLS).bfloat16(), torch.randn(batch, tokens, turned // (1 + shared))
        given = [f(angle).bfloat16() if turned else None for f in (torch.cos, torch.sin)]
        cos, sin = (torch.cat((t, t), -1) if shared and t is not None else t for t in given)
        wanted = []
        for i, (y, n) in enumerate(zip(beside.dense(of, x), HEADS, strict=True)):
            norm = found[i] if i < 2 else None
            if norm is not None:
                rows = y.reshape(-1, len(norm.weight)).contiguous()
                y = beside.norm(rows, norm.weight, norm.form, ctypes.c_double(norm.epsilon))
            y = y.view(batch, tokens, n, HEAD).transpose(1, 2)
            wanted.append(y if i == 2 or cos is None or sin is None else rotated(y, cos, sin))
        for threads in (1, 2):
            got = Projection(of, HEAD, found, shared).run(x, *given, threads)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_limits_leave_no_result_unwritten():
    """Without tiles, `dense` lets torch multiply more tokens than a matrix's limit; for a projection nobody does."""
    native.use_level(0)
    made = [kernel_matrix(n * HEAD, COLS, "w4", i)[0] for i, n in enumerate(HEADS)]
    x = torch.randn(1, 3, COLS).bfloat16()
    found = [
        Projection(beside.MatrixGroup(made, {torch.bfloat16: [most] * 3}), HEAD, (None, None)).run(x, None, None)
        for most in (1, 3)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_a_projection_refuses():
    made = [kernel_matrix(n * HEAD, COLS, "w4", i)[0] for i, n in enumerate(HEADS)]
    of, none = beside.MatrixGroup(made), (None, None)
    for wrong in (lambda: Projection(of, 48, none), lambda: Projection(beside.MatrixGroup(made[:2]), HEAD, none),
                  lambda: Projection(of, HEAD, (Norm(torch.ones(HEAD + 1).bfloat16(), 0, 1e-6), None)),
                  lambda: Projection(of, HEAD, (Norm(torch.ones(HEAD), 0, 1e-6), None))):  # fmt: skip
        with pytest.raises(ValueError, match="heads"):
            wrong()
    projection, x = Projection(of, HEAD, none), torch.zeros(1, 1, COLS).bfloat16()
    for given, tokens, turned in ((x, 1, HEAD + 2), (x, 2, HEAD), (x[..., :5], 1, HEAD), (x, 1, 3)):
        turn = torch.zeros(1, tokens, turned).bfloat16()
        with pytest.raises(ValueError, match="do not fit"):
            projection.run(given, turn, turn)


@pytest.mark.parametrize("level", LEVELS)
def test_silu_gate_is_torchs(level):
    native.use_level(level)
    x = (torch.randn(64, 2 * 77) * torch.logspace(-3, 2, 64)[:, None]).bfloat16()
    gate, up = x.chunk(2, -1)
    wanted, got = (torch.nn.functional.silu(gate) * up).float(), silu_gate(x)
    assert ((got.float() - wanted).abs() <= 2**-7 * wanted.abs() + 1e-30).all()
    assert (got == wanted).float().mean() > 0.998
    special = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0, 1.0, 1.0, 1.0, 1.0]]).bfloat16()
    assert silu_gate(special).isnan().tolist() == [[True, False, True, False]]
    for wrong in (x[:, :-1], x.float(), x.T):
        with pytest.raises(ValueError, match="is gated"):
            silu_gate(wrong)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16])
def test_gated_experts(level, gates):
    """The bits of two products with a gate between them, and of their sum; `down` of another width."""
    native.use_level(level)
    torch.manual_seed(level)
    hidden, inner, top_k = 96, 48, 3
    versions = [Version.of("w4", 64), Version.of("w2", 64), Version.of("t2d3", 128)]
    kinds = [0, 1, 2, 1, 2]
    shapes = Matrix("up", 2 * inner, hidden), Matrix("down", hidden, inner)
    forms, extents = native.LayerForms(shapes, versions), []
    for seed, k in enumerate(kinds):
        extents.append(torch.zeros(versions[k].resident_size(shapes) + 64, dtype=torch.uint8))
        extents[-1] = extents[-1][-extents[-1].data_ptr() % 64 :]
        versions[k].restore(shapes, extent(versions[k], seed, shapes)[0], extents[-1].numpy())
    table = np.array([handle(x.data_ptr(), k) for x, k in zip(extents, kinds, strict=True)], np.uint64)
    for tokens in (1, 5):
        x = torch.randn(tokens, hidden).bfloat16()
        index = torch.stack([torch.randperm(len(kinds) + 1)[:top_k] for _ in range(tokens)])  # the last adds nothing
        weights = torch.rand(tokens, top_k).to(gates)
        y = torch.empty(tokens * top_k, hidden, dtype=torch.bfloat16)
        h = torch.empty(tokens * top_k, 2 * inner, dtype=torch.bfloat16)
        native.product(forms, 0, table, x, index, h)
        gated = silu_gate(h)
        native.product(forms, 1, table, gated, index, y)
        wanted = torch.empty_like(x)
        native.combine(y, index, weights, len(kinds), wanted)
        for threads in (1, 2):
            assert torch.equal(GatedExperts(forms).run(table, x, index, weights, forms.unlimited, threads), wanted)
    if not native.has_tiles(torch.bfloat16):  # limits skip no expert, though one has more slots than there are tokens
        twice, few = torch.zeros(1, top_k, dtype=torch.int64), np.ones(len(versions), np.int64)
        got, wanted = (GatedExperts(forms).run(table, x[:1], twice, weights[:1], n) for n in (few, forms.unlimited))
        assert wanted.abs().sum() > 0 and torch.equal(got, wanted)
    with pytest.raises(ValueError, match="do not fit"):
        GatedExperts(forms).run(table, x[:, :-1].contiguous(), index, weights, forms.unlimited)
    with pytest.raises(ValueError, match="version number 9"):
        GatedExperts(forms).run(table | np.uint64(9), x, index, weights, forms.unlimited)
    with pytest.raises(ValueError, match="gated experts"):
        GatedExperts(native.LayerForms(shapes[::-1], versions))


@pytest.mark.parametrize("sizes", [(8, 2), (64, 8), (160, 6), (512, 10), (24, 16)], ids=str)
@pytest.mark.parametrize("ordered", [True, False])
def test_equal_scores_are_chosen_as_torch_chooses(sizes, ordered):
    """In torch's order too: BF16 logits, and those that have few values."""
    experts, top_k = sizes
    form = Routing(top_k, ordered=ordered)
    for seed, (scale, digits) in enumerate(((2, 3), (0.1, 3), (1, 0), (8, 0))):
        logits = torch.randn(200, experts, generator=torch.Generator().manual_seed(seed)) * scale
        logits = logits.round(decimals=digits).bfloat16()
        gates, index = torch.topk(logits.softmax(-1, dtype=torch.float32), top_k, sorted=ordered)
        chosen, weights = Choices(form, experts, torch.bfloat16, torch.float32).choose(logits, None)
        assert torch.equal(chosen, index)
        torch.testing.assert_close(weights, gates, rtol=1e-5, atol=1e-30)


def test_a_choice_in_another_order_is_refused():
    """torch finds one in 64 or fewer by another algorithm."""
    for experts, top_k in ((64, 1), (512, 8), (1024, 17), (4, 5)):
        with pytest.raises(ValueError, match="a choice of"):
            Choices(Routing(top_k), experts, torch.bfloat16, torch.float32)
