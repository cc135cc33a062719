"""An export that was stopped: what is whole is kept, and the next one ends in the bytes of an export in one go."""

import errno
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from support import Notes, flip, forked, refused, spy, tree

from moepack.export import Wanted, export
from moepack.export.choice import choose
from moepack.export.files import ExportDirectory, shards, work, working
from moepack.export.files.filled import FilledFile
from moepack.export.run import made_for
from moepack.export.targets import target_of
from moepack.export.values import Values
from moepack.pack.errors import TargetError
from moepack.pack.reader import open_bundle

CASES = {
    "checkpoint": ("checkpoint", Wanted("w3", dense="w8", shard="700kB")),
    "compressed-tensors": ("compressed-tensors", Wanted("2", dense="w4", shard="100kB")),
    "gguf": ("gguf", Wanted("4", dense="w8", shard="150kB")),
}


def stop(kind, at, name="finish"):
    """Ends an export by an exception, or by SIGKILL, after so many calls of a function of its directory."""

    def patch(monkeypatch):
        seen = iter(range(1000))

        def end(*_):
            if next(seen) == at:
                if kind is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if kind is OSError else kind()

        spy(monkeypatch, ExportDirectory, name, end)
        monkeypatch.setattr(shards, "WORKERS", 1)  # or files are finished side by side

    return patch


def stopped(bundle, out, target, wanted, at, kind):
    """Run an export that ends after so many files; what it says."""
    with pytest.MonkeyPatch.context() as patch:
        if kind is None:

            def killed():
                torch.set_num_threads(1)  # a forked child has none of its parent's threads, and would wait for them
                stop(None, at)(patch)
                export(bundle, out, target, wanted)

            assert os.waitpid(forked(killed), 0)[1] == signal.SIGKILL
            return ""
        stop(kind, at)(patch)
        notes = Notes()
        with pytest.raises(TargetError if kind is OSError else kind) as caught:
            export(bundle, out, target, wanted, reporter=notes)
    return str(caught.value) if kind is OSError else " ".join(notes.notes)


def kept(out):
    """The files of the working directory: inodes and times."""
    folder = out.with_name(f".{out.name}.exporting") / "files"
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir()} if folder.is_dir() else {}


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_and_ends_in_the_same_bytes(case, of_zeros, tmp_path):
    """After a kill, a full disk and Ctrl-C in turn; a file that is whole is not written again, and no more is read."""
    target, wanted = CASES[case]
    bundle, out = of_zeros("symmetric"), tmp_path / "out"
    made = export(bundle, tmp_path / "whole", target, wanted)
    whole = tree(tmp_path / "whole")
    assert len(made.files) > 3 and all(name in whole for name in made.files)
    before = {}
    for at, kind in enumerate((None, OSError, KeyboardInterrupt)):
        said = stopped(bundle, out, target, wanted, 1, kind)
        now = kept(out)
        assert before.items() <= now.items() and len(now) > at, "whole files stay as they are"
        if kind is not None:
            assert set(now) <= set(made.files) and f"; {len(now)} whole files (" in said
            assert said.endswith("kept: run the same command again to go on")
        before = {name: now[name] for name in json.loads(record(out).read_text())["files"] for name in [name[6:]]}
        assert not out.exists() and len(before) == at + 1
    read = []
    notes = Notes()
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, Values, "of_expert", lambda *of: read.append(of))
        again = export(bundle, out, target, wanted, reporter=notes)
    assert tree(out) == whole and again.files == made.files and again.bytes == made.bytes
    assert all((out / n).stat().st_ino == ino for n, (ino, _) in before.items())
    assert len(read) < 32 or case == "gguf", "experts of whole files are not read"  # its tensors hold all of a layer
    assert len(notes.notes) == 1 and "goes on: 3 whole files (" in notes.notes[0]
    assert {p.name for p in tmp_path.iterdir()} == {"out", "whole"}


def record(out):
    return out.with_name(f".{out.name}.exporting") / "record.json"


