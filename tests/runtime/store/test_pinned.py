"""Pinned host memory: the chain of ways to have it, filling in the background, damage, limits, letting go."""

import contextlib
import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import READS_ONLY, REGISTERS, FakeCudart
from support import PATIENCE, damage

from moepack.pack.reader import open_bundle
from moepack.runtime.store import filling, pinning
from moepack.runtime.store.cudart import PORTABLE, READ_ONLY, CudaError, Cudart
from moepack.runtime.store.files import BackingStore
from moepack.runtime.store.page_file import PageFile
from moepack.runtime.store.pinned import HostStore, plan_pieces
from moepack.runtime.store.pinning import Mode

GIB = 1 << 30
PLACES = [("bf16", p, e) for p in range(4) for e in range(16)]
NO_MAPPINGS = {REGISTERS: 1, READS_ONLY: 0}


@pytest.fixture
def opened(bundle):
    store = BackingStore(open_bundle(bundle))
    yield store
    store.close()


def of(path):
    return BackingStore(open_bundle(path))


def size_of(store, version="bf16"):
    return sum(store.stored(version, p, e).size for p in range(4) for e in range(16))


def filled(store, cuda, limit=GIB, **options):
    host = HostStore(store, ["bf16"], Cudart(0, cuda), limit, **options)
    host.start()
    assert host.filled.wait(PATIENCE)
    return host


def check(host, store):
    """Every pinned extent is the bundle's, bit by bit; returns which are pinned."""
    pinned = set()
    for place in PLACES:
        held = host.hold(place)
        if held is not None:
            want = np.asarray(store.bundle.extent(*place, check_digest=False))
            assert np.array_equal(held.bytes.numpy(), want), place
            held.release()
            pinned.add(place)
    return pinned


def refuse(*what):
    """Fail calls: "register" and "allocate" as out of memory, "mapping" (registering read-only) as not supported."""

    def fails(name, size, flags):
        if name == "register" and flags & READ_ONLY and "mapping" in what:
            return 801
        return 2 if name in what and not (name == "register" and flags & READ_ONLY) else 0

    return fails


# --- the chain


@pytest.mark.parametrize(
    ("attributes", "refused", "mode", "calls"),
    [
        (None, (), "mapped", ["register"] * 4),
        (NO_MAPPINGS, (), "registered", ["register"] * 4),
        (None, ("mapping",), "registered", ["register", "clear"] + ["register"] * 4),
        (NO_MAPPINGS, ("register",), "allocated", ["register", "clear"] + ["allocate"] * 4),
        ({REGISTERS: 0, READS_ONLY: 0}, (), "allocated", ["allocate"] * 4),
        (None, ("mapping", "register"), "allocated", ["register", "clear"] * 2 + ["allocate"] * 4),
        (NO_MAPPINGS, ("register", "allocate"), "staged", ["register", "clear", "allocate", "clear"]),
        ({REGISTERS: 0, READS_ONLY: 0}, ("allocate",), "staged", ["allocate", "clear"]),
    ],
)
def test_each_way_falls_to_the_next(opened, attributes, refused, mode, calls):
    cuda = FakeCudart(attributes, refuse(*refused))
    host = filled(opened, cuda)
    state = host.state()
    assert cuda.names() == calls and cuda.sticky == 0
    assert state["mode"] == mode and not state["filling"] and state["damaged"] == []
    given_up = [row["mode"] for row in state["fallbacks"]]
    assert given_up == [m.value for m in Mode][: len(given_up)] and all(row["reason"] for row in state["fallbacks"])
    assert (given_up[-1] if given_up else None) == {"mapped": None, "registered": "mapped", "allocated": "registered",
                                                    "staged": "allocated"}[mode]  # fmt: skip
    whole = size_of(opened)
    want = 0 if mode == "staged" else whole
    assert (state["pinned_bytes"], state["file_bytes"], state["bytes_to_go"]) == (want, whole - want, 0)
    assert check(host, opened) == (set() if mode == "staged" else set(PLACES))
    host.close()
    assert not cuda.registered and not cuda.allocated and host.hold(PLACES[0]) is None
    freed = {"mapped": "unregister", "registered": "unregister", "allocated": "free"}
    assert mode == "staged" or cuda.names()[len(calls) :] == [freed[mode]] * 4


