"""Some experts of a layer, read without the others: the same tensors as of the whole layer, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from test_encoded import fp8_checkpoint, mxfp4_checkpoint

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.experts import ExpertWeights
from moepack.calibrate.some_experts import sources_of
from moepack.calibrate.stream import StreamedModel


def test_one_tensor_an_expert() -> None:
    sources = {
        "gate_up": [f"model.layers.1.mlp.experts.{e}.{m}.weight" for m in ("gate", "up") for e in range(4)],
        "down": [f"model.layers.1.mlp.experts.{e}.down.weight" for e in range(4)],
    }
    shapes = {key: (8, 8) for keys in sources.values() for key in keys}
    got = sources_of(range(1, 3), 4, sources, shapes)
    assert got is not None and set(got.values()) == {None}
    assert sorted(got) == sorted(
        f"model.layers.1.mlp.experts.{e}.{m}.weight" for m in ("gate", "up", "down") for e in (1, 2)
    )


def test_all_experts_in_one_tensor() -> None:
    shapes = {"l.3.gate_up": (4, 16, 8), "l.3.bias": (4, 16)}
    got = sources_of(range(2, 4), 4, {"weight": ["l.3.gate_up"], "bias": ["l.3.bias"]}, shapes)
    assert got == {"l.3.gate_up": range(2, 4), "l.3.bias": range(2, 4)}


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        (["l.3.gate_up"], (64, 8)),  # experts' rows one under another
        (["l.3.gate_up"], (4,)),
        ([], ()),
        ([f"l.3.experts.{e}.w" for e in (0, 1, 3)], (8, 8)),  # one is missing
        ([f"l.3.experts.{e}.w" for e in range(4)] + ["l.3.experts.0.v"], (8, 8)),  # of one there is more
        ([f"l.{e}.experts.{e}.w" for e in range(4)], (8, 8)),  # which of the two is the expert?
        ([f"l.3.experts.{e}.w" for e in range(3)] + ["l.3.w"], (8, 8)),
    ],
)
def test_where_it_cannot_be_told_nothing_is_said(keys: list[str], shape: tuple[int, ...]) -> None:
    assert sources_of(range(1), 4, {"p": keys}, dict.fromkeys(keys, shape)) is None


def assert_same(got: ExpertWeights, want: ExpertWeights) -> None:
    assert got.layer == want.layer and got.transposed == want.transposed
    for a, b in zip((*got.weights, *got.biases), (*want.weights, *want.biases), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def compare(checkpoint: Path, every: bool = True) -> None:
    """Read the middle experts of the last layer both ways, and count what was read."""
    stream = StreamedModel(open_checkpoint(checkpoint))
    layer = max(stream.expert_layers)
    some = range(1, 3)
    read: dict[str, Any] = {}
    original = stream._read

    def watched(parts: dict[str, range | None]) -> Any:
        read.update(parts)
        return original(parts)

    stream._read = watched  # type: ignore[method-assign]
    got = stream.experts(layer, some)
    assert all(p.is_meta for p in stream.experts_module(layer).parameters()), "nothing is left in the model"
    stream._read = original  # type: ignore[method-assign]
    _, want = stream.split(layer, stream.load(layer))
    assert want is not None
    assert_same(got, want.select(some))
    sizes = [stream.checkpoint.shape(key) for key in read]
    elements = sum(
        torch.Size(s).numel() if part is None else torch.Size((len(part), *s[1:])).numel()
        for s, part in zip(sizes, read.values(), strict=True)
    )
    whole = sum(torch.Size(stream.checkpoint.shape(key)).numel() for key in stream._sources[layer])
    assert elements < whole * len(some) / stream.expert_layers[layer].experts or not every
    stream.free(layer)
    assert stream.expert_files(layer, some) <= set(stream.checkpoint.headers)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_family(family: str, demo_model: Path, tmp_path: Path) -> None:
    compare(tiny_models.save_tiny(family, tmp_path / "checkpoint", demo_model))


@pytest.mark.parametrize("make", [fp8_checkpoint, mxfp4_checkpoint])
def test_encoded(make: Any, demo_model: Path, tmp_path: Path) -> None:
    compare(make(tmp_path, demo_model)[0])


def test_a_layout_that_nothing_is_known_of_is_read_whole(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import moepack.calibrate.stream as module

    monkeypatch.setattr(module, "sources_of", lambda *args: None)
    compare(tiny_models.save_tiny("mixtral", tmp_path / "a", demo_model), every=False)
    # and one whose first axis only looks like the experts'
    monkeypatch.setattr(
        module, "sources_of", lambda some, total, sources, shapes: {k: some for keys in sources.values() for k in keys}
    )
    compare(tiny_models.save_tiny("mixtral", tmp_path / "b", demo_model), every=False)
