"""A layer whose experts lie on disk computes what one in memory does, to the bit, and holds few of them in memory."""

from pathlib import Path

import pytest
import tiny_models
import torch
from passes import begun

from moepack.calibrate import products, skeleton
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.experts import parameter_names
from moepack.calibrate.held import empty, is_mapped
from moepack.calibrate.stream import StreamedModel
from moepack.pack.errors import InputError
from moepack.shared.memory import peak_memory, resident_memory


def walked(path, dtype, experts_in, windows=3):
    """Run all layers: the last one's output, the experts' inputs, and the first layer's own weights."""
    model = StreamedModel(open_checkpoint(path))
    model.experts_in = experts_in
    ids = torch.randint(1, 200, (windows, 32), generator=torch.Generator().manual_seed(0))
    walk = begun(model, ids, 2, dtype)
    model.free(None)
    seen, weights = [], []
    for i in range(len(model.layers)):
        _, experts = model.split(i, model.load(i))
        if experts is not None:
            assert [is_mapped(w) for w in experts.weights] == [experts_in is not None] * 2
            weights = weights or [experts.select(range(1, 3)).matrix(1, m).clone() for m in (0, 1)]
        model.to_compute(i, dtype)
        if experts is not None:
            module = model.experts_module(i)
            names = [w for w, _ in parameter_names(module).values()]
            assert all(getattr(module, n).dtype == dtype for n in names)
            assert [is_mapped(getattr(module, n)) for n in names] == [experts_in is not None] * 2
        seen.append(walk.run_layer(i))
        model.free(i)
    return walk.hidden, seen, weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])  # biases, transposed and interleaved; one tensor an expert
def test_the_same_bits(family, dtype, demo_model, tmp_path, monkeypatch):
    path = tiny_models.save_tiny(family, tmp_path / "checkpoint", demo_model)
    hidden, seen, weights = walked(path, dtype, None)
    monkeypatch.setattr(skeleton, "AT_ONCE", 1)  # an expert at a time
    filed = walked(path, dtype, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(hidden, filed[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, filed[2], strict=True))
    for a, b in zip(seen, filed[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.gates, b.gates)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"], "the files have no names"


def test_a_layer_that_is_only_read_whole_is_refused(demo_model, tmp_path, monkeypatch):
    monkeypatch.setattr(skeleton, "AT_ONCE", 1)
    model = StreamedModel(open_checkpoint(demo_model))
    monkeypatch.setattr(model, "_read_experts", lambda layer, some: None)
    assert not any(is_mapped(tensor) for tensor in model.load(0).values())
    model.free(0)
    model.experts_in = tmp_path
    with pytest.raises(InputError, match="experts of layer 0 are not read some at a time"):
        model.load(0)


@pytest.mark.parametrize("counts", [(3, 0, 200, 1), (0, 0, 0, 0), (0, 5, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_torch_s(counts, dtype, tmp_path, monkeypatch):
    """Any experts, transposed or not; the pages of each are released."""
    released = []
    monkeypatch.setattr(products, "release", lambda tensor: released.append(1))
    g = torch.Generator().manual_seed(0)
    weight = empty((4, 24, 64), dtype, tmp_path)
    weight.copy_(torch.randn(4, 24, 64, generator=g))
    x = torch.randn(sum(counts), 64, generator=g).to(dtype)
    ends = torch.tensor(counts).cumsum(0).int()
    for x_of, matrix in ((x, weight.transpose(-2, -1)), (x[:, :24].contiguous(), weight)):
        plain = torch._grouped_mm(x_of, matrix.clone(), offs=ends)
        released.clear()
        with products.CalibrationProducts(wide=False, mapped=True):
            assert torch.equal(torch._grouped_mm(x_of, matrix, offs=ends), plain)
            assert len(released) == sum(n > 0 for n in counts)
            torch._grouped_mm(x_of, matrix.clone(), offs=ends)
        assert len(released) == sum(n > 0 for n in counts), "a tensor in memory is torch's"


def test_few_experts_are_in_memory(demo_model, tmp_path, monkeypatch):
    """Of 192 MiB, one matrix of 8 at a time; without releasing them, all."""
    path = tiny_models.save_tiny(
        "mixtral", tmp_path / "checkpoint", demo_model, num_hidden_layers=1, hidden_size=512, intermediate_size=4096,
        num_local_experts=16,
    )  # fmt: skip
    monkeypatch.setattr(skeleton, "AT_ONCE", 24 << 20)
    model = StreamedModel(open_checkpoint(path))
    model.experts_in = tmp_path
    walk = begun(model, torch.arange(1, 129).view(2, 64), 2, torch.bfloat16)
    model.load(0)
    walk.run_layer(0)  # with what torch loads and keeps for its first product
    grown = []
    for release in (products.release, lambda tensor: None):
        monkeypatch.setattr(products, "release", release)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
        before = resident_memory()
        walk.run_layer(0)
        grown.append((peak_memory() - before) >> 20)
    assert grown[0] < 48 and grown[1] > 190, grown
