"""Trials of compiled libraries: which level is used, what is remembered, and what is not taken from memory."""

import json
import logging
import os
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import moepack
from moepack.pack import trials, user_files
from moepack.pack.codec import exponent_native

NAMES = {0: "plain", 1: "avx2", 2: "avx512"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trials, "_best", {})
    monkeypatch.setattr(trials, "faults", {})
    yield tmp_path / "cache" / "moepack" / "trials"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library of three levels; those in `wrong` differ from the reference. `tried` are the levels of its trials."""
    path = tmp_path / "_stand_in.so"
    path.write_bytes(b"code")
    reference = ModuleType("moepack.stand_in")
    reference.__file__ = str(tmp_path / "reference.py")
    Path(reference.__file__).write_text("products = None")
    monkeypatch.setitem(globals(), "reference", reference)  # as a trial's module imports it
    of = SimpleNamespace(path=path, level=-1, wrong=set(), tried=[], reference=Path(reference.__file__))

    def use(level):
        of.level = level
        return level

    def trial():
        of.tried.append(of.level)
        return "w4: products" if of.level in of.wrong else ""

    of.use, of.trial = use, trial
    return of


def asked(of):
    """As the next process asks."""
    trials._best.clear()
    return trials.best_level(of.path, NAMES, of.use, of.trial)


def test_the_highest_level_that_agrees_is_used(library, caplog):
    """The fault: wrong numbers of one level, which were believed. Others are used, and the log says it once."""
    library.wrong = {1, 2}
    with caplog.at_level(logging.WARNING, "moepack"):
        for _ in range(2):
            assert trials.best_level(library.path, NAMES, library.use, library.trial) == 0 == library.level
    remedy = "install moepack again with another C compiler, for example CC=clang"
    why = f"it computes wrong numbers on this processor (w4: products): {remedy}"
    assert trials.faults == {"_stand_in.so (avx512)": why, "_stand_in.so (avx2)": why}
    assert [r.getMessage() for r in caplog.records] == [f"{w} is not used: {why}" for w in trials.faults]
    library.wrong = {0, 1, 2}
    library.path.write_bytes(b"all are wrong")
    assert asked(library) is None


def test_what_was_found_is_remembered(library, cache):
    """The fault: a trial at each start, or a failure that the next start forgets."""
    library.wrong = {2}
    assert [asked(library) for _ in range(3)] == [1, 1, 1]
    assert library.tried == [2, 1]
    assert [file.stat().st_mode & 0o777 for file in cache.iterdir()] == [0o600] * 2


def test_a_library_of_other_sources_is_not_opened(tmp_path, caplog):
    """The fault: a checkout goes on, its libraries stay, and get addresses in an order that they do not know."""
    path = shutil.copy(exponent_native.PATH, tmp_path)
    for source in exponent_native.PATH.parent.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    assert trials.open_library(Path(path), tmp_path).moepack_isa_level() >= 0
    with (tmp_path / "isa.h").open("a") as header:
        header.write("/* changed */")
    with pytest.raises(OSError, match=r"_exponent\.so: it was compiled from other sources: install moepack again"):
        trials.open_library(Path(path), tmp_path)
    assert [r.getMessage() for r in caplog.records] == [f"_exponent.so is not used: {trials.faults['_exponent.so']}"]


CHANGES = {
    "library": lambda of, patch: of.path.write_bytes(b"another") and None,
    "reference": lambda of, patch: of.reference.write_text("another") and None,
    "processor": lambda of, patch: patch.setattr(trials, "processor", lambda: "another"),
    "version": lambda of, patch: patch.setattr(moepack, "__version__", "another"),
    "level": lambda of, patch: patch.setitem(NAMES, 2, "amx"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_memory_of_another_is_not_used(change, library, monkeypatch):
    """The fault: a cache on a shared home, or a wheel built anew, whose finding is of other code or another machine."""
    assert asked(library) == 2
    CHANGES[change](library, monkeypatch)
    library.wrong = {2}
    assert asked(library) == 1
    assert library.tried == [2, 2, 1]


@pytest.mark.parametrize(
    "content",
    [b"", b"[1, 2]", b"\xff\xfe", b'{"a": 1}', b"[" * 100_000, b'"' + b"x" * 301 + b'"', b'""' + b" " * (1 << 20)],
)
def test_a_hostile_file_is_replaced(content, library, cache):
    """The fault: a start that fails, or believes what it reads, because of what the cache holds."""
    library.wrong = {2}
    assert asked(library) == 1
    for file in cache.iterdir():
        file.write_bytes(content)
    assert [asked(library), asked(library)] == [1, 1] and library.tried == [2, 1, 2, 1]
    assert sorted(json.loads(file.read_text()) for file in cache.iterdir()) == ["", "w4: products"]


def test_what_others_may_write_is_not_believed(library, cache):
    """The fault: another user's word that a library is good. Links and others' files are test_user_files.py's."""
    assert asked(library) == 2
    for file in cache.iterdir():
        file.chmod(0o666)
    library.wrong = {2}
    assert asked(library) == 1 and library.tried == [2, 2, 1]


def test_without_a_place_to_remember_each_process_tries(library, tmp_path, monkeypatch):
    """The fault: a read-only home, a full disk, or none, that ends the start."""
    (tmp_path / "file").write_text("")
    for home in (str(tmp_path / "file"), os.devnull):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        assert asked(library) == 2
    monkeypatch.setattr(user_files, "cache_path", lambda name: None)
    assert asked(library) == 2 and library.tried == [2, 2, 2]
