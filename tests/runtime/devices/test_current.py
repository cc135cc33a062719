"""On a GPU that is not the thread's current one: every launch and event is made on the tensors' device.

Tensors are fake, of `cuda:1`, and the current device is a number that `torch.cuda.device` sets: 0 where nobody does.
"""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moepack.pack.codec import exponent_fast
from moepack.pack.codec.exponent import HEADER
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.devices.torch_cuda import TorchGpu
from moepack.runtime.experts import gpu
from moepack.runtime.experts.handles import LayerCall
from moepack.runtime.experts.host_tier import CudaLink
from moepack.runtime.kernels import affine_triton, exponent_triton, routing_triton, switch_triton
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.policies.contract import Needs
from moepack.runtime.policies.reducers import GATES, RouterOutput
from moepack.runtime.residency.routing_statistics import RoutingStatistics
from moepack.runtime.step.context import NO_PROMPT, Step
from moepack.runtime.step.counters import Counters

CUDA1 = torch.device("cuda:1")


class Fake:
    """torch.cuda with a current device and current streams, which notes where things are done."""

    def __init__(self):
        self.now, self.stream = 0, {0: "default", 1: "default"}
        self.done = []  # what, on which device, on which stream

    @contextmanager
    def device(self, of):
        before, self.now = self.now, torch.device(of).index if not isinstance(of, int) else of
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def on(self, stream):
        before, self.stream[stream.device] = self.stream[stream.device], stream.name
        with self.device(stream.device):
            try:
                yield
            finally:
                self.stream[stream.device] = before

    def note(self, what, device=None):
        self.done.append((what, at := self.now if device is None else device, self.stream[at]))

    def launches(self, what):
        return type("Launches", (), {"__getitem__": lambda _, grid: lambda *a, **k: self.note(what)})()


@pytest.fixture
def fake(monkeypatch):
    made, streams = Fake(), iter(("copies", "decoder", "load0", "load1"))

    class Event:
        def __init__(self, **_):
            self.query = lambda: True

        def record(self, stream=None):
            made.note("event", None if stream is None else stream.device)

    def stream_of(device=None):
        at = made.now if device is None else torch.device(device).index
        return SimpleNamespace(device=at, wait_stream=lambda other: None)

    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(
        torch.cuda, "Stream",
        lambda d: SimpleNamespace(device=torch.device(d).index, name=next(streams), wait_stream=lambda other: None),
    )  # fmt: skip
    monkeypatch.setattr(affine_triton, "few", made.launches("product"))
    monkeypatch.setattr(switch_triton, "_sum", made.launches("sum"))
    for name in ("_rank", "_place"):
        monkeypatch.setattr(routing_triton, name, made.launches("sort"))
    monkeypatch.setattr(exponent_triton, "_decode", made.launches("decode"))
    with FakeTensorMode():
        yield made


def test_the_experts_products(fake):
    matrices, version = (Matrix("gate_up", 64, 32), Matrix("down", 32, 32)), Version.of("w4", 32)
    table = torch.zeros(8, dtype=torch.int64, device=CUDA1)
    layer = SimpleNamespace(
        layer=ExpertLayer(0, "experts", 8, matrices), device_table=lambda: table, served=[0],
        in_place=None, staged=None, forms={"w4": make_forms(matrices, version)},
    )  # fmt: skip
    layer.of, module = layer, SimpleNamespace(has_gate=True, act_fn=None, _apply_gate=lambda h: h[:, :32])
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        x, index = torch.zeros(3, 32, dtype=dtype, device=CUDA1), torch.zeros(3, 2, dtype=torch.int64, device=CUDA1)
        out = gpu.forward(LayerCall(module, layer, x, index, torch.ones(3, 2, device=CUDA1)))
        assert out.dtype == dtype
    assert fake.done == [(n, 1, "default") for n in ("sort", "sort", "product", "product", "sum")] * 4 and fake.now == 0


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_the_decoder_reads_its_descriptors_from_pinned_memory(fake, monkeypatch):
    with torch.utils._python_dispatch._disable_current_modes():
        coded = exponent_fast.encode(np.arange(256, dtype=np.uint16) + 16000).copy()
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: fake.note("pin") or pinned.append(self) or self)
    data = torch.zeros(len(coded), dtype=torch.uint8, device=CUDA1)
    job = exponent_triton.DecodeJob(data, coded[:HEADER], torch.zeros(256, dtype=torch.bfloat16, device=CUDA1))
    with Copies() as copies:
        exponent_triton.decode([job])
    assert fake.done == [("pin", 1, "default"), ("decode", 1, "default")]
    assert len(pinned) == len(copies.sources) == 1 and copies.sources[0] is pinned[0]


class Copies(TorchDispatchMode):
    """What is copied from the host to the device."""

    def __init__(self):
        super().__init__()
        self.sources = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and given.get("device") == CUDA1:
            assert given["non_blocking"]
            self.sources.append(args[0])
        return func(*args, **given)


def test_events_behind_copies(fake):
    """A step's counts, activations for the host, and the device's streams, in contexts and outside."""
    counters = Counters([4], (GATES,), CUDA1)
    counters.add(0, RouterOutput(torch.zeros(3, 2, dtype=torch.int64, device=CUDA1), torch.ones(3, 2, device=CUDA1)))
    counters.send()
    CudaLink().fetch(torch.zeros(3, device=CUDA1))
    assert fake.done == [("event", 1, "default")] * 2 and counters.arrived()
    one = TorchGpu(CUDA1)
    for context, stream in ((one.migrating(), "copies"), (one.decoding(), "decoder")):
        with context:
            assert fake.now == 1 and fake.stream[1] == stream
            one.record()
    one.record()
    assert fake.done[2:] == [("event", 1, s) for s in ("copies", "decoder", "default")]


def test_counts_are_cleared_on_the_stream_of_the_step_that_adds_to_them(monkeypatch):
    """Not on the worker's, after which nothing orders the step's kernels."""
    statistics, cleared = RoutingStatistics([3], 1, Needs(), torch.device("cpu")), []
    clear = Counters.clear
    monkeypatch.setattr(Counters, "clear", lambda c: cleared.append(threading.current_thread().name) or clear(c))
    step = Step(counters=statistics.counters(NO_PROMPT, None))
    step.counters.add(0, RouterOutput(torch.tensor([[1, 2]]), torch.ones(1, 2)))
    statistics.ended(step)
    worker = threading.Thread(target=statistics.deliver, args=(lambda event: None, lambda: [0]), name="worker")
    worker.start()
    worker.join()
    again = statistics.counters(NO_PROMPT, None)
    assert again is step.counters and cleared == [threading.current_thread().name]
    assert not again.counts.any() and not again.used
