"""shrink: fewer versions, the same bytes, or nothing at all."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from support import files_of_at_most, flip, tree

import moepack
from moepack.pack.errors import BundleError, InputError, TargetError
from moepack.pipeline.shrink import shrink
from moepack.reports.verify import verify


def test_versions_that_are_kept_are_the_same_bytes(bundle, tmp_path):
    done = shrink(bundle, tmp_path / "small", ["w2", "w4"])
    before, after = tree(bundle), tree(tmp_path / "small")
    assert done.versions == ("w4", "w2") and done.allocation is None, "its map names w3"
    assert verify(tmp_path / "small") == []
    assert {n.split("/")[1] for n in after if n.startswith("experts/")} == {"w4", "w2"}
    changed = {n for n in after if after[n] != before.get(n)}
    assert changed == {"manifest.json", "README.md"}
    gone = sum(len(data) for name, data in before.items() if name.split("/")[1:2] in (["bf16"], ["w3"], ["w1"]))
    gone += len(before["released.json"])  # of bf16's checkpoint
    assert done.bytes_before - done.bytes_after == gone
    note = json.loads(after["manifest.json"])["provenance"]["shrunk"]
    assert [(x["from"], x["kept"]) for x in note] == [(["bf16", "w4", "w3", "w2", "w1"], ["w4", "w2"])]
    again = shrink(tmp_path / "small", tmp_path / "smaller", ["w2"])
    assert again.versions == ("w2",)
    note = json.loads((tmp_path / "smaller" / "manifest.json").read_text())["provenance"]["shrunk"]
    assert [x["kept"] for x in note] == [["w4", "w2"], ["w2"]]


def test_weights_are_linked_and_what_people_edit_is_copied(bundle, tmp_path):
    home = tmp_path / "models--some--bundle"  # as the Hub's cache: every file a link to a blob
    cache = home / "snapshots" / "0123abc"
    (home / "blobs").mkdir(parents=True)
    for number, name in enumerate(tree(bundle)):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(bundle / name, home / "blobs" / str(number))
        (cache / name).symlink_to(home / "blobs" / str(number))
    shrink(cache, tmp_path / "small", ["w2"])
    links = {"experts/w2/layer-001.safetensors": True, "model.safetensors": True, "config.json": False}
    for name, linked in links.items():
        made = tmp_path / "small" / name
        assert not made.is_symlink() and made.samefile(bundle / name) == linked


def test_the_map_of_the_manifest_stays_with_its_versions(bundle, tmp_path):
    table = moepack.open(bundle).manifest.allocation
    named = {name for row in table.versions for name in row}
    done = shrink(bundle, tmp_path / "small", allocation=True)
    assert set(done.versions) == named < {"bf16", "w4", "w3", "w2", "w1"}
    model = moepack.load(tmp_path / "small", policy="static:allocation")
    assert model.moepack.versions == table.versions


@pytest.fixture
def another_disk(tmp_path):
    """A folder of another file system, to which no file can be linked."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_a_disk_without_room(bundle, another_disk, tmp_path, monkeypatch):
    """It is refused before files are copied; one that becomes full names the file that is written. Nothing remains."""
    words = r"/b/[a-z0-9/-]+.safetensors: cannot be written: File too large"
    with files_of_at_most(50_000), pytest.raises(TargetError, match=words):
        shrink(bundle, another_disk / "b", ["w2"])
    usage = shutil.disk_usage(another_disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=400_000))
    with pytest.raises(TargetError, match=r"/b: the disk lacks room: [0-9,]+ bytes to write, 400,000 free"):
        shrink(bundle, another_disk / "b", ["w2"])
    assert not list(another_disk.iterdir())
    assert shrink(bundle, tmp_path / "b", ["w2"]).versions == ("w2",), "links take no room"


def test_nothing_is_written_where_it_is_refused(damaged, tmp_path):
    before = sorted(tmp_path.iterdir())
    for words, options in (
        ("nothing says what to keep", {}),
        ("no version 'w9'", {"versions": ["w9"]}),
        ("give it alone", {"versions": ["w2"], "allocation": True}),
    ):
        with pytest.raises(InputError, match=words):
            shrink(damaged, tmp_path / "small", **options)
    flip(damaged / "experts/w2/layer-001.safetensors", -5)
    with pytest.raises(BundleError, match="digest"):
        shrink(damaged, tmp_path / "small", ["w2"])
    with pytest.raises(TargetError, match="not empty"):
        shrink(damaged, damaged, ["w4"])
    assert sorted(tmp_path.iterdir()) == before
    assert shrink(damaged, tmp_path / "small", ["w4"]).versions == ("w4",), "what goes may be damaged"
