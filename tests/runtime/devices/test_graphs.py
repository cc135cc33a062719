"""Captures of CUDA graphs: on which stream, in which order, and what a failed one leaves. Stand-ins play torch.cuda."""

import contextlib
import threading

import pytest
import torch

from moepack.runtime.devices import graphs

GPUS = [torch.device("cuda", i) for i in range(2)]
NONE = "the default stream"


class Stream:
    def __init__(self, device):
        self.device = device


class Cuda(threading.local):
    """torch.cuda: a thread's device and stream, and what all threads did."""

    def __init__(self, did):
        self.did, self.device, self.stream = did, GPUS[0], NONE

    def _set(self, name):
        @contextlib.contextmanager
        def of(value):
            before = getattr(self, name)
            setattr(self, name, value)
            try:
                yield
            finally:
                setattr(self, name, before)

        return of


class Graph:
    """Begins to capture on the thread's stream. `fails` says which call does not work."""

    cuda: Cuda
    fails = ""

    def pool(self):
        return "pool"

    def capture_begin(self, pool, capture_error_mode):
        self.cuda.did.append(("begin", self.cuda.device, self.cuda.stream, pool))
        if self.fails == "begin":
            raise RuntimeError("capture cannot begin")

    def capture_end(self):
        self.cuda.did.append("end")
        if self.fails:
            raise RuntimeError("capture was invalidated")


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda([])
    monkeypatch.setattr(graphs, "_streams", {})
    monkeypatch.setattr(Graph, "cuda", made, raising=False)
    for name, of in {
        "Stream": Stream, "device": made._set("device"), "stream": made._set("stream"), "CUDAGraph": Graph,
        "synchronize": lambda: made.did.append(("wait", made.device)), "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, of)
    return made


def test_each_device_has_a_stream_of_its_own_for_captures(cuda):
    """For one stream a process: a second GPU's graph held nothing, and its replays gave the first logits for ever."""
    first = graphs.capture(lambda: cuda.did.append(("on", cuda.stream)), GPUS[0])
    for device in (GPUS[1], GPUS[0]):
        graphs.capture(lambda: cuda.did.append(("on", cuda.stream)), device, first)
    begun = [x for x in cuda.did if x[0] == "begin"]
    assert [(x[1], x[2].device) for x in begun] == [(d, d) for d in (GPUS[0], GPUS[1], GPUS[0])]
    assert begun[0][2] is begun[2][2] and [x[3] for x in begun] == [None, "pool", "pool"]
    assert [x[1] for x in cuda.did if x[0] == "on"] == [x[2] for x in begun], "work went to another stream"
    assert [x[1] for x in cuda.did if x[0] == "wait"] == [GPUS[0], GPUS[1], GPUS[0]]


def fails_inside():
    raise ValueError("the cause")


@pytest.mark.parametrize(("fails", "run", "said"), [("begin", lambda: None, "begin"), ("run", fails_inside, "cause")])
def test_a_failed_capture_leaves_the_threads_stream(cuda, monkeypatch, fails, run, said):
    """For a capture that cannot begin: the thread stayed on a capturing stream. The first error is the one raised."""
    monkeypatch.setattr(Graph, "fails", fails)
    with pytest.raises(Exception, match=said):
        graphs.capture(run, GPUS[1])
    assert (cuda.device, cuda.stream) == (GPUS[0], NONE) and cuda.did[-1] == "end"
    monkeypatch.setattr(Graph, "fails", "")
    graphs.capture(lambda: None, GPUS[1])


def test_captures_of_a_device_take_turns(cuda):
    """For two models that captured on one stream at once: their locks were their own."""
    inside, go = threading.Event(), threading.Event()

    def first():
        inside.set()
        assert go.wait(20)

    def capturing(device):
        thread = threading.Thread(target=graphs.capture, args=(lambda: cuda.did.append("other"), device))
        thread.start()
        return thread

    mine = threading.Thread(target=graphs.capture, args=(first, GPUS[0]))
    mine.start()
    assert inside.wait(20)
    capturing(GPUS[1]).join()  # another device's does not wait
    assert cuda.did.count("other") == 1
    waits = capturing(GPUS[0])
    assert not graphs.alone(GPUS[0]).acquire(blocking=False)
    go.set()
    for thread in (mine, waits):
        thread.join()
    rest = [x if isinstance(x, str) else x[0] for x in cuda.did]
    assert rest == ["wait", "begin", "wait", "begin", "other", "end", "end", "wait", "begin", "other", "end"]
