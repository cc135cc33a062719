"""A layer on a GPU waits for nothing: shown on a device without values, where whatever asks for one fails."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.devices.handle_tables import DeviceTables
from moepack.runtime.experts.forward import experts_forward
from moepack.runtime.experts.handles import NOTHING, REACHES, LayerExperts
from moepack.runtime.policies.placements import Where
from moepack.runtime.policies.reducers import GATES
from moepack.runtime.step.context import Step, opened
from moepack.runtime.step.counters import Counters

META = torch.device("meta")
MATRICES = (Matrix("gate_up", 64, 32), Matrix("down", 32, 32))
VERSIONS = tuple(Version.of(name, 32) for name in ("bf16", "w4", "w2", "w1"))


class Launches:
    """Stands where the kernel does, and counts."""

    def __init__(self):
        self.count = 0

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.count += 1

        return launch


class Module:
    """The part of a transformers experts module that the forward calls."""

    has_gate, act_fn = True, torch.nn.SiLU()
    _moepack: LayerExperts

    def _apply_gate(self, x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


@pytest.fixture
def module():
    """A layer of eight experts on a device without values, in two of four versions."""
    made = Module()
    layer = made._moepack = LayerExperts(ExpertLayer(0, "experts", 8, MATRICES), VERSIONS, META)
    layer.of.backend = "triton"
    for e in range(8):
        version = VERSIONS[1 + e % 2]
        layer.publish(e, layer.of.over(version, torch.empty(version.resident_size(MATRICES), dtype=torch.uint8)))
    return made


def routed(tokens=6):
    index = torch.empty(tokens, 2, dtype=torch.long, device=META)
    return torch.empty(tokens, 32, dtype=torch.bfloat16, device=META), index, torch.empty(tokens, 2, device=META)


def test_a_layer_waits_for_nothing_and_launches_what_is_served(module, monkeypatch):
    """Two versions of four: two launches a matrix and a sum, for few tokens one; no value read, counts included."""
    affine_triton = pytest.importorskip("moepack.runtime.kernels.affine_triton")
    from moepack.runtime.kernels import routing_triton, switch_triton

    launches = Launches()
    for name in ("few", "many", "arrange"):
        monkeypatch.setattr(affine_triton, name, launches)
    for room, name in ((switch_triton, "_switch"), (switch_triton, "_sum"), (routing_triton, "_routing")):
        monkeypatch.setattr(room, name, launches)
    for name in ("_rank", "_place"):
        monkeypatch.setattr(routing_triton, name, launches)
    # the sort's two; 80: activations for each product; few: routing, two products, the sum
    for tokens, count in ((80, 11), (17, 7), (6, 4), (1, 4)):
        counters, launches.count = Counters([8], (GATES,), META), 0
        counters.mask = torch.empty(tokens, dtype=torch.long, device=META)
        x, index, gates = routed(tokens)
        with opened(Step(snapshots=[module._moepack.current], counters=counters)):
            out = experts_forward(module, x, index, gates)
        assert out.shape == x.shape and out.dtype == x.dtype and launches.count == count and counters.used
    assert module._moepack.current.served == [1, 2]


class Mark:
    """Ends when told to."""

    def __init__(self):
        self.ended = False

    def done(self):
        return self.ended


def test_each_running_step_has_a_table_of_its_own(module):
    """A table is written again only when the kernels of the step that read it have ended."""
    layer = module._moepack
    marks = []

    def mark():
        marks.append(Mark())
        return marks[-1]

    tables = DeviceTables([8], torch.device("cpu"), mark)
    first, second = tables.take(1, [layer.current]), tables.take(1, [layer.current])
    words = layer.current.table.view(np.int64)
    assert first.words is not second.words and (first.words[0, 0, :8].numpy() == words).all()
    before = layer.current
    layer.publish(3, layer.of.over(VERSIONS[0], torch.empty(VERSIONS[0].resident_size(MATRICES), dtype=torch.uint8)))
    assert (first.words[0, 0, :8].numpy() == words).all(), "publishing changes nothing for a step that runs"
    tables.give(first)
    third = tables.take(2, [layer.current])
    assert third is not first, "its kernels have not ended"
    assert (third.words[0, 0, :8].numpy() == layer.current.table.view(np.int64)).all()
    marks[0].ended = True
    assert tables.take(2, [layer.current]) is first and torch.equal(first.words, third.words)
    assert before.over(second.words[0]).device_table().tolist() == words.tolist()


def test_a_graph_is_refused(module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="is not captured in a CUDA graph"):
        DeviceTables([8], torch.device("cpu"), Mark).take(1, [module._moepack.current])


def test_maps_of_places_travel_with_the_table(module):
    """No pass copies them: they are the snapshot's own, and what is made of a snapshot is kept for its steps."""
    layer = module._moepack
    layer.publish(2, replace(layer.current.handles[2], where=Where.HOST))
    layer.publish(5, replace(NOTHING, where=Where.ABSENT))
    tables = DeviceTables([8], torch.device("cpu"), Mark)
    first = tables.take(1, [layer.current])
    (step,), index = first.snapshots, torch.tensor([[0, 2], [5, 7], [8, 9]])
    for here, count in zip(REACHES, (6, 7, 1), strict=True):
        moved = step.only(index, here)
        assert torch.equal(moved, layer.current.only(index, here)) and (moved < 8).sum() == {6: 2, 7: 3, 1: 1}[count]
        assert step._maps[here].untyped_storage().data_ptr() == first.words.untyped_storage().data_ptr()
    assert "served" in vars(layer.current) and step.served is layer.current.served
    tables.give(first)
    first.read.ended = True
    assert tables.take(1, [layer.current]).snapshots[0] is step, "an epoch's snapshots are made once"
