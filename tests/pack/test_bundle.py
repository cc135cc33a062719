"""Writing and reading bundles: whole or not there, and every rule of the format with a test that breaks it."""

import hashlib
import json
import os
import shutil
import struct

import numpy as np
import pytest
from safetensors import safe_open

from moepack.pack.errors import BundleError, TargetError
from moepack.pack.layer_file import LayerFile, LayerFileWriter
from moepack.pack.manifest import FileEntry, Manifest
from moepack.pack.manifest.parser import parse_manifest
from moepack.pack.reader import open_bundle
from moepack.pack.safetensors_file import merge, read_header
from moepack.pack.spec import PAGE, ExpertLayer, Matrix, Version
from moepack.pack.writer import BundleWriter, check_target

LAYER = ExpertLayer(3, "model.layers.3.mlp.experts", 3, (Matrix("gate_up", 8, 64), Matrix("down", 64, 4)))


def kinds(error):
    return {p.kind for p in error.value.problems}


# --- layer files


def write_layer(path, sizes=(PAGE, 2 * PAGE, PAGE)):
    with LayerFileWriter(path, "bf16", LAYER) as writer:
        for i, size in enumerate(sizes):
            writer.add(np.full(size, i + 1, np.uint8), size - 7)
    return writer


def test_layer_file_is_plain_safetensors_and_page_aligned(tmp_path):
    entry = write_layer(tmp_path / "x.safetensors").entry
    assert entry is not None and entry.header_size % PAGE == 0 and entry.payload == 4 * PAGE - 21
    with safe_open(tmp_path / "x.safetensors", framework="np") as f:
        assert list(f.keys()) == ["expert.00000", "expert.00001", "expert.00002"]
        assert (f.get_tensor("expert.00001") == 2).all() and len(f.get_tensor("expert.00001")) == 2 * PAGE
    file = LayerFile(tmp_path, "x.safetensors", entry, Version.of("bf16"), LAYER)
    assert [file.offset(e) % PAGE for e in range(3)] == [0, 0, 0]
    extent = file.extent(2)
    assert (extent == 3).all() and not extent.flags.writeable
    os.truncate(tmp_path / "x.safetensors", entry.size - 1)
    with pytest.raises(BundleError, match="expert 2, version bf16: the file ends before it"):
        file.extent(2)
    assert (extent == 3).all(), "what was read stays"


def test_layer_file_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), LayerFileWriter(tmp_path / "x.safetensors", "bf16", LAYER):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="1 extents"), LayerFileWriter(tmp_path / "x.safetensors", "bf16", LAYER) as w:
        w.add(np.zeros(PAGE, np.uint8), 1)
    assert list(tmp_path.iterdir()) == []


# --- safetensors headers


def header_bytes(document):
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text


T = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
BAD_HEADERS = {  # beside those of broken_rules
    "not json": (b"\x04\0\0\0\0\0\0\0nope", 4, "header"),
    "no offsets": (header_bytes({"a": {"dtype": "U8", "shape": [4]}}), 4, "header"),
    "object as dtype": (header_bytes({"a": {**T, "dtype": {}}}), 4, "header"),
    "list in shape": (header_bytes({"a": {**T, "shape": [[4]]}}), 4, "header"),
    "long overflowing shape": (header_bytes({"a": {**T, "shape": [1 << 40] * 1000}}), 4, "header"),
    "negative shape": (header_bytes({"a": {**T, "shape": [-4]}}), 4, "header"),
    "overflowing shape": (header_bytes({"a": {**T, "shape": [1 << 60]}}), 4, "header"),
    "float offset": (header_bytes({"a": {**T, "data_offsets": [0, 4.0]}}), 4, "header"),
    "size and shape differ": (header_bytes({"a": {**T, "shape": [5]}}), 4, "offsets"),
    "hole": (header_bytes({"a": {**T, "data_offsets": [1, 5]}}), 5, "offsets"),
    "overlap": (header_bytes({"a": T, "b": {**T, "data_offsets": [2, 6]}}), 6, "offsets"),
    "truncated": (header_bytes({"a": T}), 3, "truncated"),
    "no length": (b"", 0, "truncated"),
    "half a length": (b"\0\0\0\0\0\0\0", 0, "truncated"),
    "no header": (struct.pack("<Q", 1 << 62), 0, "truncated"),
    "length past the end": (struct.pack("<Q", 1 << 62) + b"{}" * 8, 0, "truncated"),
    "trailing": (header_bytes({"a": T}), 5, "trailing"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers(name, tmp_path):
    head, data, kind = BAD_HEADERS[name]
    (tmp_path / "f").write_bytes(head + bytes(data))
    with pytest.raises(BundleError) as error:
        read_header(tmp_path / "f")
    assert kinds(error) == {kind}


def test_merge_keeps_every_byte(tmp_path):
    from safetensors.numpy import load_file, save_file

    a = {"x": np.arange(5, dtype=np.float32), "y": np.arange(3, dtype=np.uint8)}
    b = {"x": np.arange(7, dtype=np.int64)}
    save_file(a, tmp_path / "a")
    save_file(b, tmp_path / "b")
    entries = merge([(tmp_path / "a", "a."), (tmp_path / "b", "b.")], tmp_path / "out", {"k": "v"})
    merged = load_file(tmp_path / "out")
    assert {k: v.tolist() for k, v in merged.items()} == {
        "a.x": a["x"].tolist(), "a.y": a["y"].tolist(), "b.x": b["x"].tolist(),
    }  # fmt: skip
    assert entries["b.x"].begin % 8 == 0
    with pytest.raises(ValueError, match="two files"):
        merge([(tmp_path / "a", ""), (tmp_path / "b", "")], tmp_path / "out2", {})


# --- the writer


def test_writer_leaves_nothing_on_error(tmp_path):
    target = tmp_path / "deep" / "bundle"
    with pytest.raises(ZeroDivisionError), BundleWriter(target) as writer:
        writer.path("a/b").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_goes(tmp_path):
    """But nothing that is being written, or belongs to another bundle."""
    left, others = tmp_path / ".bundle.partial-0", tmp_path / ".bundle2.partial-0"
    for folder in (left, others):
        (folder / "experts").mkdir(parents=True)
    with BundleWriter(tmp_path / "bundle") as one, BundleWriter(tmp_path / "bundle") as two:
        assert sorted(tmp_path.iterdir()) == sorted([others, one.root, two.root])
    assert list(tmp_path.iterdir()) == [others]


def test_a_file_is_added_through_a_link_and_one_that_is_absent_is_named(tmp_path):
    (tmp_path / "text").write_text("a")
    with BundleWriter(tmp_path / "bundle") as writer:
        writer.path("here").symlink_to(tmp_path / "text")
        writer.add("here")
        assert writer.with_files(Manifest({}, (), (), {}, {})).files == {
            "here": FileEntry(1, hashlib.sha256(b"a").hexdigest())
        }
        with pytest.raises(FileNotFoundError, match="absent"):
            writer.add("absent")


def test_target_must_be_new_or_empty(tmp_path):
    check_target(tmp_path / "new" / "deeper")
    check_target(tmp_path)
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path, tmp_path / "file"):
        with pytest.raises(TargetError, match=str(bad)):
            check_target(bad)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TargetError):
        check_target(tmp_path / "link")
    with pytest.raises(TargetError, match="cannot be written"):
        check_target(tmp_path / "file" / "bundle")
    with pytest.raises(TargetError, match="cannot be written"), BundleWriter(tmp_path / "file" / "bundle"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_target_must_be_writable(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(TargetError, match="cannot be written"):
        check_target(tmp_path / "bundle")


# --- the manifest


def test_manifest_round_trip(bundle):
    data = (bundle / "manifest.json").read_bytes()
    manifest = parse_manifest(data)
    assert manifest.to_json() == data
    assert [v.name for v in manifest.versions] == ["bf16", "w4", "w3", "w2", "w1"]
    assert manifest.allocation is not None and len(manifest.allocation.versions) == 4


def test_any_changed_byte_of_the_manifest_is_found(bundle):
    data = bytearray((bundle / "manifest.json").read_bytes())
    rng = np.random.default_rng(0)
    for at in (*range(0, 64), *rng.integers(0, len(data), 200), len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(BundleError):
            parse_manifest(bytes(changed))
    for changed in (data + b"\n", data[:-1], data.replace(b'": ', b'":  ', 1)):
        with pytest.raises(BundleError):
            parse_manifest(bytes(changed))


def test_all_problems_are_reported_at_once(damaged, edit_manifest):
    def change(document):
        document["layers"][0]["matrices"][0]["rows"] = 0
        document["versions"][1]["group_size"] = 5
        document["files"]["config.json"]["sha256"] = "x"

    edit_manifest(damaged, change)
    with pytest.raises(BundleError) as error:
        open_bundle(damaged)
    assert kinds(error) >= {"range", "encoding", "digest"}
    assert f"and {len(error.value.problems) - 1} more" in str(error.value)


# --- the reader


def test_problems_of_dense_files_come_first(small, tmp_path):
    path = shutil.copytree(small, tmp_path / "bundle")
    for folder in ("dense", "experts"):
        (path / folder / "w8" / "layer-001.safetensors").write_bytes(b"")
    with pytest.raises(BundleError) as error:
        open_bundle(path)
    assert [p.location for p in error.value.problems] == [
        f"{path}/{folder}/w8/layer-001.safetensors" for folder in ("dense", "experts")
    ]


def test_a_layer_file_is_kept_open_by_version_and_layer(small, monkeypatch):
    bundle = open_bundle(small)
    files = bundle.layer_file("w8", 0), bundle.dense_file("w8", bundle.dense_layers[0])
    assert files[0] is not files[1]
    monkeypatch.setattr(ExpertLayer, "file", None)  # no path is made again
    assert bundle.layer_file("w8", 0) is files[0]
