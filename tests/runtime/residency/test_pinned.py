"""Experts whose base is pinned host memory: kernels read them there, busy ones are copied, and no pass waits."""

import contextlib
import functools
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from fake_cuda import REGISTERS
from live_models import at, ids, load, logits, same, wait_for

import moepack
from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import MEMORY_PAGE
from moepack.runtime import attach
from moepack.runtime.devices.cuda_memory import ReadMemory
from moepack.runtime.experts import backends
from moepack.runtime.experts import gpu as gpu_module
from moepack.runtime.planning import plan as plan_module
from moepack.runtime.planning.fixed import page_entries
from moepack.runtime.planning.plan import make_plan, pinned_bytes
from moepack.runtime.policies.placements import Where
from moepack.runtime.policies.registry import parse_policy
from moepack.runtime.residency.manager import ResidencyManager
from moepack.runtime.store import files
from moepack.runtime.store.cudart import MAPPED, PORTABLE, Cudart
from moepack.runtime.store.files import Stored
from moepack.runtime.store.page_file import READERS

HOT = "hotness:hi=w4,lo=w4@pinned,interval=0.02,rate=0,prior=none,margin=0,slack=0"
ROOM = 40_000  # for some of the 24 experts at w4
ALL = {"prefill_tokens": 32}


@pytest.fixture
def want(small):
    """What w4 in device memory makes."""
    model = moepack.load(small, policy="static:w4")
    return {n: logits(model, ids(n, n)) for n in (1, 2, 9)}


def test_wherever_they_are_the_bits_are_the_same(small, want, monkeypatch):
    """Experts come and go beside passes, from host memory: the files are not read again."""
    model = load(small, HOT, room=ROOM, **ALL)
    live, read = model.moepack.manager, []
    monkeypatch.setattr(files.Stored, "read_into", lambda *of: read.append(of))
    seen = set()

    def serve():
        same(model, want, *want)
        seen.add(tuple(map(tuple, model.moepack.versions)))

    serve()
    wait_for(lambda: live.residency.counts.promotions >= 3 and len(seen) > 1, serve)
    assert 0 < at(model, "w4") < 24 and at(model, "w4") + at(model, "w4@pinned") == 24
    assert model.moepack.counters()["forward_waits"] == 0 and not read
    assert live.tracker.peak <= live.tracker.budget and live.host.reserved == 24 * live.plan.blocks[0][-1]


def test_on_a_gpu(small, gpu, monkeypatch):
    """What kernels read and copies come from is pinned, once; the store for copies does not pin it again.

    Where registering fails in the middle of loading, experts are in memory of both kinds, and handles know where.
    """
    monkeypatch.setattr("moepack.runtime.devices.cuda_memory.PIECE", 1)
    first = load(small, "static:w4")
    want = {n: logits(first, ids(n, n)) for n in (1, 9)}
    cuda, registered = gpu.cudart, 3
    cuda.fails = lambda name, size, flags: 2 * (name == "register" and len(cuda.registered) == registered)
    model = load(small, HOT, room=ROOM, **ALL)
    live = model.moepack.manager
    size, ways = live.plan.blocks[0][-1], live.device.host()["read_there"]
    assert Counter(ways) == Counter(registered=registered * size, allocated=(24 - registered) * size)
    assert sum(cuda.registered.values()) == ways["registered"] and len(cuda.allocated) == 24 - registered

    serve = functools.partial(same, model, want, *want)
    serve()
    wait_for(lambda: live.residency.counts.promotions >= 3, serve)
    serve()
    assert 0 < at(model, "w4") < 24 and model.moepack.counters()["forward_waits"] == 0
    assert live.device.host()["pinned_bytes"] == 0


def test_a_system_that_does_not_pin(small, gpu, monkeypatch):
    """Kernels must not read other memory, so nothing is served; what was pinned before the refusal is let go."""
    monkeypatch.setattr("moepack.runtime.devices.cuda_memory.PIECE", 1)
    cuda = gpu.cudart
    cuda.fails = lambda name, size, flags: 2 if len(cuda.registered) == 3 or name == "allocate" else 0
    with pytest.raises(InputError, match=r"experts in pinned memory need \d+ bytes of it: .*out of memory"):
        load(small, HOT, 1 << 40, **ALL)
    cuda.fails = lambda *of: 0
    assert not cuda.registered and not cuda.sticky
    monkeypatch.setattr(backends, "backend", lambda device: "reference")
    with pytest.raises(InputError, match=r"Triton read pinned memory: it is not installed"):
        load(small, HOT, 1 << 40, **ALL)
    with pytest.raises(InputError, match=r"to decode BF16 on a GPU: it is not installed"):
        load(small, "hotness:hi=bf16,lo=w2", 1 << 40, **ALL)