def test_the_released_checkpoint_goes_on(of_zeros, short_model, asked, tmp_path):
    """One file, which a full disk leaves nothing of; a file that was whole is taken."""
    bundle, out = of_zeros("fractional"), tmp_path / "out"
    seen = []

    def full(file, name, *_):
        seen.append(name)
        if len(seen) == 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        spy(patch, FilledFile, "put", full)
        refused(asked(bundle), f"{out}: cannot be written: No space left on device")
    assert list(tmp_path.iterdir()) == [], "no file is whole: nothing is kept"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop(KeyboardInterrupt, 0, "publish")(patch)
        export(bundle, out)
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, FilledFile, "put", lambda *_: pytest.fail("it is whole"))
        export(bundle, out)
    assert (out / "model.safetensors").read_bytes() == (short_model / "model.safetensors").read_bytes()


def two_files(out):
    """Stop an export of nothing after two files, which it keeps."""
    with pytest.raises(KeyboardInterrupt), working(out, {}, 0, Notes()) as made:
        for name in ("one", "two"):
            made.path("files", name).write_text(name)
            made.finish(f"files/{name}")
        raise KeyboardInterrupt


def elsewhere(file):
    """Move a file or folder out of the working directory, and put a link in its place."""
    there = next(path for path in file.parents if path.name == ".out.exporting").with_name("elsewhere")
    file.rename(there)
    file.symlink_to(there)


DAMAGE = {
    "damaged": lambda file: flip(file, -1),
    "short": lambda file: os.truncate(file, 2),
    "gone": lambda file: file.unlink(),
    "a link": elsewhere,
    "a link to its folder": lambda file: elsewhere(file.parent),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_damaged_or_elsewhere_is_not_taken(how, tmp_path):
    """It is written again, into a file of the working directory."""
    out, notes = tmp_path / "out", Notes()
    two_files(out)
    DAMAGE[how](record(out).parent / "files" / "one")
    there = [path.read_bytes() for path in (tmp_path / "elsewhere").rglob("*")]
    with working(out, {}, 0, notes) as made:
        assert not made.has("files/one") and made.has("files/two") == (how != "a link to its folder")
        made.path("files", "one").write_text("again")
    assert {path.name for path in out.iterdir()} <= {"one", "two"} and not (out / "one").is_symlink()
    assert (out / "one").read_text() == "again"
    assert [path.read_bytes() for path in (tmp_path / "elsewhere").rglob("*")] == there
    assert "files/one is not as it was written: it is written again" in notes.notes[0]
    assert any("goes on" in note for note in notes.notes) == (how != "a link to its folder")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_a_stop_while_digests_are_checked(kind, tmp_path):
    """It keeps what is there and holds no lock: the same process may go on."""
    out = tmp_path / "out"

    def stopped_in(name):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TargetError if kind is OSError else kind):
            patch.setattr(work, name, lambda *_: (_ for _ in ()).throw(kind(errno.EIO, "damaged")))
            with working(out, {}, 0, Notes()):
                pass

    stopped_in("replace_file")
    assert list(tmp_path.iterdir()) == [], "nothing was there yet"
    two_files(out)
    before = kept(out)
    stopped_in("digest_of")
    assert kept(out) == before and len(before) == 2
    with working(out, {}, 0, Notes()) as made:
        assert made.has("files/one") and made.has("files/two")
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_another_export_begins_anew(of_zeros, asked, tmp_path):
    """Of other options, or of another bundle; a refusal before it begins leaves what is there."""
    bundle, out = of_zeros("symmetric"), tmp_path / "out"
    _, wanted = CASES["gguf"]
    exact = Wanted("bf16", shard="150kB")
    changes = ({}, {"dense": "w4"}, {"bits": "8"}, {"shard": "200kB"})
    others = [("gguf", bundle, replace(wanted, **change)) for change in changes]
    others += [("gguf", bundle, exact), ("gguf", of_zeros("integer"), exact), ("gptq", bundle, wanted)]
    others += [("compressed-tensors", bundle, replace(wanted, scales=scales)) for scales in ("bf16", "fp32")]
    forms = ((target_of(to), open_bundle(path), options) for to, path, options in others)
    keys = {json.dumps(made_for(choose(path, form, options), form), sort_keys=True) for form, path, options in forms}
    assert len(keys) == len(others)
    stopped(bundle, out, *CASES["gguf"], 1, KeyboardInterrupt)
    refused(asked(bundle, "--to", "gguf", "--bits", "3"), "w3 is not exported")
    assert len(json.loads(record(out).read_text())["files"]) == 1
    notes = Notes()
    for path in (out, tmp_path / "whole"):
        export(of_zeros("integer"), path, "gguf", exact, reporter=notes)
    assert not any("goes on" in n for n in notes.notes)
    assert tree(out) == tree(tmp_path / "whole")


