"""Reading extents: digests, reading ahead while loading, letting go of the page cache."""

import itertools
import os
import threading
import time

import numpy as np
import pytest
import torch
from live_models import wait_for
from support import damage, flip

from benchmarks.hostile.small_bundle import write_small_bundle
from moepack.pack.errors import BundleError
from moepack.pack.reader import open_bundle
from moepack.runtime.store import files as store_module
from moepack.runtime.store import read_ahead as ahead_module
from moepack.runtime.store.files import DENSE, BackingStore
from moepack.runtime.store.read_ahead import ReadAhead

PLACES = [("w4", p, e) for p in range(4) for e in range(16)]


@pytest.fixture
def store(bundle):
    made = BackingStore(open_bundle(bundle))
    yield made
    made.close()


def same(store, place):
    if place[2] % 2:  # either way
        stored = store.stored(*place)
        got = torch.empty(stored.size, dtype=torch.uint8)
        stored.read_into(got.numpy())
    else:
        got = store.stored(*place).load()
    assert got.data_ptr() % 64 == 0
    assert np.array_equal(got.numpy(), store.bundle.extent(*place))


@pytest.mark.parametrize("order", ["as asked for", "backwards"])
def test_reading_ahead_gives_the_same_bytes(store, order, monkeypatch):
    monkeypatch.setattr(ahead_module, "RUN", 100_000)
    monkeypatch.setattr(ahead_module, "WAITING", 300_000)
    with store.reading_ahead(PLACES):
        for place in PLACES if order == "as asked for" else reversed(PLACES):
            same(store, place)
        same(store, PLACES[3])
        same(store, ("w2", 0, 0))
    assert not [t for t in threading.enumerate() if t.name.startswith("moepack-ahead")]


def test_threads_do_read_ahead_and_stay_in_bounds(store, monkeypatch):
    read = []
    monkeypatch.setattr(ahead_module, "RUN", 1)
    sizes = [(place, store.stored(*place).size) for place in PLACES]
    monkeypatch.setattr(ahead_module, "WAITING", 5 * sizes[0][1])

    def load(place):
        read.append(threading.current_thread().name.partition("_")[0])
        return store.stored(*place).load()

    ahead = ReadAhead(sizes, load, threads=3)
    wait_for(lambda: len(read) == 5)
    time.sleep(0.1)
    assert len(read) == 5 and set(read) == {"moepack-ahead"}, "what nobody takes is not read on and on"
    for place, _ in sizes[:2]:
        assert ahead.take(place) is not None
    wait_for(lambda: len(read) == 7)
    assert ahead.take(PLACES[-1]) is None and ahead.take(("w4", 9, 9)) is None
    ahead.close()
    assert ahead.take(sizes[2][0]) is not None, "what was read before can be taken, and nothing more is read"
    assert len(read) == 7
    monkeypatch.setattr(ahead_module, "WAITING", sizes[0][1] - 1)
    ahead = ReadAhead(sizes[:1], load, threads=1)
    assert ahead.take(sizes[0][0]) is None, "larger than what may wait: the loader reads it in place"
    ahead.close()
    assert len(read) == 7


def test_each_digest_is_checked_once(store, monkeypatch):
    real, count = store_module.hashlib.sha256, []
    for place in PLACES:
        store.stored(*place)  # headers are checked with the same function
    monkeypatch.setattr(store_module.hashlib, "sha256", lambda: count.append(1) or real())
    with store.reading_ahead(PLACES):
        for place in PLACES:
            store.stored(*place).load()
    assert len(count) == 64


def test_damage_found_ahead_is_an_error_where_it_is_asked_for(damaged):
    store = BackingStore(open_bundle(damaged))
    damage(damaged, "w4", 2, [5])
    (damaged / "experts" / "w4" / "layer-003.safetensors").unlink()
    with store.reading_ahead(PLACES):
        for place in PLACES:
            if place[1] == 3 or place[1:] == (2, 5):
                with pytest.raises(BundleError, match="layer 2, expert 5" if place[1] == 2 else "layer-003"):
                    store.stored(*place).load()
            else:
                same(store, place)
    store.close()


def test_chunks_short_reads_and_an_extent_that_is_only_checked(store, monkeypatch):
    stored, real = store.stored("bf16", 1, 1), os.preadv
    want = np.asarray(store.bundle.extent("bf16", 1, 1))
    monkeypatch.setattr(store_module, "CHUNK", 5000)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: real(fd, [parts[0][:777]], at))
    room, spans = np.zeros(stored.size, np.uint8), []
    stored.read_into(room, None, None, lambda begin, end: spans.append((begin, end)))
    assert np.array_equal(room, want)
    assert spans[0][0] == 0 and spans[-1][1] == stored.size and len(spans) >= stored.size // 777
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    small = np.zeros(5000, np.uint8)
    stored.read_into(small)
    with pytest.raises(BundleError, match="digest"):
        type(stored)(stored.file, stored.offset, stored.size, "0" * 64, "x").read_into(small)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: 0)
    with pytest.raises(BundleError, match="ends before"):
        stored.read_into(room)


def test_dense_matrices_are_read_as_experts_are(tmp_path):
    """Each by its number, also ahead; from damaged bytes nothing is given."""
    opened = open_bundle(write_small_bundle(tmp_path / "bundle"))
    store = BackingStore(opened)
    places = [(v.name, DENSE, n) for v in opened.dense_versions for n in range(len(opened.manifest.dense))]
    with store.reading_ahead(places):
        for version, _, number in places:
            stored = store.stored(version, DENSE, number)
            want = opened.dense_matrix(version, opened.manifest.dense[number].module)
            assert np.array_equal(stored.load().numpy(), want.extent) and stored.place == (version, DENSE, number)
            assert stored.where == want.where
    flip(tmp_path / "bundle" / "dense" / "w8" / "head.safetensors", -1)
    with pytest.raises(BundleError, match="lm_head, version w8: its bytes do not match"):
        store.stored("w8", DENSE, 3).load()
    store.stored("w8", DENSE, 2).load()
    store.close()