def test_flags_sizes_and_what_was_there_when_registering(opened):
    """Whole layers are registered, and anonymous memory only after it was filled."""
    layers = []
    for p in range(4):
        layers.append(b"".join(np.asarray(opened.bundle.extent("bf16", p, e)).tobytes() for e in range(16)))
    by_traffic = FakeCudart(NO_MAPPINGS)
    filled(opened, by_traffic).close()
    assert [(s, f) for n, s, f in by_traffic.calls if n == "register"] == [(len(x), PORTABLE) for x in layers]
    tokens = {("bf16", p): x.tokens for p, x in enumerate(opened.bundle.calibration().layers)}
    for p, seen in enumerate(by_traffic.seen):
        order = sorted(range(16), key=lambda e: (-tokens["bf16", p][e], e))
        assert seen == b"".join(np.asarray(opened.bundle.extent("bf16", p, e)).tobytes() for e in order)
    mapped = FakeCudart()
    filled(opened, mapped).close()
    assert mapped.seen == layers
    assert [(s, f) for n, s, f in mapped.calls if n == "register"] == [(len(x), PORTABLE | READ_ONLY) for x in layers]


def test_running_out_later_keeps_what_is_pinned(opened):
    count = iter(range(100))
    cuda = FakeCudart(NO_MAPPINGS, lambda name, *_: 2 if name == "allocate" or next(count) >= 2 else 0)
    host = filled(opened, cuda)
    assert host.state()["mode"] == "registered" and check(host, opened) == {x for x in PLACES if x[1] < 2}
    assert host.state()["fallbacks"][-1] == {"mode": "allocated", "reason": "cudaHostAlloc: error 2 (out of memory)"}
    host.close()
    assert not cuda.registered and cuda.sticky == 0


def test_the_real_library_has_these_symbols():
    """Signatures against torch's own CUDA runtime, whether or not there is a device."""
    try:
        calls = Cudart(0)
    except OSError as error:
        pytest.skip(f"no CUDA runtime: {error}")
    memory = pinning.anonymous(1 << 16)
    try:
        calls.register(memory.ctypes.data, len(memory), PORTABLE)
    except CudaError as error:
        assert error.code and str(error).startswith("cudaHostRegister: error ")
    else:
        calls.unregister(memory.ctypes.data)


# --- reading


def test_files_are_read_past_the_page_cache(opened, monkeypatch):
    """Each extent in requests of PageFile, which test_page_file.py tests."""
    read, real = [], PageFile.read
    monkeypatch.setattr(PageFile, "read", lambda file, part, at: read.append(len(part)) or real(file, part, at))
    host = filled(opened, FakeCudart(NO_MAPPINGS))
    assert check(host, opened) == set(PLACES) and sum(read) == size_of(opened)
    host.close()


@pytest.mark.parametrize("attributes", [None, NO_MAPPINGS, {REGISTERS: 0, READS_ONLY: 0}])
def test_damage_is_named_and_never_served(damaged, attributes):
    """One extent is damaged, one file is cut short and one has gone since they were opened: the others are pinned."""
    store = of(damaged)
    files = [damaged / "experts" / "bf16" / f"layer-00{p}.safetensors" for p in range(3)]
    for p in range(2):
        store.stored("bf16", p, 0)
    damage(damaged, "bf16", 0, [3])
    cut = store.bundle.layer_file("bf16", 1).offset(9)
    os.truncate(files[1], cut)
    files[2].unlink()
    host = filled(store, FakeCudart(attributes))
    found = host.state()["damaged"]
    pinned = check(host, store)
    assert pinned >= {x for x in PLACES if x[1] == 3 or (x[1] == 0 and x[2] != 3)}
    assert not pinned & {("bf16", 0, 3), *(("bf16", 1, e) for e in range(9, 16)), *(("bf16", 2, e) for e in range(16))}
    assert any("layer 0, expert 3, version bf16" in x for x in found)
    assert sum("layer 1, expert" in x for x in found) == 7 and any("layer-002" in x for x in found)
    assert host.state()["fallbacks"] == ([] if attributes is None else host.state()["fallbacks"])
    host.close()
    store.close()


# --- limits and order