RECORDS = {
    "nested": '{"files": ' + "[" * 200_000, "no name": '{"files": {"files/\\u0000": [1, ""]}}',
    "half a character": '{"files": {"files/\\ud800": [1, ""]}}', "no file": '{"files": {"": [1, ""]}}',
    "elsewhere": '{"files": {"../theirs": [1, ""]}}', "long": '{"files": {"' + "x" * 300 + '": [1, ""]}}',
    "no pair": '{"files": {"files/one": "x"}}',
}  # fmt: skip


@pytest.mark.parametrize("how", RECORDS)
def test_a_record_that_is_none(how, tmp_path):
    """Nothing is taken by it, and nothing elsewhere touched."""
    out = tmp_path / "out"
    (tmp_path / "theirs").write_text("x")
    two_files(out)
    key = json.loads(record(out).read_text())["made_for"]
    record(out).write_text(RECORDS[how].replace("{", f'{{"made_for": "{key}", ', 1))
    with working(out, {}, 0, Notes()) as made:
        assert not any(map(made.has, ("../theirs", "files/one", "")))
        made.path("files", "other").touch()
    assert tree(tmp_path) == {"out/other": b"", "theirs": b"x"}


def test_a_lock_that_is_a_link(tmp_path):
    (tmp_path / ".out.exporting").mkdir()
    (tmp_path / ".out.exporting" / "lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(TargetError, match="cannot be written"), working(tmp_path / "out", {}, 0, Notes()):
        pass
    assert not (tmp_path / "theirs").exists()


def test_whose_directory_it_is(of_zeros, asked, tmp_path):
    """Another's is left alone, a link is not followed, and two exports do not meet."""
    bundle, out, hidden = of_zeros("symmetric"), tmp_path / "out", tmp_path / ".out.exporting"
    hidden.mkdir()
    (hidden / "mine").write_text("x")
    refused(asked(bundle, "--bits", "4"), f"{hidden}: is no export's")
    assert tree(tmp_path) == {".out.exporting/mine": b"x"}
    hidden.rename(tmp_path / "elsewhere")
    hidden.symlink_to(tmp_path / "elsewhere")
    refused(asked(bundle, "--bits", "4"), f"{hidden}: is no export's")
    hidden.unlink()
    with pytest.MonkeyPatch.context() as patch:
        said = []
        spy(patch, ExportDirectory, "finish", lambda *_: said or said.append(asked(bundle, "--bits", "2")))
        export(bundle, out, wanted=Wanted("4"))
    refused(said[0], f"{out}: another export is writing it: wait for it")
    assert not hidden.exists()


def test_no_room(of_zeros, asked, tmp_path, monkeypatch):
    """It is refused before anything is written."""
    bundle = of_zeros("symmetric")
    needed = export(bundle, tmp_path / "out", wanted=Wanted("4"), dry_run=True).bytes
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": needed - 1}))
    refused(asked(bundle, "--bits", "4"), f"out: the disk lacks room: {needed:,} bytes to write, {needed - 1:,} free")
    assert list(tmp_path.iterdir()) == []
