"""How far a layer's error reaches the logits: the pass against a run by hand, the table, and the allocation by it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import RTN, build_from
from transformers import AutoModelForCausalLM

from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.pack.safetensors_file import read_header
from moepack.pack.tables import TABLES, read_tables
from moepack.pipeline.allocate import bundle_costs, expected_losses, named
from moepack.pipeline.artifacts import PROBE
from moepack.runtime.allocation.knapsack import greedy

RECIPE = RTN + "versions: [bf16, w4, w2, w1]\nallocation: {average_bits: 3.2, weight: logits}\n"
BITS = (3.2, 3.0, 3.4, 3.6, 4.0)


@pytest.fixture(scope="module")
def weighed(short_model, text, tmp_path_factory):
    """A bundle whose allocation weighs losses by the logits, and its work directory."""
    folder = tmp_path_factory.mktemp("weighed")
    build_from(RECIPE, short_model, folder / "bundle", [text], work=folder / "work")
    return open_bundle(folder / "bundle"), folder / "work"


def by_hand(model, bundle, version, layer, ids):
    """The divergence of a plain transformers model with one layer's experts replaced."""
    experts = model.model.layers[layer].mlp.experts
    own = {name: parameter.clone() for name, parameter in experts.named_parameters()}
    with torch.inference_mode():
        want = torch.log_softmax(model(ids).logits, -1)
        for e in range(experts.num_experts):
            values = bundle.expert(version, layer, e).torch()
            experts.gate_up_proj[e], experts.down_proj[e] = values["gate_up"], values["down"]
        got = torch.log_softmax(model(ids).logits, -1)
        experts.load_state_dict(own)
    return float((want.exp() * (want - got)).sum(-1).mean())


def test_the_table_is_what_a_run_by_hand_says(weighed, short_model):
    bundle, work = weighed
    ids = load_file(work / "calibrate" / "rest" / PROBE)["ids"]
    assert ids.shape == (4, 64)
    model = AutoModelForCausalLM.from_pretrained(short_model, dtype=torch.float32).requires_grad_(False)
    for layer in bundle.calibration().layers:
        assert layer.logits is not None and layer.logits[0] == 0
        for column, name in ((1, "w4"), (2, "w2"), (3, "w1")):
            want = by_hand(model, bundle, name, layer.index, ids)
            assert float(layer.logits[column]) == pytest.approx(want, rel=1e-3, abs=1e-7)
        assert layer.logits[3] > layer.logits[2] > 4 * layer.logits[1] > 0


def test_the_allocation_is_by_losses_as_far_as_they_reach(weighed):
    """Their sum is that of the losses by gates; a layer's share of it is its share of the divergence."""
    bundle, _ = weighed
    costs, tables = bundle_costs(bundle), bundle.calibration()
    moved = np.array([layer.logits for layer in tables.layers], np.float64)
    gates, logits = (
        np.array([np.sum(expected_losses(c, w), axis=0) for c in costs]) for w in ("gates", "logits")
    )  # [layers, versions]
    assert logits.sum() == pytest.approx(gates.sum())
    assert logits / logits.sum() == pytest.approx(moved / moved.sum())
    sizes = [row for c in costs for row in c.sizes]
    rows = {w: [r for c in costs for r in expected_losses(c, w)] for w in ("gates", "logits")}
    maps = {(bits, w): greedy(sizes, rows[w], bits / 8 * bundle.expert_weights) for bits in BITS for w in rows}
    assert sum(maps[bits, "gates"] != maps[bits, "logits"] for bits in BITS) >= 2
    chosen = bundle.manifest.allocation
    assert chosen is not None and chosen.versions == named(maps[BITS[0], "logits"], bundle.versions, costs)
    assert chosen.name == "greedy at 3.2 bits, losses weighted by logits"


def test_a_table_in_some_layers_alone_is_refused(weighed, tmp_path):
    bundle, _ = weighed
    tensors, columns = load_file(bundle.path / TABLES), read_header(bundle.path / TABLES).metadata
    last = f"layers.{bundle.layers[-1].index}.logits"
    for change, said in ((None, f"has no tensor {last}"), (torch.zeros(2), f"{last} is F32"), (-1.0, "below 0")):
        kept = {k: v.clone() for k, v in tensors.items() if k != last or change is not None}
        if isinstance(change, torch.Tensor):
            kept[last] = change
        elif change is not None:
            kept[last][1] = change
        save_file(kept, tmp_path / TABLES, dict(columns))
        with pytest.raises(BundleError, match=said):
            read_tables(tmp_path / TABLES, bundle.layers)


def test_what_cannot_be_weighed_is_refused(weighed, short_model, text):
    _, work = weighed
    with pytest.raises(InputError, match="logits takes a pass that memory does not count"):
        build_from(RECIPE, short_model, work.parent / "b", [text], memory=1 << 40)
    assert not (work.parent / "b").exists()
