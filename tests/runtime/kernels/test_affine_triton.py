"""The GPU's grouped product against float64: on the device where there is one, else through Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expert_layers import TOLERANCE, VERSIONS, Layer, activations, expected, make_layer, relative

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.forms import make_forms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device


def run(
    layer: Layer, m: Matrix, versions: list[Version], x: torch.Tensor, index: torch.Tensor, gated: bool = False
) -> torch.Tensor:
    from moepack.runtime.kernels.affine_triton import Tiling, product, route

    extents = [e.to(DEVICE) for e in layer.extents]
    numbers = [int(word) & 63 for word in layer.table]
    handles = torch.tensor([e.data_ptr() | n for e, n in zip(extents, numbers, strict=True)], device=DEVICE)
    tiling = Tiling(16, 32)
    geometry = route(index.to(DEVICE), len(extents), tiling.tokens)
    out = torch.full((index.numel(), m.rows // 2 if gated else m.rows), 7.0, device=DEVICE)
    forms = [make_forms((m,), v)[0] for v in versions]
    product(m, forms, range(len(forms)), handles, geometry, x.to(DEVICE), out, tiling, gated)
    return out.cpu()


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 128), (3, 32), (2, 64), (1, 32), (1, 128)])
def test_every_width_and_group(bits: int, group_size: int) -> None:
    versions = [Version.of(f"w{bits}", group_size)]
    index = torch.tensor([[0], [2], [2]])  # expert 1 has no tokens
    for k, (rows, cols) in enumerate([(40, 100), (17, 257), (1, 1)]):
        m = Matrix("m", rows, cols, bias=bool(k % 2))
        layer = make_layer(m, versions, [0, 0, 0], seed=k)
        for dtype in TOLERANCE:
            x = activations(3, cols, dtype)
            assert relative(run(layer, m, versions, x, index), expected(layer, x, index)) <= 1e-5, (rows, cols, dtype)


@pytest.mark.parametrize("share", [3, 1])
def test_five_versions_share_one_geometry(share: int) -> None:
    """More slots of an expert than a tile takes, sentinels, biases, experts without tokens."""
    m = Matrix("m", 50, 90, bias=True)
    layer = make_layer(m, VERSIONS, [e % 5 for e in range(12)])
    index = torch.randint(0, 9, (30, 3), generator=torch.Generator().manual_seed(3))
    index[:, 0] = 4
    index[2, 1] = index[7, 0] = 12
    x = activations(index.numel() // share, 90, torch.float32)
    out, want = run(layer, m, VERSIONS, x, index), expected(layer, x, index)
    absent = (index.reshape(-1) == 12).numpy()
    assert (out[absent] == 7).all() and relative(out[~absent], want[~absent]) <= 1e-5


@pytest.mark.parametrize("inner", [24, 35])
def test_the_gate_is_applied_on_the_way_out(inner: int) -> None:
    """Halves that begin in the middle of a block of rows too."""
    m = Matrix("gate_up", 2 * inner, 70, bias=True)
    layer = make_layer(m, VERSIONS, [0, 1, 2, 3, 4])
    index = torch.tensor([[0, 1], [2, 3], [4, 0]])
    x = activations(3, 70, torch.float32)
    h = torch.from_numpy(expected(layer, x, index))
    want = torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]
    assert relative(run(layer, m, VERSIONS, x, index, gated=True), want.numpy()) <= 1e-5


def test_geometry_takes_every_slot_once() -> None:
    from moepack.runtime.kernels.affine_triton import route

    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(0, 7, (1 + 5 * seed, 2), generator=generator) % (1 + seed % 7)
        geometry = route(index.to(DEVICE), 6, 16)
        seen = []
        for e, first, count in zip(geometry.expert, geometry.first, geometry.count, strict=True):
            slots = geometry.order[first : first + count].tolist()
            assert all(index.reshape(-1)[s] == e for s in slots)
            seen += slots
        assert sorted(seen) == torch.nonzero(index.reshape(-1) < 6).flatten().tolist()


def test_the_forward_is_the_references(bundle: Path) -> None:
    """A layer with experts in five versions, its gate fused, sentinels among its slots; then one expert promoted."""
    import moepack
    from moepack.runtime.attach import load_map
    from moepack.runtime.experts import gpu
    from moepack.runtime.experts.forward import reference_forward
    from moepack.runtime.experts.handles import LayerCall

    model = moepack.load(bundle, policy="static:w2", dtype=torch.float32, device=DEVICE)
    module = model.model.layers[1].mlp.experts
    names = tuple(("bf16", "w4", "w3", "w2", "w1")[e % 5] for e in range(16))
    experts = load_map(model.moepack.bundle, (names,) * 4, [torch.device(DEVICE)] * 4)[1]
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    index = torch.tensor([[0, 1], [2, 16], [16, 16], [3, 4], [16, 5], [1, 2]], device=DEVICE)
    gates = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert gpu._fuses(module)
    with torch.inference_mode():
        for _ in range(2):
            want = reference_forward(LayerCall(module, experts.current, x, index, gates))
            got = gpu.forward(LayerCall(module, experts.current, x, index, gates))
            assert relative(got.cpu(), want.double().cpu().numpy()) <= 1e-5
            experts.publish(1, model.model.layers[1].mlp.experts._moepack.current.handles[1])
            assert experts.current.handles[1].version.name == "w2"


def test_what_does_not_fit_is_refused() -> None:
    from moepack.runtime.kernels.affine_triton import DECODE, PREFILL, product, route

    m = Matrix("m", 20, 64)
    forms = [make_forms((m,), v)[0] for v in VERSIONS]
    geometry = route(torch.tensor([[0], [1]], device=DEVICE), 2, 16)
    handles, out = torch.zeros(2, dtype=torch.int64), torch.empty(2, 20)
    for x, tiling in ((torch.zeros(2, 63), None), (torch.zeros(2, 64).half(), None), (torch.zeros(2, 64), PREFILL)):
        with pytest.raises(ValueError, match="m:"):
            product(m, forms, [0], handles, geometry, x, out, tiling or DECODE)
