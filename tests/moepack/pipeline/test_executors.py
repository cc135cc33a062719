"""Batches made at once, and what a worker elsewhere answers, without a cluster: the same bytes, errors in one line."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load, load_file
from support import build_from, flip, running, spy, tree

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.identity import identity, is_known
from moepack.calibrate.stream import StreamedModel
from moepack.pack.errors import InputError
from moepack.pipeline.bound import workers
from moepack.pipeline.executors import local, worker
from moepack.pipeline.executors.worker import DirectoryProbe, SharedTensors, WorkerCheckpoint, run_task
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.tasks.experts import ExpertBatchTask, batch_settings
from moepack.pipeline.tasks.result import load_result
from moepack.pipeline.work import WorkDirectory
from moepack.quantize import expert_batch, losses

RECIPE = """
quantize: {method: gptq, group_size: 64, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def test_batches_made_at_once_are_the_same(short_model, text, tmp_path, monkeypatch):
    """Four batches a layer, three at a time; each on one of torch's threads whatever the caller's are."""
    monkeypatch.setattr(expert_batch, "MOST", 4)
    build_from(RECIPE, short_model, tmp_path / "one", [text])
    threads, before = set(), torch.get_num_threads()
    at_work = running(monkeypatch, local, "make_expert_batch")
    spy(monkeypatch, expert_batch, "quantise_batch", lambda *_: threads.add(torch.get_num_threads()))
    monkeypatch.setattr(local, "workers", lambda device, need: 3)
    build_from(RECIPE, short_model, tmp_path / "three", [text])
    assert max(at_work) == 3 and threads == {1} and torch.get_num_threads() == before
    assert tree(tmp_path / "one") == tree(tmp_path / "three")


def test_after_an_error_no_batch_is_begun():
    begun = []

    def one(i):
        begun.append(i)
        raise InputError(f"batch {i}")

    with pytest.raises(InputError, match=r"batch [01]"):
        local._at_once(one, list(range(20)), 2, lambda done: None)
    assert sorted(begun) == [0, 1]


def test_as_many_at_once_as_threads_and_memory_allow(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    cpu = torch.device("cpu")
    assert [workers(cpu, need) for need in (1, 8, 10, 20, 49, 51)] == [6, 6, 5, 2, 1, 1]
    assert workers(torch.device("cuda", 1), 1) == 1


@pytest.fixture
def order(demo_model, tmp_path):
    """Three experts of the demo model's last layer, and tokens that reached it."""
    opened = open_checkpoint(demo_model)
    stream = StreamedModel(opened)
    layer = max(stream.expert_layers)
    g = torch.Generator().manual_seed(0)
    shape = stream.expert_layers[layer]
    inputs = torch.randn(256, shape.matrices[0].cols, generator=g).bfloat16()
    chosen = torch.randint(0, shape.experts, (256, 2), generator=g, dtype=torch.int32)
    seen = SharedTensors.of(inputs, chosen, torch.rand(256, 2, generator=g), length=64)
    recipe = parse_recipe(RECIPE, "t")
    task = ExpertBatchTask("c", recipe.version_specs(), "cpu", layer, range(4, 7), batch_settings(recipe))
    folder = tmp_path / "objects"
    folder.mkdir()
    return (task, folder / "piece"), WorkerCheckpoint(str(demo_model), identity(opened)[1]), seen


def test_a_batch_of_another_estimate_of_losses_is_not_taken(order, monkeypatch):
    task = order[0][0]
    before = task.address("observed")
    assert task.address("observed") == before != task.address("other")
    monkeypatch.setattr(losses, "ESTIMATE", losses.ESTIMATE + 1)
    assert task.address("observed") != before


def test_written_or_answered(order, tmp_path, monkeypatch):
    what, source, seen = order
    probe = DirectoryProbe.leave(tmp_path)
    assert list(run_task(what, source, probe, seen)) == [""]
    path = what[1]
    written = load_file(path)
    assert [p.name for p in path.parent.iterdir()] == ["piece"]
    assert len(load_result(path).extents["w4"]) == 3
    changed = path.stat().st_mtime_ns
    assert list(run_task(what, source, probe, seen)) == [""] and path.stat().st_mtime_ns == changed
    monkeypatch.setattr(worker, "ANSWER", 10_000)
    *pieces, digest = run_task(what, source, replace(probe, word="another"), seen)
    data = np.concatenate([p for p in pieces if not isinstance(p, str)]).tobytes()
    answered = load(data)
    assert answered.keys() == written.keys() and all(torch.equal(answered[name], written[name]) for name in written)
    assert digest == hashlib.sha256(data).hexdigest()
    assert len(pieces) == -(-len(data) // 10_000)


def test_another_checkpoint_is_refused(order, demo_model, tmp_path):
    placed, source, seen = order
    weights = Path(shutil.copytree(demo_model, tmp_path / "copy")) / "model.safetensors"

    def not_made(path, said):
        with pytest.raises(InputError, match=said) as caught:
            list(run_task(placed, replace(source, path=str(path)), DirectoryProbe.leave(tmp_path), seen))
        assert "\n" not in str(caught.value) and not placed[1].exists()

    not_made(tmp_path / "nowhere", "every node has to see the checkpoint there")
    flip(weights, -1)
    not_made(weights.parent, "is another file on")
    weights.unlink()
    not_made(weights.parent, "model.safetensors")


def test_a_file_of_another_machine(tmp_path):
    """By size and a fine time alone; where the time says nothing, by its bytes."""
    file = tmp_path / "f"
    file.write_bytes(b"weights")
    time, digest = 1_700_000_000_123_456_789, hashlib.sha256(b"weights").hexdigest()
    entry = {"size": 7, "mtime_ns": time, "inode": -1, "sha256": digest}
    os.utime(file, ns=(0, time))
    assert is_known(file, entry) and is_known(file, {**entry, "sha256": "not asked for"})
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(0, 1_700_000_000_000_000_000))
    coarse = {**entry, "mtime_ns": 1_700_000_000_000_000_000}
    assert not is_known(file, coarse)
    file.write_bytes(b"weights")
    assert is_known(file, coarse) and not is_known(file, {**coarse, "size": 8, "sha256": ""})
    with pytest.raises(InputError, match="cannot be read"):
        is_known(tmp_path / "absent", entry)


def test_what_a_killed_build_was_writing_is_removed(tmp_path):
    work = WorkDirectory(tmp_path / "w")
    kept = work.object("0" * 64)
    kept.write_bytes(b"done")
    (kept.parent / "tmpabc").mkdir()
    for name in ("tmpabc/w4.safetensors", f"{'0' * 64}.1f2e.partial", f"{'1' * 64}.12345678"):
        (kept.parent / name).touch()
    DirectoryProbe.leave(work.path)
    work.tidy()
    assert list(kept.parent.iterdir()) == [kept]
    assert sorted(p.name for p in work.path.iterdir()) == ["lock", "objects"]
    work.close()
