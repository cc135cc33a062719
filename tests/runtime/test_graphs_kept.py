"""Which decode steps become graphs, when a failed capture is tried again, and which graphs make room for others."""

import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from moepack.runtime import decode_graph
from moepack.runtime.decode_graph import AGAIN, RARELY, DecodeGraphs
from moepack.runtime.devices import graphs
from moepack.runtime.step.context import Step

MIB = 1 << 20


class Graph:
    def __init__(self, replay):
        self.replay = replay


class Device:
    """Memory of a GPU: torch's pool grows to the largest pass captured, and goes with its graphs."""

    def __init__(self):
        self.pool = self.beside = self.executable = 0
        self.needs = {}  # bytes of the pool, by a pass's sequences
        self.tries = Counter()
        self.replays = Counter()
        self.alive = weakref.WeakSet()
        self.sequences = 0  # of the pass
        self.fails = None
        self.fails_first = False  # in the first replay instead of the capture

    def capture(self, run, device, beside):
        run()
        size = self.sequences
        self.tries[size] += 1
        if self.fails is not None and not self.fails_first:
            raise self.fails
        self.pool = max(self.pool, self.needs.get(size, 0))
        self.alive.add(made := Graph(lambda: self.replay(size)))
        return made

    def reserved(self, device, emptied=False):
        self.pool *= bool(self.alive) or not emptied
        return self.pool

    def replay(self, size):
        if self.fails is not None and self.fails_first:
            raise self.fails
        self.replays[size] += 1
        self.beside += self.executable * (self.replays[size] == 1)


class Cache:
    def __init__(self, layers):
        self.layers = layers


class Model:
    """A model whose passes differ in their number of sequences alone."""

    def __init__(self, monkeypatch, bounded=False, memory=graphs.MEMORY):
        self.gpu, self.bounded, self.eager = Device(), bounded, Counter[int]()
        monkeypatch.setattr(graphs, "capture", self.gpu.capture)
        monkeypatch.setattr(graphs, "reserved", self.gpu.reserved)
        monkeypatch.setattr(graphs, "outside", lambda device: self.gpu.beside)
        monkeypatch.setattr(DecodeGraphs, "_may", lambda *given: True)
        self.graphs = DecodeGraphs([SimpleNamespace(of=SimpleNamespace(device=torch.device("cpu")))], memory)
        layer = SimpleNamespace(keys=torch.zeros(1), values=torch.zeros(1), cumulative_length=torch.zeros(1))
        self.cache = Cache([layer])

    def run(self, sequences, times=1):
        ids = torch.zeros(sequences, 1, dtype=torch.long)
        given = {"input_ids": ids, "cache": self.cache}
        self.gpu.sequences = sequences
        for _ in range(times):
            with torch.no_grad():
                out = self.graphs.run(
                    lambda input_ids, cache: {"logits": input_ids.float()}, (), given, Step(), given, self.bounded
                )
            self.eager[sequences] += out is None
            assert out is None or out["logits"].shape == (sequences, 1)

    def has(self):
        """The passes with a graph, the least recently used first."""
        return [int(made.given[0].shape[0]) for made in self.graphs._made.values()]


@pytest.fixture
def model(monkeypatch):
    return Model(monkeypatch)


@pytest.mark.parametrize("first_replay", [False, True])
def test_a_failed_capture_is_tried_again(model, first_replay, caplog):
    """For one lack of memory, in the capture or when the driver first needs the graph: launches one by one for ever."""
    model.gpu.fails, model.gpu.fails_first = torch.OutOfMemoryError("out of memory\nmore"), first_replay
    model.run(1, 3)
    assert (model.gpu.tries[1], model.graphs.failures) == (1, 1)
    model.run(1, AGAIN)
    assert model.gpu.tries[1] == 1
    model.run(1)
    assert model.gpu.tries[1] == 2, "after AGAIN passes"
    model.run(1, 2 * AGAIN + 1)
    assert model.gpu.tries[1] == 3 and model.gpu.tries.total() == model.graphs.failures, "then after twice as many"
    assert [x.getMessage().rsplit(": ", 1)[1] for x in caplog.records] == ["out of memory"] * 3
    model.gpu.fails = None
    model.run(1, 4 * AGAIN + 2)
    assert model.has() == [1] and model.gpu.replays[1] == 2
    assert model.eager[1] == 3 + (1 + 2 + 4) * AGAIN + 2 and model.graphs.failures == 3


