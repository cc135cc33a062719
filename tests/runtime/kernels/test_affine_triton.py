"""The GPU's grouped product against float64: on the device where there is one, else through Triton's interpreter."""

import pytest
import torch
from expert_layers import (
    MIXED,
    RELEASED,
    SMALL,
    VERSIONS,
    activations,
    expected,
    make_layer,
    relative,
)
from torch_products import install

from benchmarks.random_matrices import coded
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.kernels import affine_triton, reference
from moepack.runtime.kernels.affine_triton import DECODE, MANY, product
from moepack.runtime.kernels.forms import Routing, make_forms
from moepack.runtime.kernels.routing_triton import route, sort
from moepack.runtime.kernels.switch_triton import summed, switched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device


def handles_of(layer):
    """A layer's handle table on the device, and the extents there that it names."""
    extents = [e.to(DEVICE) for e in layer.extents]
    numbers = [int(word) & 63 for word in layer.table]
    return torch.tensor([e.data_ptr() | n for e, n in zip(extents, numbers, strict=True)], device=DEVICE), extents


def run(layer, m, versions, x, index, gated=False, tiling=DECODE):
    handles, _extents = handles_of(layer)
    geometry, live, counts = sort(index.to(DEVICE), handles, tiling.tokens)
    there = index.reshape(-1)[live.cpu() != 0]
    assert counts.tolist() == torch.bincount(there, minlength=len(handles)).tolist()
    out = torch.full((index.numel(), m.rows // 2 if gated else m.rows), 7.0, device=DEVICE)
    forms = [make_forms((m,), v)[0] for v in versions]
    product(m, forms, range(len(forms)), handles, geometry, x.to(DEVICE), out, tiling, gated)
    return out.cpu()


def gated(h):
    """Gates of the first half of rows, float64 [slots, rows], times the second half."""
    gate, up = torch.from_numpy(h).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).numpy()


def named(version):
    return f"{version.name}-{version.bits}-{version.group_size}"


WIDTHS = [Version.of(*w) for w in (("w8", 64), ("w4", 128), ("w3", 32), ("w2", 64), ("w1", 32), ("w1", 128))]
WIDTHS += [Version.of(name, 64, symmetric=True) for name in ("w4", "w3")]
TRELLIS = [Version.of(name, scale_bits=s).at(1) for name, s in (("t2", 16), ("t3", 16), ("t2d3", 8), ("t2", 8))]


@pytest.mark.parametrize("version", WIDTHS + MIXED + TRELLIS + SMALL, ids=named)
def test_every_width_and_group(version):
    """Activations of one, two and three terms; an expert without tokens."""
    index = torch.tensor([[0], [2], [2]])
    cases = ((40, 100, torch.bfloat16, torch.float32), (17, 257, torch.bfloat16, torch.float16), (1, 1, torch.bfloat16))
    for k, (rows, cols, *dtypes) in enumerate(cases):
        m = Matrix("m", rows, cols, bias=bool(k % 2))
        layer = make_layer(m, [version], [0, 0, 0], seed=k)
        for dtype in dtypes:
            x = activations(3, cols, dtype)
            assert relative(run(layer, m, [version], x, index), expected(layer, x, index)) <= 1e-5, (rows, cols, dtype)


def test_five_versions_share_one_geometry():
    """More slots of an expert than a tile takes, sentinels, biases, experts without tokens."""
    m = Matrix("m", 50, 90, bias=True)
    layer = make_layer(m, VERSIONS, [e % 5 for e in range(12)])
    index = torch.randint(0, 9, (18, 3), generator=torch.Generator().manual_seed(3))
    index[:, 0] = 4
    index[2, 1] = index[7, 0] = 12
    x = activations(len(index), 90, torch.float32)
    out, want = run(layer, m, VERSIONS, x, index), expected(layer, x, index)
    absent = (index.reshape(-1) == 12).numpy()
    assert (out[absent] == 7).all() and relative(out[~absent], want[~absent]) <= 1e-5


def unit_product(version, rows, cols, seed, tiling):
    """What a unit matrix times the weights makes, and the reference's weights: both [rows, cols]."""
    m = Matrix("m", rows, cols)
    layer = make_layer(m, [version], [0], seed)
    (sections,) = reference.sections_of((m,), version)
    unit, index = torch.eye(cols, dtype=torch.bfloat16), torch.zeros(cols, 1, dtype=torch.int64)
    got = run(layer, m, [version], unit, index, tiling=tiling).T
    return got, reference.dequantise(layer.extents[0], sections, m, version, torch.float32)


@pytest.mark.parametrize("version", RELEASED, ids=lambda v: f"{v.name}-{v.group_size}")
def test_released_weights_are_the_references(version, monkeypatch):
    """Bit for bit, with subnormal codes and scales among them; not on a GPU, where weights are BF16 numbers."""
    for seed, (rows, cols) in enumerate([(33, 200), (17, 31)]):
        if DEVICE == "cpu":  # both orders of columns
            monkeypatch.setattr(affine_triton, "capability", lambda device, of=9 - seed % 2: of)
        got, want = unit_product(version, rows, cols, seed, MANY)
        exact = (want.abs() >= 2.0**-126) | (DEVICE == "cpu")
        assert torch.equal(got[exact], want[exact]), (rows, cols)


@pytest.mark.parametrize("version", WIDTHS + MIXED + TRELLIS + SMALL[1:3], ids=named)
@pytest.mark.parametrize("pairs", [True, False])
def test_many_tokens_of_every_width(version, pairs, monkeypatch):
    """Both orders of columns; a gate whose halves begin in the middle of a block, blocks with a rest, several terms."""
    if DEVICE == "cpu":  # a GPU takes one order alone
        monkeypatch.setattr(affine_triton, "capability", lambda device: 9 if pairs else 8)
    m = Matrix("m", 46, 200, bias=True)
    layer, index = make_layer(m, [version], [0, 0], 3), (torch.arange(41) % 5 == 0).long()[:, None]
    for dtype, plain, gate in (
        (torch.bfloat16, pairs, True),
        (torch.float16, False, pairs),
        (torch.float32, pairs, False),
    ):
        x = activations(41, 200, dtype)
        want = expected(layer, x, index)
        if plain:
            assert relative(run(layer, m, [version], x, index, False, MANY), want) <= 1e-5, dtype
        if gate:
            assert relative(run(layer, m, [version], x, index, True, MANY), gated(want)) <= 1e-5, dtype


@pytest.mark.parametrize("version", RELEASED + WIDTHS + MIXED + TRELLIS + SMALL, ids=named)
def test_few_tokens_weights_are_the_references(version):
    """Bit for bit too: a code's ones and its zero point leave no rest."""
    got, want = unit_product(version, 33, 65, 0, DECODE)
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_few_tokens_of_whole_tiles():
    """Rows and columns without a rest, for which nothing is masked: a gate, and several groups a warp at a time."""
    some = (Version.of(*v) for v in (("bf16",), ("w8", 128), ("w2", 64), ("mxfp4", 32)))
    m, index = Matrix("m", 64, 1024, bias=True), torch.tensor([[1], [0]])
    x = activations(2, 1024, torch.bfloat16)
    for version in (*some, TRELLIS[2]):
        layer = make_layer(m, [version], [0, 0])
        h = expected(layer, x, index)
        assert relative(run(layer, m, [version], x, index), h) <= 1e-5, version.name
        assert relative(run(layer, m, [version], x, index, True), gated(h)) <= 1e-5, version.name


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(
    ("versions", "inner"),
    [(list({v.name: v for v in RELEASED}.values()), 35), ([Version.of(name) for name in ("t3", "t2d3")], 32)],
    ids=["released", "trellis"],
)
def test_a_layer_is_run_by_it(versions, inner, monkeypatch):
    from gpu_stand_in import kernels
    from transformers.integrations.moe import _default_apply_gate

    from moepack.runtime.experts.forward import experts_forward, reference_forward
    from moepack.runtime.experts.handles import LayerCall, LayerExperts

    class Module:
        has_gate, act_fn, _apply_gate = True, torch.nn.SiLU(), _default_apply_gate
        _moepack: LayerExperts

    kernels(monkeypatch, real_products=True)
    matrices, count = (Matrix("gate_up", 2 * inner, 40, bias=True), Matrix("down", 40, inner)), len(versions)
    experts = LayerExperts(ExpertLayer(0, "experts", count, matrices), versions, torch.device(DEVICE))
    for e, v in enumerate(versions):
        plain = torch.empty(v.resident_size(matrices), dtype=torch.uint8)
        values = [coded(m, v.at(i), e) for i, m in enumerate(matrices)]
        v.restore(matrices, v.encode(matrices, values)[0], plain.numpy())
        extent = plain.to(DEVICE)
        experts.publish(e, experts.of.over(v, extent))
    assert experts.of.backend == "triton" and experts.current.served == list(range(count))
    module = Module()
    module._moepack = experts
    x, gates = activations(count, 40, torch.float32).to(DEVICE), torch.ones(count, 1, device=DEVICE)
    index = torch.arange(count, device=DEVICE)[:, None]
    with torch.inference_mode():
        got = experts_forward(module, x, index, gates).cpu()
        want = reference_forward(LayerCall(module, experts.current, x, index, gates)).double().cpu().numpy()
    for e, v in enumerate(versions):
        assert relative(got[e], want[e]) <= 1e-5, v.name


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels are compiled for this machine's GPU")
def test_what_stands_in_for_products(monkeypatch):
    """In tests of what is around them: every encoding, both tiles, a gate."""
    install(monkeypatch)
    m, index = Matrix("m", 36, 70, bias=True), torch.tensor([[0, 1], [1, 1], [2, 0]])
    x, real = activations(3, 70, torch.float32), (index.reshape(-1) < 2).numpy()
    for version in (Version.of("bf16"), *WIDTHS, *MIXED, *TRELLIS, *RELEASED, *SMALL):
        layer = make_layer(m, [version], [0, 0])
        want = expected(layer, x, index)
        assert relative(run(layer, m, [version], x, index)[real], want[real]) <= 1e-5, version.name
        assert relative(run(layer, m, [version], x, index, True, MANY)[real], gated(want)[real]) <= 1e-5, version.name


def test_a_gate_of_ones_own_is_not_fused():
    """An experts module may have a gate that its class lacks, as behind the interface of other families."""
    from transformers.integrations.moe import _default_apply_gate

    from moepack.runtime.experts.gpu import _fuses

    class Experts(torch.nn.Module):
        has_gate, _apply_gate = True, _default_apply_gate

    module = Experts()
    module.act_fn = torch.nn.SiLU()
    assert _fuses(module)
    module._apply_gate = lambda h: h
    assert not _fuses(module)


def test_what_does_not_fit_is_refused():
    m = Matrix("m", 20, 64)
    forms = [make_forms((m,), v)[0] for v in VERSIONS]
    handles, out = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.empty(2, 20)
    geometry, *_ = sort(torch.tensor([[0], [1]], device=DEVICE), handles, 16)
    for x, tiling in ((torch.zeros(2, 63), DECODE), (torch.zeros(2, 64).double(), DECODE), (torch.zeros(2, 64), MANY)):
        with pytest.raises(ValueError, match="m:"):
            product(m, forms, [0], handles, geometry, x, out, tiling)


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize(
    ("gate", "versions"), [(False, VERSIONS), (True, MIXED[:2] + TRELLIS[1:])], ids=["plain", "gated"]
)
def test_one_launch_for_all_versions_makes_the_same_bits(gate, versions, stand_in, monkeypatch):
    """Few tokens, sentinels and an absent expert: the switch's rows and sum against a launch for each version."""
    if stand_in:
        install(monkeypatch)
    numbers, rows = range(len(versions)), 25 if gate else 50
    layer = make_layer(m := Matrix("m", 50, 90, bias=True), versions, [e % len(versions) for e in range(12)])
    handles, _extents = handles_of(layer)
    handles[7] = 0
    forms, gates = [make_forms((m,), v)[0] for v in versions], torch.rand(4, 3, device=DEVICE)
    index = torch.randint(0, 13, (4, 3), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    index[0, 0], index[1, 1] = 7, 12
    x = activations(4, 90, torch.float32).to(DEVICE)
    want, got = torch.zeros(12, rows, device=DEVICE), torch.full((12, rows), float("nan"), device=DEVICE)
    product(m, forms, numbers, handles, sort(index, handles, DECODE.tokens)[0], x, want, DECODE, gate)
    routed = route(Routing(3), handles, DECODE.tokens, given=(index, gates))
    switched(m, forms, numbers, handles, routed.geometry, x, got, gate)
    assert torch.equal(got[routed.live.bool()], want[routed.live.bool()])
    total = (want * gates.view(-1, 1)).view(4, 3, -1).sum(1)
    torch.testing.assert_close(summed(got, gates, routed.live, torch.float32), total, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        switched(m, forms, numbers, handles, routed.geometry, x[:, :-1].contiguous(), got, gate)
