"""The run on a GPU, where none is: skipped rows by name, and halves behind stand-ins."""

import contextlib
import io
import json
import os
import queue
import select
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch_products
from gpu_stand_in import install
from support import ROOT

from benchmarks.gpu_day import __main__ as day
from benchmarks.gpu_day import bundles, large, run, served
from benchmarks.gpu_day.rows import Measured, Setting, shown
from benchmarks.gpu_day.run import Stage
from benchmarks.limited import bundle
from moepack.reports.verify import verify

# --- the run


CHILD = """
import argparse, ctypes, json, sys, time
from pathlib import Path
from benchmarks.gpu_day.rows import Entry, Measured, Setting
from benchmarks.gpu_day.run import child
parser = argparse.ArgumentParser()
for name in ("--stage", "--setting", "--rows"):
    parser.add_argument(name)
args = parser.parse_args()
def works(): return Measured(3.0, "us")
def raises(): raise ValueError("an error with its reason")
def dies(): ctypes.string_at(0)
def hangs(): time.sleep(600)
names = {"first": works, "raises": raises, "second": works, "dies": dies, "third": works, "hangs": hangs, "last": works}
entries = {n: Entry(w, on_cpu=True) for n, w in names.items()} | {"gpu": Entry(works)}
child(entries, json.loads(args.rows), Setting("cpu", True, Path()))
"""

PARENT = """
from pathlib import Path
from benchmarks.gpu_day.rows import Setting
from benchmarks.gpu_day.run import Stage
stage = Stage("none", ["hangs"], Setting("cpu", True, Path({work!r})), 600, False)
stage.command = {command!r}
stage.run(print)
"""


def test_a_crash_costs_its_row(tmp_path, monkeypatch):
    """One that raises, one that kills its process, one that hangs until its stage's time is over."""
    (tmp_path / "child.py").write_text(CHILD)
    names = ["gpu", "first", "raises", "second", "dies", "third", "hangs", "last"]
    stage = Stage("none", names, Setting("cpu", True, tmp_path), 600, False)
    stage.command = [sys.executable, str(tmp_path / "child.py")]
    stage.environment["PYTHONPATH"] = str(ROOT)
    rows = []

    class Lines(queue.Queue[str | None]):
        """What the child prints; the stage's time is over as soon as one row has begun."""

        def get(self, block=True, timeout=None):
            line = super().get(block, timeout)
            if line is not None and '"begun": "hangs"' in line:
                stage.ends = 0.0
            return line

    monkeypatch.setattr(run, "queue", SimpleNamespace(Queue=Lines, Empty=queue.Empty))
    stage.run(rows.append)
    verdicts = {r["row"]: r["verdict"] for r in rows}
    assert list(verdicts) == names and [r["value"] for r in rows if r["verdict"] == "runs"] == [3.0] * 3
    assert verdicts["gpu"] == "skipped: no CUDA device"
    assert verdicts["raises"] == "failed: ValueError: an error with its reason"
    assert verdicts["dies"].startswith("failed: status -11")
    assert verdicts["hangs"] == "cut: the stage's 600 s were over"
    assert verdicts["last"] == "skipped: the stage's 600 s were over"


def test_a_child_ends_with_its_parent(tmp_path):
    """A run that is killed would leave a stage on the GPU, beside the next run's."""
    at = tmp_path / "at"
    os.mkfifo(at)
    held = f"held = open({str(at)!r}, 'w'); held.write('begun'); held.flush(); time.sleep"
    (tmp_path / "child.py").write_text(CHILD.replace("time.sleep", held))
    parent = PARENT.format(command=[sys.executable, str(tmp_path / "child.py")], work=str(tmp_path))
    other, events = os.open(at, os.O_RDONLY | os.O_NONBLOCK), select.poll()
    events.register(other)
    with subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert events.poll(60_000) and os.read(other, 5) == b"begun"
        process.kill()
    assert events.poll(60_000) == [(other, select.POLLHUP)]  # nobody holds the file any more
    os.close(other)


@pytest.fixture
def here(monkeypatch):
    """The whole command without a GPU, its stages in this process, products by torch."""
    torch_products.install(monkeypatch)
    monkeypatch.setattr(run, "_follow", lambda: None)
    processes = SimpleNamespace(Popen=Here, PIPE=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run, "subprocess", processes)
    monkeypatch.setattr(day, "probed", lambda: {"device": "cpu"})


class Here:
    """A stage's process that has run in this one, by the command that starts it."""

    def __init__(self, command, **given):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), patch.object(sys, "argv", command[command.index("-m") + 1 :]):
            day.main()
        self.stdin, self.stdout, self.returncode = io.StringIO(), io.StringIO(printed.getvalue()), 0

    def wait(self, timeout):
        """Do nothing: it has ended."""


