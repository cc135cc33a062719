"""Kept prompts in files: found again by another engine, the same bits, and nothing believed that is not their own."""

import contextlib
import json
import logging
import os
import threading

import pytest
import torch
from kept_prompts import MOST, STEP, SYSTEM, model_of, read
from live_models import wait_for
from server_fixtures import NAME, post, serving

import moepack
from moepack.pack.errors import InputError
from moepack.server.batching import prefix_files, prefixes
from moepack.server.batching.engine import Engine
from moepack.server.batching.prefix_files import ENDING, PrefixFiles
from moepack.server.batching.prefixes import CHUNK, chunk_keys
from moepack.server.options import Limits, Options


@pytest.fixture
def model(tmp_path):
    return model_of("qwen3_moe", tmp_path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept"


@contextlib.contextmanager
def files_of(folder, most=1 << 30, model="a model"):
    files = PrefixFiles(folder, most, model)
    try:
        yield files
    finally:
        files.close()


def held(folder):
    return sorted(path for path in folder.iterdir() if path.name.endswith(ENDING))


def paths_of(folder):
    """The files of SYSTEM's chunks."""
    with files_of(folder) as files:
        return [folder / (name + ENDING) for name in files.names(chunk_keys(SYSTEM))]


def written(model, folder, prompt=SYSTEM, **how):
    """The logits of an engine that read the prompt and wrote its three chunks."""
    with files_of(folder, **how) as files:
        engine = Engine(model, STEP, MOST, files)
        assert read(engine, prompt, (192, len(prompt)), 6)[0] == 0
        logits = read(engine, prompt, (len(prompt),), 6)  # from memory
        wait_for(lambda: files._waiting.empty())
    assert logits[0] == 192
    return logits[1]


def chunks_found(model, files, prompt=SYSTEM):
    """How many chunks of a prompt another engine takes from files."""
    engine = Engine(model, STEP, MOST, files)
    engine.look_for(prompt)
    return engine.kept_ahead(engine.add(200, chunk_keys(prompt)), 200) / CHUNK


@pytest.mark.parametrize(
    ("family", "states"), [("qwen3_moe", 0), ("deepseek_v3", 0), ("qwen3_next", 1), ("lfm2_moe", 1)]
)
def test_another_engine_gives_the_same_bits(family, states, folder, tmp_path):
    """And what files have takes no memory."""
    model = model_of(family, tmp_path)
    logits = written(model, folder)
    assert len(held(folder)) == 3 + states
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in held(folder))
    with files_of(folder) as files:
        engine = Engine(model, STEP, MOST, files)
        engine.look_for(SYSTEM)
        taken, again = read(engine, SYSTEM, (200,), 6)
        assert engine.kept_bytes == 0
    assert taken == 192 and torch.equal(again, logits)


def test_only_the_same_tokens_of_the_same_model(model, folder):
    written(model, folder)
    with files_of(folder) as files, files_of(folder, model="another") as others:
        for of, prompt, chunks in (
            (files, SYSTEM, 3),
            (files, [1, *SYSTEM], 0),
            (files, SYSTEM[:130] + [7] * 70, 2),
            (others, SYSTEM, 0),
        ):
            assert chunks_found(model, of, prompt) == chunks