@pytest.mark.parametrize("name", ["conv_states", "tokens"])
def test_a_cache_that_moves_or_counts_is_waited_for(model, name):
    """A layer's states that each pass puts elsewhere, and numbers that the host counts."""
    (layer,) = model.cache.layers
    for number in range(5):
        setattr(layer, name, {0: torch.zeros(1)} if name == "conv_states" else number)
        model.run(1)
    assert not model.gpu.tries
    model.run(1, 3)
    assert model.has() == [1]


def test_no_failure_is_for_ever(model):
    """For what fails each time, a family's code for example: tries become rare, and are bounded on both sides."""
    model.gpu.fails = RuntimeError("operation not permitted when stream is capturing")
    model.run(2, 3)
    model.graphs._waiting[next(iter(model.graphs._waiting))].failures = 40
    model.run(2, AGAIN + 1)
    assert model.gpu.tries[2] == 2
    model.run(2, RARELY)
    assert model.gpu.tries[2] == 2
    model.run(2)
    assert model.gpu.tries[2] == 3


def test_a_lack_of_memory_takes_an_idle_graph(model):
    """For graphs of passes that come no more, which held what others lacked; one in use stays."""
    model.run(1, 3)
    model.run(2, 3)
    model.gpu.fails = torch.OutOfMemoryError("out of memory")
    for _ in range(3):
        model.run(3)
        model.run(2)
    assert model.gpu.tries[3] == 1 and model.has() == [2]
    for _ in range(AGAIN + 1):
        model.run(3)
        model.run(2)
    assert model.gpu.tries[3] == 2 and model.has() == [2]


def test_passes_in_turn_do_not_evict_each_other(model, monkeypatch):
    """For one more kind of pass than graphs: each was captured anew before it came again. One that stops makes room."""
    monkeypatch.setattr(decode_graph, "KEPT", 3)
    for _ in range(40):
        for size in (1, 2, 3, 4):
            model.run(size)
    assert model.gpu.tries == {1: 1, 2: 1, 3: 1} and model.eager[4] == 40
    for _ in range(2 * decode_graph.WARM + 2):
        for size in (2, 3, 4):
            model.run(size)
    assert sorted(model.has()) == [2, 3, 4] and model.gpu.tries[4] == 1


def test_memory_that_graphs_share_is_counted_until_it_goes(monkeypatch):
    """For a budget that counted a graph's own growth of a pool, and forgot it when this graph went.

    A pool goes with its last graph. So a pass for which there is no room waits until it may be alone.
    """
    model = Model(monkeypatch, bounded=True)
    model.gpu.needs = {1: graphs.MEMORY - MIB, 2: graphs.MEMORY, 3: graphs.MEMORY + 1}
    model.run(1, 3)
    model.run(2, 3)
    assert model.has() == [1, 2], "the pool has just enough"
    model.run(3, 3)
    assert model.has() == [] and model.eager[3] == 2, "its first output is right all the same"
    model.run(2, 3)
    for _ in range(AGAIN + 4):
        model.run(3)
        model.run(2)
    assert model.has() == [2] and model.gpu.tries[3] == 1, "another one is used meanwhile"
    model.run(3, 2 * AGAIN)
    assert model.has() == [] and model.gpu.tries[3] == 2
    model.run(3, 2 * RARELY)
    assert model.gpu.tries[3] == 2, "not even alone"


def test_a_model_may_hold_back_more(monkeypatch):
    """For a step that unpacks a map, whose graph was never kept."""
    model = Model(monkeypatch, bounded=True, memory=graphs.MEMORY + 32 * MIB)
    model.gpu.needs = {1: graphs.MEMORY + 32 * MIB, 2: graphs.MEMORY + 33 * MIB}
    model.run(1, 3)
    assert model.has() == [1]
    model.run(2, 3)
    assert model.has() == []


def test_a_graph_goes_with_its_cache(model):
    """For graphs of caches that are gone: each would keep the memory of its cache."""
    model.run(1, 3)
    model.run(2, 3)
    assert model.has() == [1, 2]
    model.cache = None
    gc.collect()
    assert model.has() == []