def ran(monkeypatch, *arguments):
    """Run the command's quick form; return its status."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu_day", "--quick", *arguments])
    with pytest.raises(SystemExit) as ended:
        day.main()
    return int(ended.value.code or 0)


def test_it_runs_to_its_end_without_a_gpu(here, tmp_path, monkeypatch, capsys):
    """Rows that need a device are skipped by name; the others run, and what can be checked holds."""
    assert ran(monkeypatch, "--work", str(tmp_path)) == 0
    document = json.loads((tmp_path / day.FILE).read_text())
    setting = Setting("cpu", True, tmp_path)
    every = {(s, n): e for s in day.STAGES for n, e in day.entries(s, setting).items()}
    got = {(r["stage"], r["row"]): r["verdict"] for r in document["rows"]}
    assert list(got) == list(every)
    for key, entry in every.items():
        if not entry.on_cpu:
            assert got[key] == "skipped: no CUDA device", key
        else:
            assert got[key] in ("holds", "runs"), (key, got[key])
    assert all(t["met"] for t in document["targets"]) and document["gpu"] is None
    assert "skipped: no CUDA device" in capsys.readouterr().out
    names = [name for stage, name in every if stage in ("machine", "large")]
    assert [n for n in names if "pinned" in n][-2:] == names[names.index("bundles are written") + 1 :][:2]  # come first


def test_a_killed_run_keeps_its_rows(small, monkeypatch):
    """Each is in the file before the next begins."""

    def killed(self, on_row):
        on_row(shown(self.left[0], Measured(3.0, "us"), False))
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "run", killed)
    out = small.work / "day.json"
    with pytest.raises(KeyboardInterrupt):
        day.measure(small, {"machine": ["launch", "copy inside the device"]}, 1.0, out, day.begun(out, small))
    assert [(r["row"], r["value"]) for r in json.loads(out.read_text())["rows"]] == [("launch", 3.0)]


def test_a_bundle_is_found_again(small, monkeypatch):
    """Whole, and by the same sources; else, or after a run that was interrupted, it is written anew, alone."""
    real = bundle.write_bundle
    written = []

    def write(shape, target):
        written.append(target)
        real(shape, target)

    monkeypatch.setattr(bundle, "write_bundle", write)
    path = bundles.made_bundle(small, bundles.FEW)
    assert bundles.made_bundle(small, bundles.FEW) == path and written == [path]

    layer = path / "experts/w4/layer-001.safetensors"
    layer.write_bytes(layer.read_bytes()[:-1])
    with monkeypatch.context() as interrupted:
        interrupted.setattr(bundle, "_tables", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bundles.made_bundle(small, bundles.FEW)
    assert list(small.work.iterdir()) == []
    killed = path.with_name(f".{path.name}.partial-0123abcd")
    killed.mkdir()
    assert bundles.made_bundle(small, bundles.FEW) == path and list(small.work.iterdir()) == [path]
    assert verify(path) == []

    monkeypatch.setattr(bundles, "_made_from", lambda shape: "0" * bundles.DIGITS)
    other = bundles.made_bundle(small, bundles.FEW)
    assert list(small.work.iterdir()) == [other] and written == [path, path, path, other]


@pytest.fixture
def small(tmp_path):
    return Setting("cpu", True, tmp_path)


def test_promotions_behind_stand_ins(small, monkeypatch):
    """The halves that only a GPU runs, by its stand-in; no rule of streams and copies is broken."""
    gpu = install(monkeypatch, patience=0, computes=False)
    found = served.promotions(small, 8)
    assert found.value > 0 and found.more["host memory"] == "mapped"
    found = served.checked(small)
    assert found.value == 0 and found.more["promotions"] >= 4 and found.more["extents looked at"] >= 16
    assert gpu.wrong() == []


def test_a_paged_model_and_one_with_pinned_experts(small, monkeypatch):
    """As on a GPU: no token waits for the host."""
    gpu = install(monkeypatch, patience=0, computes=False)
    monkeypatch.setattr(large, "PROMPT", 16)
    monkeypatch.setattr(large, "_ids", lambda setting: ([*range(16)], [*range(6)]))
    for label in list(large.BUDGETS)[:2]:
        found = large.limited(small, *large.BUDGETS[label])
        assert found.value > 0 and found.more["waits"] == 0, label
    assert gpu.wrong() == [] and verify(bundles.made_bundle(small, large.QUARTER)) == []