def _flipped(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _retyped(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F32"', b'"I32"', 1))


def _link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize(
    "spoil",
    [
        _flipped,
        _retyped,
        _link,
        lambda path: path.write_bytes(next(one for one in held(path.parent) if one != path).read_bytes()),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 5000),
        lambda path: path.chmod(0o622),
    ],
    ids=["flipped", "another dtype", "link", "another chunk", "cut", "empty", "noise", "others may write"],
)
def test_a_file_that_is_not_its_own_is_removed(spoil, model, folder, caplog):
    logits = written(model, folder)
    second = paths_of(folder)[1]
    spoil(second)
    with files_of(folder) as files, caplog.at_level(logging.WARNING):
        assert chunks_found(model, files) == 1
        assert [str(second) in record.getMessage() for record in caplog.records] == [True]
        engine = Engine(model, STEP, MOST, files)
        engine.look_for(SYSTEM)
        taken, again = read(engine, SYSTEM, (192, 200), 6)
    assert taken == 0 or torch.allclose(again, logits, atol=5e-6, rtol=1e-4)


def test_the_longest_unused_leave(model, folder):
    written(model, folder)
    size = held(folder)[0].stat().st_size
    paths = paths_of(folder)
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    with files_of(folder) as files:
        files.look_for(chunk_keys(SYSTEM))
    assert paths[0].stat().st_mtime >= paths[2].stat().st_mtime > 1000, "used files are the newest"
    for path in paths:
        os.utime(path, (1000, 1000))
    written(model, folder, [n + 1 for n in SYSTEM], most=4 * size)
    left = held(folder)
    assert len(left) == 4 and sum(path.exists() for path in paths) == 1, "the fifth made two of the oldest leave"


def test_a_prompt_keeps_its_beginning(model, folder):
    """The first chunks stay, even of a prompt that no one asked for again: nothing finds the others without them."""
    written(model, folder)
    size = held(folder)[0].stat().st_size
    for most, left in ((int(2.5 * size), 2), (0, 0)):
        with files_of(folder, most) as files:
            assert len(held(folder)) == left == chunks_found(model, files)


def test_few_files_are_open_and_each_is_checked_once(model, folder, monkeypatch):
    """Requests that were refused leave none open for long, and a prompt that comes again finds room for its own."""
    other = [n + 1 for n in SYSTEM]
    for prompt in (SYSTEM, other):
        written(model, folder, prompt)
    checked = []
    own = prefix_files._checked
    monkeypatch.setattr(prefix_files, "_checked", lambda path: checked.append(path) or own(path))
    for module in (prefix_files, prefixes):
        monkeypatch.setattr(module, "MOST_STORED", 3)
    with files_of(folder) as files:
        engine = Engine(model, STEP, MOST, files)
        for prompt in (SYSTEM, other, SYSTEM):
            engine.look_for(prompt)
            assert len(files._found) == 3
        del checked[:]
        slot = engine.add(200)
        for prompt in (SYSTEM, SYSTEM, other, other):
            engine.look_for(prompt)
            assert read(engine, prompt, (200,))[0] == 192
        assert len(checked) == 3 and not files._found
        engine.remove(slot)


@pytest.fixture
def writing(monkeypatch):
    """Two events: a file is being written; it may be."""
    own, begun, may = prefix_files._written, threading.Event(), threading.Event()

    def late(*given):
        begun.set()
        assert may.wait(60)
        return own(*given)

    monkeypatch.setattr(prefix_files, "_written", late)
    return begun, may


def test_what_waits_is_written_before_a_server_ends(model, folder, writing, monkeypatch):
    with files_of(folder) as files:
        engine = Engine(model, STEP, MOST, files)
        read(engine, SYSTEM, (192, 200))
        monkeypatch.setattr(files, "close", lambda: (writing[1].set(), PrefixFiles.close(files)))
        engine.close()
        assert engine.kept_bytes == 0 and len(held(folder)) == 3


def test_chunks_without_a_finite_answer_leave_no_file(model, folder, writing):
    """Even if they are being written."""
    begun, forgotten = writing
    with files_of(folder) as files:
        engine = Engine(model, STEP, MOST, files)
        read(engine, SYSTEM, (192, 200))
        assert begun.wait(60)
        engine.forget(chunk_keys(SYSTEM))
        forgotten.set()
    assert not held(folder)


def test_room_is_made_of_no_other_files(model, tmp_path):
    """What a killed server left of a file leaves as the others do."""
    folder = tmp_path / "qwen3_moe"
    others = sorted(folder.iterdir())
    assert folder / "model.safetensors" in others
    (folder / f".abc_1.{'0' * 64}{ENDING}").write_bytes(b"part of a file")
    written(model, folder, most=0)
    assert sorted(folder.iterdir()) == others


def test_a_full_disk_is_told_once(model, folder, monkeypatch, caplog):

    def full(**_):
        raise OSError(28, "No space left on device")

    with files_of(folder) as files, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(prefix_files.tempfile, "mkstemp", full)
        engine = Engine(model, STEP, MOST, files)
        assert read(engine, SYSTEM, (192, 200), 1)[0] == 0 and read(engine, SYSTEM, (200,), 1)[0] == 192
        wait_for(lambda: files._waiting.empty())
    told = [record.getMessage() for record in caplog.records if "no more prompts" in record.getMessage()]
    assert len(told) == 1 and "No space left" in told[0] and not held(folder)


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    for name, why in (("open", "others may write there"), ("file/below", "cannot be kept there")):
        with pytest.raises(InputError, match=why):
            PrefixFiles(tmp_path / name, 1, "a model")


def test_a_server_finds_them_after_a_restart(bundle, tokenizer, tmp_path):
    """The same words, and the tokens that were not read are in the answer's usage.

    Another form of cache finds none, nor do experts of other versions that stay; those that move find each other's.
    """
    said = {"model": NAME, "prompt": "The history of the town " * 30, "max_tokens": 5, "temperature": 0}
    options = Options(NAME, limits=Limits(kept_bytes=MOST), prefix_dir=tmp_path / "kept")
    answers = []
    moving = {"policy": "hotness:hi=bf16,lo=w2", "device_memory": "64MB", "kv_tokens": 0}
    for kv, how in (("16", {}), ("16", {}), ("8", {}), ("16", {"policy": "static:w2"}), ("16", moving), ("16", moving)):
        with serving(moepack.load(bundle, **{"policy": "static:w4", "kv": kv, **how}), tokenizer, options) as server:
            answers.append(json.loads(post(f"{server.url}/v1/completions", said)))
    used = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert used[0] == used[2] == used[3] == used[4] == 0 < used[1] == used[5]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
