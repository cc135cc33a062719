"""Pages that stay where they are, on a GPU that is not there: decoded by launches, without the host."""

import contextlib
import functools
import threading
from collections import Counter

import pytest
from gpu_stand_in import kernels
from live_models import at, ids, load, logits, same, same_at_once, stop_after, wait_for
from support import PATIENCE, for_logits, load_for_logits, spy

import moepack
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.reports.plan import plan
from moepack.runtime.kernels import exponent_triton
from moepack.runtime.paging.in_place import PagesInPlace
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.policies.placements import Where
from moepack.runtime.residency import kv_reserve
from moepack.runtime.store.files import Stored

PINNED = "paged:lo=pinned,rate=0,interval=0.02"
ROOM = 200_000  # for some of the 24 experts, packed
ALL = {"prefill_tokens": 32}


@pytest.fixture(scope="module")
def want(small):
    """What resident uncompressed weights make of some tokens, by the same kernels."""
    with pytest.MonkeyPatch.context() as patch:
        kernels(patch)
        model = moepack.load(small, policy="static:bf16")
        return {n: logits(model, ids(n, n)) for n in (1, 2, 9, 32)}


@pytest.mark.parametrize("options", ["", ",resident=0.3", ",alpha=0.1"])
def test_the_same_bits_as_all_resident(small, want, gpu, options):
    """Tokens and prompts; experts in host memory, packed on the device, resident there."""
    model = load(small, PINNED + options, room=ROOM, **ALL)
    live = model.moepack.manager
    same(model, want, *want)
    held = {"": "bf16@packed", ",resident=0.3": "bf16", ",alpha=0.1": "bf16@packed"}[options]
    wait_for(lambda: at(model, held) > 0, functools.partial(same, model, want, 1))
    same(model, want, *want)
    assert 0 < at(model, "bf16@packed-pinned") < 24
    assert options != ",alpha=0.1" or at(model, "bf16@packed") <= 3
    assert model.moepack.counters()["forward_waits"] == 0
    assert live.tracker.peak <= live.tracker.budget
    assert [m.pinned for m in live.device._memories if hasattr(m, "pinned")] == [live.plan.on_host(Where.PACKED_PINNED)]


def test_a_cache_takes_their_device_memory_and_gives_it_back(small, want, gpu, monkeypatch):
    """Packed experts leave at once, since all stay in host memory, and come back from there: files are not read."""
    monkeypatch.setattr(kv_reserve, "LINGER", 1e9)  # what no cache needs is kept
    model = load(small, PINNED, room=ROOM, **ALL)
    live = model.moepack.manager
    serve = functools.partial(same, model, want, 1, 2)
    wait_for(lambda: at(model, "bf16@packed") > 3, serve)
    held, moved = at(model, "bf16@packed"), live.device.moved
    monkeypatch.setattr("moepack.runtime.store.files.Stored.read_into", lambda *of: pytest.fail("a file is read"))
    grown = live.tracker.free + 3 * live.plan.sizes[0][1]
    live.grow_kv(grown)
    wait_for(lambda: not live.transitions.kv_asked, serve)
    assert at(model, "bf16@packed") < held and live.device.moved == moved
    live.transitions.shrink_kv(grown)
    wait_for(lambda: at(model, "bf16@packed") >= held, serve)
    serve()
    assert live.device.moved > moved


def test_steps_take_turns(small, want, gpu, monkeypatch):
    """They share the slots: none begins before another has ended, and each one's stream waits for the one before."""
    model = load(small, PINNED, room=ROOM, **ALL)
    pages, said, waited = model.moepack.manager.in_place, [], []
    spy(monkeypatch, PagesInPlace, "begin", lambda *_: said.append("begin"))
    spy(monkeypatch, PagesInPlace, "end", lambda *_: said.append("end"))
    spy(monkeypatch, gpu.gpu, "wait", lambda event: waited.append(event))
    same_at_once(model, want, (1, 9, 2), threads=3, rounds=3)
    assert said == ["begin", "end"] * 9
    last = pages._reported.event
    waited.clear()
    same(model, want, 1)
    assert last in waited