def test_a_limit_leaves_the_least_wanted_in_files(opened):
    whole = size_of(opened)
    tokens = {("bf16", p): x.tokens for p, x in enumerate(opened.bundle.calibration().layers)}
    host = filled(opened, FakeCudart(NO_MAPPINGS), whole // 2)
    state, pinned = host.state(), check(host, opened)
    assert 0.4 * whole < state["pinned_bytes"] <= whole // 2 and state["file_bytes"] == whole - state["pinned_bytes"]
    assert state["limit_bytes"] == whole // 2
    most = [tokens["bf16", p][e] / opened.stored("bf16", p, e).size for _, p, e in pinned]
    least = [tokens["bf16", p][e] / opened.stored("bf16", p, e).size for _, p, e in set(PLACES) - pinned]
    assert sorted(most)[len(most) // 10] >= max(least), "but for the last, which may be too large for what is left"
    host.close()
    nothing = filled(opened, FakeCudart(NO_MAPPINGS), 0)
    assert nothing.state()["pinned_bytes"] == 0 and nothing.state()["file_bytes"] == whole
    nothing.close()


def test_regions_in_order():
    sizes = {("bf16", p): dict.fromkeys(range(4), 10) for p in range(2)}
    wanted = {("bf16", 0): [1.0, 4.0, 2.0, 3.0], ("bf16", 1): [9.0, 0.0, 0.0, 8.0]}
    gathered = plan_pieces(sizes, wanted, 1000, in_place=False, most=20)
    assert [(p.file[1], p.experts) for p in gathered] == [(0, (1, 3)), (1, (0, 3)), (0, (2, 0)), (1, (1, 2))]
    in_place = plan_pieces(sizes, wanted, 1000, in_place=True, most=20)
    assert [(p.file[1], p.experts) for p in in_place] == [(0, (0, 1)), (1, (0, 1)), (0, (2, 3)), (1, (2, 3))]
    few = plan_pieces(sizes, wanted, 35, in_place=False, most=20)
    assert {(p.file[1], e) for p in few for e in p.experts} == {(1, 0), (1, 3), (0, 1)}
    large = plan_pieces({("w4", 0): {0: 50, 1: 50}}, {("w4", 0): [1, 2]}, 60, in_place=False, most=20)
    assert [(p.experts, p.size) for p in large] == [((1,), 50)], "an extent above a region's size is one of its own"


# --- while filling, and after


def test_an_error_in_a_thread_is_raised_and_ends_the_others(opened):
    """Bytes that were not read must not count as good ones."""
    extents = [opened.stored(*place) for place in PLACES]
    asked = []

    def before(size):
        asked.append(size)
        if len(asked) == 3:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        filling.read_extents(extents, None, 2, before, lambda stored: None, None)
    assert len(asked) < len(PLACES)


def test_closing_ends_the_filling(opened, monkeypatch):
    """Between two extents: so many as are being read when it closes are read, and no more."""
    reached, real = threading.Event(), filling.read_extents

    def slowly(extents, rooms, threads, before, *more):
        def wait(size):
            reached.set()
            time.sleep(0.02)
            before(size)

        return real(extents, rooms, threads, wait, *more)

    monkeypatch.setattr(filling, "read_extents", slowly)
    for attributes in (None, NO_MAPPINGS, {REGISTERS: 0, READS_ONLY: 0}):
        cuda = FakeCudart(attributes)
        reached.clear()
        host = HostStore(opened, ["bf16"], Cudart(0, cuda), GIB)
        host.start()
        assert reached.wait(PATIENCE)
        host.close()
        assert host.filled.wait(0)
        assert host.state()["read_bytes"] < size_of(opened), "it had not ended by itself"
        assert not cuda.registered and not cuda.allocated
        assert not [t for t in threading.enumerate() if t.name in ("moepack-host", "moepack-fill")]
        host.close()


def test_nothing_leaks(bundle):
    def held():
        """Descriptors and mappings of files in this process; what other tests left may go at any time."""
        found = set()
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor of this listing
                found.add((entry.name, str(entry.readlink())))
        maps = Path("/proc/self/maps").read_text().splitlines()
        return found | {("map", line) for line in maps if "layer-00" in line}

    before = held()
    for attributes in (None, NO_MAPPINGS):
        store = of(bundle)
        host = filled(store, FakeCudart(attributes))
        assert held() - before
        host.close()
        store.close()
        del host, store
    gc.collect()
    assert not held() - before


def test_doctor_says_how_this_machine_pins(monkeypatch):
    import torch

    from moepack.reports import doctor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = doctor.host_memory()
    assert facts["mode"] == "files" and "ways" not in facts and facts["pinnable_bytes"] <= facts["available_bytes"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: current.append(index) or contextlib.nullcontext())
    for attributes, refused, mode in ((None, (), "mapped"), (NO_MAPPINGS, ("register",), "allocated")):
        cuda = FakeCudart(attributes, refuse(*refused))
        monkeypatch.setattr("moepack.runtime.store.cudart._torchs_library", lambda cuda=cuda: cuda)
        facts = doctor.host_memory()
        assert facts["mode"] == mode and [way["mode"] for way in facts["ways"]] == [m.value for m in Mode]
        assert ("not registered: cudaHostRegister: error 2" in facts["reason"]) == bool(refused)
        assert not cuda.registered and not cuda.allocated and not cuda.sticky
    assert set(current) == {0}, "the calling thread's own device is put back after each call"
