"""Some experts of a layer, read without the others: the same tensors as of the whole layer, for every family."""

import pytest
import tiny_models
from expert_reading import compare

from moepack.calibrate.skeleton import sources_of


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
def test_where_it_cannot_be_told_nothing_is_said(keys, shape):
    assert sources_of(range(1), 4, {"p": keys}, dict.fromkeys(keys, shape)) is None


def test_a_single_expert():
    keys = ["model.layers.0.mlp.experts.0.up.weight", "model.layers.0.mlp.experts.0.gate.weight"]
    assert sources_of(range(1), 1, {"p": keys}, dict.fromkeys(keys, (4, 8))) == dict.fromkeys(keys)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_family(family, demo_model, tmp_path):
    compare(tiny_models.save_tiny(family, tmp_path / "checkpoint", demo_model))


def test_a_layout_that_nothing_is_known_of_is_read_whole(demo_model, tmp_path, monkeypatch):
    import moepack.calibrate.skeleton as module

    monkeypatch.setattr(module, "sources_of", lambda *args: None)
    compare(tiny_models.save_tiny("mixtral", tmp_path / "a", demo_model), every=False)
    # and one whose first axis only looks like the experts'
    monkeypatch.setattr(
        module, "sources_of", lambda some, total, sources, shapes: {k: some for keys in sources.values() for k in keys}
    )
    compare(tiny_models.save_tiny("mixtral", tmp_path / "b", demo_model), every=False)