def test_a_pass_that_waits_for_room_holds_up_no_other(small, want, gpu, monkeypatch):
    model = load(small, PINNED, room=ROOM, **ALL)
    caches, waits, goes = model._moepack_wrapper.caches, threading.Event(), threading.Event()
    real = caches.room

    @contextlib.contextmanager
    def room(given):
        if threading.current_thread() is other:
            waits.set()
            assert goes.wait(PATIENCE)
        with real(given) as made:
            yield made

    monkeypatch.setattr(caches, "room", room)
    other = threading.Thread(target=lambda: same(model, want, 2))
    other.start()
    assert waits.wait(PATIENCE)
    one = threading.Thread(target=lambda: (same(model, want, 1), goes.set()))
    one.start()
    one.join(PATIENCE)
    assert goes.is_set(), "a pass waits for one that waits for room"
    goes.set()
    other.join()
    one.join()


@pytest.mark.parametrize("policy", [PINNED, "hotness:hi=w4,lo=w4@pinned"])
def test_a_load_reads_each_expert_once(small, gpu, policy, monkeypatch):
    """What begins on the device comes from host memory, where it has been read."""
    read = []
    spy(monkeypatch, Stored, "read_into", lambda stored, *_: read.append(stored.place))
    model = load(small, policy, room=ROOM, **ALL)
    assert at(model, "bf16@packed") + at(model, "w4") > 3
    assert set(Counter(read).values()) <= {1, 2} and len(set(read)) == 24, (
        "read ahead of the load, and taken from there"
    )


def test_host_memory_is_not_rounded_as_the_devices(small, gpu):
    """A segment of torch's holds whole blocks, and the rest of it is counted: not so of the host's pages."""
    live = load(small, PINNED, room=ROOM, **ALL).moepack.manager
    extents = [open_bundle(small).layer_file("bf16", p) for p in range(3)]
    largest = [max(f.extent_size(e) for e in range(8)) for f in extents]
    assert [row[2] for row in live.plan.blocks] == [-(-n // 4096) * 4096 for n in largest]
    assert all(row[1] >= row[2] for row in live.plan.blocks)


def test_damage_is_told_by_the_next_pass(small, want, gpu):
    """Memory went bad after its digest was checked."""
    model = load(small, PINNED, room=0, **ALL)
    gpu.gpu.patience = 0
    extents = [h.packed.extent.numpy() for h in model.moepack.layers[2].current.handles]
    kept = [extent.copy() for extent in extents]
    for extent in extents:
        extent[600:16_000] = 0xFF
    logits(model, ids(1, 1))
    for extent, bytes_ in zip(extents, kept, strict=True):
        extent[:] = bytes_
    with pytest.raises(BundleError, match=r"layer 2, expert \d+, version bf16: .*tokens of an earlier pass are wrong"):
        logits(model, ids(1, 1))
    same(model, want, 1, 9)


@pytest.mark.parametrize("where", ["begin", "decode_chosen", "record"])
def test_an_interrupted_pass_lets_go(small, want, gpu, where, monkeypatch):
    model = load(small, PINNED, room=ROOM, **ALL)
    holder = {"begin": model.moepack.manager.in_place, "decode_chosen": exponent_triton, "record": gpu.gpu}[where]
    stop_after(monkeypatch, holder, where, 1)
    with pytest.raises(KeyboardInterrupt):
        for n in (1, 2):
            logits(model, ids(n, n))
    same(model, want, 1, 9)


def test_the_budget_holds_slots_and_what_is_packed(small, gpu, monkeypatch):
    """Every block of the device is counted; a byte less than the least is refused; the plan says what is pinned."""
    model = load(small, PINNED, room=ROOM, **ALL)
    live = model.moepack.manager
    pages = live.in_place
    assert pages._bytes.numel() <= live.plan.window and pages._places.numel() >= sum(
        x.fields.nbytes + x.tables.nbytes + x.sizes.nbytes for x in pages._of or pages._all_places()
    )
    monkeypatch.setattr("moepack.reports.plan._check_device", lambda device: True)
    made = plan(small, for_logits(policy=PINNED, device_memory=live.plan.budget, prefill_tokens=32))
    assert made.pinned_bytes == live.plan.on_host(Where.PACKED_PINNED) == live.host.reserved
    with pytest.raises(TooSmallError, match="host_memory of 1000 bytes"):
        load(small, PINNED, host_memory=1000, room=ROOM, **ALL)


def test_what_cannot_be_is_refused(small):
    with pytest.raises(InputError, match=r"paged:lo=pinned is for a GPU"):
        load_for_logits(small, policy=PINNED, device_memory=1 << 40)
