"""Files of the user alone: written whole, and read only where no other user may have written them."""

import os

import pytest
import torch

from moepack.pack.user_files import cache_path, read_own, remembered, write_whole


def test_a_file_is_the_former_one_or_the_new_one(tmp_path, monkeypatch):
    file = tmp_path / "kept"
    write_whole(file, "one")
    assert file.stat().st_mode & 0o777 == 0o600 and read_own(file, 3) == b"one"

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        write_whole(file, "two")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"] and file.read_text() == "one"


@pytest.mark.parametrize("kind", ["link", "pipe", "group", "large"])
def test_what_others_may_have_written_is_not_read(kind, tmp_path):
    file = tmp_path / "kept"
    write_whole(tmp_path / "own", "text")
    if kind == "link":
        file.symlink_to(tmp_path / "own")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        write_whole(file, "text" if kind == "group" else "texts")
        file.chmod(0o660 if kind == "group" else 0o600)
    with pytest.raises((OSError, ValueError), match="kept"):
        read_own(file, 4)


def test_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path("x") == tmp_path / "moepack" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_path("x") == tmp_path / "home" / ".cache" / "moepack" / "x"


def test_what_is_measured_under_another_default_dtype_is_not_kept(tmp_path, monkeypatch):
    """The fault: plans and trials of a process whose default dtype another library had left changed, read by others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = iter(range(9))

    def found():
        return remembered("some", "key", int, lambda: next(asked))

    torch.set_default_dtype(torch.bfloat16)
    try:
        assert (found(), found()) == (0, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found(), found()) == (2, 2)