BLOCK, BLOCKS = 4096, 8


def filled(gpu):
    """Memory whose blocks are written in order, and what it then has."""
    memory = ReadMemory(BLOCK, BLOCKS, Cudart(0, gpu.cudart))
    for n in range(BLOCKS):
        memory.at(n * BLOCK, BLOCK).fill_(n + 1)
        memory.filled(n * BLOCK, BLOCK)
    return memory, [bytes(memory.at(n * BLOCK, BLOCK).numpy()) for n in range(BLOCKS)]


def test_pieces_are_registered_once_they_are_filled(gpu, monkeypatch):
    """Of whole blocks, for a copy from two registrations fails; of pages with contents, which are else zeroed twice."""
    monkeypatch.setattr("moepack.runtime.devices.cuda_memory.PIECE", 3 * BLOCK)
    memory, contents = filled(gpu)
    assert contents == [bytes([n + 1]) * BLOCK for n in range(BLOCKS)]
    assert gpu.cudart.seen == [bytes(MEMORY_PAGE), *(b"".join(contents[n : n + 3]) for n in (0, 3, 6))]
    assert {flags for name, _, flags in gpu.cudart.calls if name == "register"} == {PORTABLE | MAPPED}
    assert memory.pinned == BLOCK * BLOCKS and memory.ways() == {"registered": BLOCK * BLOCKS}
    memory.close()
    memory.close()
    assert not gpu.cudart.registered and memory.pinned == 0


@pytest.mark.parametrize("where", ["no registering", "refused", "refused later", "another address"])
def test_memory_that_cuda_allocates_takes_the_place_of_registered(gpu, where, monkeypatch, caplog):
    """For WSL, whose device has other addresses for registered memory: loading was refused, as where it fails."""
    monkeypatch.setattr("moepack.runtime.devices.cuda_memory.PIECE", 3 * BLOCK)
    cuda, later = gpu.cudart, where == "refused later"
    refused = {"refused": lambda: True, "refused later": lambda: len(cuda.registered) == 1}.get(where, lambda: False)
    cuda.fails = lambda name, size, flags: 2 * (name == "register" and refused())
    cuda.attributes[REGISTERS] = where != "no registering"
    cuda.elsewhere = 4096 * (where == "another address")
    with caplog.at_level("INFO", "moepack.runtime"):
        memory, contents = filled(gpu)
    said = {"no registering": "registers no host memory", "another address": "another address"}
    assert said.get(where, "cudaHostRegister: error 2") in caplog.text and len(caplog.records) == 1
    assert contents == [bytes([n + 1]) * BLOCK for n in range(BLOCKS)] and not cuda.sticky
    assert all(cuda.is_pinned(memory.at(n * BLOCK, BLOCK).data_ptr(), BLOCK) for n in range(BLOCKS))
    first = {"registered": 3 * BLOCK} if later else {}
    assert memory.ways() == {**first, "allocated": BLOCK * BLOCKS - sum(first.values())} and cuda.registered.keys() <= {
        memory.at(0, BLOCK).data_ptr()
    }
    memory.close()
    assert not cuda.registered and not cuda.allocated


def test_the_base_is_read_in_place_by_several_threads(small, gpu, monkeypatch):
    """For 61 GB that one thread read and digested, and copied once more: each byte is read once, where it stays."""
    inside, read = threading.Barrier(READERS), []
    real, ahead = Stored.read_into, []

    def read_into(stored, out, *more):
        read.append(stored)
        if len(read) <= READERS:
            inside.wait(20)
        real(stored, out, *more)
        owner = [m for m in live.device._memories for n in range(24) if np.shares_memory(out, m.at(n * size, size))]
        assert len(owner) == 1, "it was read elsewhere"

    class Manager(ResidencyManager):
        def _load(self, wanted):
            nonlocal live, size
            live, size = self, self.plan.blocks[0][-1]
            super()._load(wanted)

    live, size = None, 0  # type: Any, int
    monkeypatch.setattr(attach, "ResidencyManager", Manager)
    monkeypatch.setattr(Stored, "read_into", read_into)
    monkeypatch.setattr(Stored, "load", lambda stored: ahead.append(stored))
    model = load(small, HOT.replace("rate=0", "rate=1"), room=0, **ALL)
    assert at(model, "w4@pinned") == 24 and not ahead
    assert {s.place for s in read} == {("w4", p, e) for p in range(3) for e in range(8)} and len(read) == 24


