"""Links: a bundle in the Hub's cache is read through them, and no other links are."""

import hashlib
import os
import shutil

import pytest
from broken_rules.names import CONFIG
from hostile_edits import problems_of, read_all

from moepack.pack.errors import BundleError
from moepack.pack.files import open_file


def cached(small, room, blobs="blobs"):
    """The bundle as huggingface_hub has it in its cache."""
    home = room / "models--someone--mini"
    for file in (p for p in small.rglob("*") if p.is_file()):
        link = home / "snapshots" / ("0" * 40) / file.relative_to(small)
        blob = home / blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        for path in (link, blob):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return home / "snapshots" / ("0" * 40)


def test_links_into_the_cache_of_the_hub_are_followed(small, tmp_path):
    snapshot = cached(small, tmp_path)
    read_all(snapshot)
    (tmp_path / "other").symlink_to(snapshot)
    read_all(tmp_path / "other")


def test_links_of_a_cache_lead_to_its_blobs_alone(small, tmp_path):
    assert {p.kind for p in problems_of(cached(small, tmp_path / "a", "others"))} == {"link"}
    snapshot = cached(small, tmp_path / "b")
    home = snapshot.parent.parent
    (home / "blobs").rename(tmp_path / "elsewhere")
    (home / "blobs").symlink_to(tmp_path / "elsewhere")
    assert {p.kind for p in problems_of(snapshot)} == {"link"}
    snapshot = cached(small, tmp_path / "c")
    (snapshot / CONFIG).unlink()
    os.mkfifo(snapshot.parent.parent / "blobs" / "pipe")
    (snapshot / CONFIG).symlink_to("../../blobs/pipe")
    assert [p.kind for p in problems_of(snapshot)] == ["file-type"]


def test_what_is_replaced_after_it_was_looked_at(small, tmp_path, monkeypatch):
    """A pipe or a link that takes a file's place between a look and the opening."""
    real = os.stat(small / CONFIG)  # noqa: PTH116
    monkeypatch.setattr("moepack.pack.files.os.stat", lambda *a, **k: real)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(small / CONFIG)
    for name, kind in (("pipe", "file-type"), ("link", "link")):
        with pytest.raises(BundleError) as error:
            open_file(tmp_path, name)
        assert [p.kind for p in error.value.problems] == [kind]
