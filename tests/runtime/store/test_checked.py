"""The record of checked digests: what it spares, what it still finds, and whose files and records count."""

import hashlib
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from support import damage, flip, load_for_logits

from moepack.pack.errors import BundleError
from moepack.pack.reader import open_bundle
from moepack.runtime.store import checked
from moepack.runtime.store import files as store_module


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The record is in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def of_dense(bundle):
    return open_bundle(bundle).manifest.files["model.safetensors"].sha256


def load(bundle, **options):
    load_for_logits(
        bundle, **{"policy": "static:w4", "device_memory": "1GB", "checked": True, **options}
    ).moepack.close()


def test_what_was_checked_is_not_digested_again(damaged, tmp_path):
    """A changed file is: the whole of it, and of others nothing. Without the option the record is not read."""
    load(damaged, checked=None)
    assert not list(tmp_path.glob("cache/moepack/checked/*"))
    load(damaged)
    (record,) = tmp_path.glob("cache/moepack/checked/*")
    assert record.stat().st_mode & 0o777 == 0o600
    known = checked._read(record)
    assert len([p for p in known if p[1] >= 0]) == 64 and (of_dense(damaged), checked.FILE, 0) in known
    before = checked._read(record)
    load(damaged)
    assert checked._read(record) == before
    damage(damaged, "w4", 2, [5])
    with pytest.raises(BundleError, match="layer 2, expert 5"):
        load(damaged)
    damage(damaged, "w4", 2, [5])
    load(damaged)
    after = checked._read(record)
    assert {p for p in after if after[p] != before[p]} == {("w4", 2, e) for e in range(16)}
    flip(damaged / "model.safetensors", -3)
    with pytest.raises(BundleError, match=r"model\.safetensors: its bytes"):
        load(damaged)


def test_a_reset_time_is_found(damaged):
    """mtime can be set back, the time of that change cannot."""
    load(damaged)
    file = damaged / "experts" / "w4" / "layer-002.safetensors"
    found = file.stat()
    damage(damaged, "w4", 2, [5])
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert file.stat().st_mtime_ns == found.st_mtime_ns
    with pytest.raises(BundleError, match="layer 2, expert 5"):
        load(damaged)


@pytest.mark.parametrize("what", ["file", "folder", "owner"])
def test_files_that_others_may_write_are_always_digested(
    what, damaged, tmp_path, caplog,
    monkeypatch,
):  # fmt: skip
    if what == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        os.chown(damaged / "model.safetensors", 54321, -1) if os.getuid() == 0 else pytest.skip("needs root")
    else:
        (damaged / "experts" / "w4" / ("" if what == "folder" else "layer-002.safetensors")).chmod(0o777)
    load(damaged)
    assert "others may write it" in caplog.text and not list(tmp_path.glob("cache/moepack/checked/*"))


def test_a_record_that_is_not_ones_own_is_ignored(damaged, tmp_path):
    load(damaged)
    (record,) = tmp_path.glob("cache/moepack/checked/*")
    good = record.read_bytes()
    rows = json.loads(good)
    infinite, short = ([[*rows[0][:2], of, [0]]] for of in ([1e999] * 5, [1, 2]))
    for bad in (b"", b"{", b"[" * 100_000, b"[[1]]", b"7", *(json.dumps(x).encode() for x in (infinite, short))):
        record.write_bytes(bad)
        assert checked._read(record) == {}
    load(damaged)
    record.write_bytes(good)
    record.chmod(0o666)
    assert checked._read(record) == {}
    record.unlink()
    record.symlink_to(shutil.copy(damaged / "config.json", tmp_path / "other"))
    assert checked._read(record) == {}
    assert open_bundle(damaged).path == damaged


def test_a_file_is_recorded_with_its_digest(damaged, edit_manifest):
    """Where another manifest comes to the same file, the file is digested again."""
    load(damaged)
    edit_manifest(damaged, lambda document: document["files"]["model.safetensors"].update(sha256="0" * 64))
    with pytest.raises(BundleError, match=r"model\.safetensors: its bytes"):
        load(damaged)


@pytest.mark.parametrize("checks_again", [False, True])
def test_an_extent_is_digested_again_once_its_file_has_changed(damaged, checks_again, monkeypatch):
    """Even by a change while it was read. Where no pass waits for copies it is digested each time."""
    digested, real = [], hashlib.sha256

    def counting():
        made = real()
        return SimpleNamespace(
            update=lambda part: (digested.append(len(part)), made.update(part)), hexdigest=made.hexdigest
        )

    store = store_module.BackingStore(open_bundle(damaged), checks_again=checks_again)
    stored = store.stored("w4", 2, 5)
    out = np.empty(stored.size, np.uint8)
    monkeypatch.setattr(store_module, "hashlib", SimpleNamespace(sha256=counting))
    for _ in range(2):
        stored.read_into(out)
    assert sum(digested) == stored.size * (1 + checks_again)
    again = store.stored("w4", 2, 6)
    again.read_into(out, after=lambda begin, end: damage(damaged, "w4", 2, [6]))
    with pytest.raises(BundleError, match="layer 2, expert 6"):
        again.read_into(out)
    store.close()