def test_it_stays_pinned_while_kernels_read_it(small, gpu):
    """A model that is closed inside a step, or while kernels go on, unpins after them."""
    model = load(small, HOT, room=0, **ALL)
    live = model.moepack.manager
    with live.step():
        closing = threading.Thread(target=model.moepack.close)
        closing.start()
        closing.join()
        logits(model, ids(1, 4))
        assert sum(gpu.cudart.registered.values()) == live.plan.on_host(Where.PINNED)
    assert not gpu.cudart.registered
    model = load(small, HOT, room=0, **ALL)
    gpu.gpu.patience = 1 << 30  # until it is waited for
    logits(model, ids(1, 4))
    assert gpu.gpu.reading
    model.moepack.close()
    assert not gpu.cudart.registered and not gpu.gpu.reading and not gpu.wrong()


def test_page_entries_are_in_the_budget(small):
    """For what a GPU takes to find 61 GB of pinned memory, 8 bytes for 4 KiB: it was in no budget."""
    sizes = {0: 0, 1: 4096, 512 * 4096: 4096, 512 * 4096 + 1: 8192, 61 * 10**9: 119_144_448}
    assert {size: page_entries(size) for size in sizes} == sizes
    bundle, options = open_bundle(small), parse_policy(HOT).options
    given = {"outside": 0, "budget": 1 << 40}
    on_cpu = make_plan(bundle, options, **given)
    plan = make_plan(bundle, options, **given, on_gpu=True)
    assert plan.copied == [] and on_cpu.entries == 0
    assert plan.entries == page_entries(24 * plan.blocks[0][-1]) == plan.fixed - on_cpu.fixed - plan.stage
    both = make_plan(bundle, parse_policy(HOT.replace("hi=w4", "hi=bf16")).options, **given, on_gpu=True)
    assert both.copied == ["bf16"]
    extents = sum(bundle.layer_file("bf16", p).extent_size(e) for p in range(3) for e in range(8))
    assert pinned_bytes(bundle, both, None) == 24 * both.blocks[0][-1] + extents
    assert pinned_bytes(bundle, both, 5000) == 5000


def test_a_prompt_brings_each_expert_once(small, gpu, monkeypatch):
    """For weights that a prompt of 2,048 tokens read 4.5 times over the bus: once for each block of their slots.

    The stage has fewer rows than the layer has experts.
    """
    rows, tokens, given = 3, ids(7, 56), {**ALL, "prefill_tokens": 64}  # 14 slots an expert, in blocks of 8
    with monkeypatch.context() as direct:
        direct.setattr(gpu_module, "_tables", lambda experts, handles, counts: contextlib.nullcontext((handles,)))
        model = load(small, HOT, room=0, **given)
        want, size = logits(model, tokens), model.moepack.manager.plan.largest_pinned
        several = gpu.read_there
        model.moepack.close()
    monkeypatch.setattr(plan_module, "STAGE", rows * size)
    model = load(small, HOT, room=0, **given)
    held, counts = model.moepack.manager.plan, model.moepack.routed
    counts()  # begins to count
    assert held.stage == rows * size == model.moepack.fixed.staging - held.staging
    gpu.read_there = 0
    assert torch.equal(logits(model, tokens), want) and gpu.read_there == 0
    used = [h for row, x in zip(counts(), model.moepack.layers, strict=True)
            for n, h in zip(row, x.current.handles, strict=True) if n]  # fmt: skip
    assert several > 1.5 * sum(m.weights for h in used for m in model.moepack.layers[0].of.layer.matrices)
    assert gpu.brought == sum(h.extent.numel() for h in used)
    brought = gpu.brought
    logits(model, ids(1, 1))
    assert gpu.brought == brought and gpu.read_there > 0, "few tokens read theirs in place"
