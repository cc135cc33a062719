"""The pipeline: stages and one pass give the same bytes, a stopped build resumes, settings are not mixed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tree

import moepack
from moepack.pack.errors import InputError, TargetError
from moepack.pack.reader import open_bundle
from moepack.pipeline import build as pipeline
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.run import Run
from moepack.progress import Reporter
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify

RTN = """
quantize: {method: rtn, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def test_stages_write_the_same_bytes_as_one_pass(demo_model: Path, text: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(RTN, "test")
    pipeline.build(demo_model, tmp_path / "once", recipe, [text])
    pipeline.calibrate(demo_model, tmp_path / "work", recipe, [text])
    pipeline.quantize(tmp_path / "work")
    pipeline.pack(tmp_path / "work", tmp_path / "staged")
    assert digests(tmp_path / "once") == digests(tmp_path / "staged")
    pipeline.build(demo_model, tmp_path / "resumed", recipe, [text], work=tmp_path / "work")
    assert digests(tmp_path / "once") == digests(tmp_path / "resumed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["once", "resumed", "staged", "work"]


def test_a_recipe_made_in_python_is_kept_as_it_is(demo_model: Path, text: Path, tmp_path: Path) -> None:
    """By every stage: one without a text, and one whose text says something else."""
    said = "versions: [bf16, w4]\nquantize: {method: rtn, loss_tokens: 64}\n"
    said += "calibration: {samples: 4, length: 64, batch_size: 2}\nallocation: {average_bits: 6, method: greedy}"
    wanted = parse_recipe(said, "test")
    for text_of_it in ("", RTN):
        work, bundle = tmp_path / f"work{len(text_of_it)}", tmp_path / f"bundle{len(text_of_it)}"
        pipeline.calibrate(demo_model, work, replace(wanted, text=text_of_it), [text])
        pipeline.quantize(work)
        pipeline.pack(work, bundle)
        found = open_bundle(bundle).manifest
        kept = parse_recipe(str(found.provenance["recipe"]), "kept")
        assert replace(kept, text="") == replace(wanted, text="") and found.versions == wanted.version_specs()
        assert found.allocation is not None


def test_a_build_after_calibrate_computes_nothing_twice(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = parse_recipe(RTN, "test")
    pipeline.calibrate(demo_model, tmp_path / "work", recipe, [text])
    from moepack.calibrate.forward import CalibrationPass

    def fail(*args: object) -> None:
        pytest.fail("the calibration pass ran again")

    monkeypatch.setattr(CalibrationPass, "run_layer", fail)
    pipeline.build(demo_model, tmp_path / "bundle", recipe, [text], work=tmp_path / "work")
    assert verify(tmp_path / "bundle", demo_model) == []


@pytest.mark.parametrize("stop_after", [0, 2, 3])
def test_a_stopped_build_resumes_to_the_same_bytes(
    stop_after: int, demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = parse_recipe(RTN, "test")
    pipeline.build(demo_model, tmp_path / "whole", recipe, [text])
    real = Run._quantise_layer
    ran: list[int] = []

    def stop(self: Run, index: int, *rest: object) -> object:
        if index > stop_after:
            raise KeyboardInterrupt
        ran.append(index)
        return real(self, index, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Run, "_quantise_layer", stop)
    if stop_after < 3:
        with pytest.raises(KeyboardInterrupt):
            pipeline.build(demo_model, tmp_path / "bundle", recipe, [text], work=tmp_path / "work")
        assert not (tmp_path / "bundle").exists()
    stop_after, done = 9, list(ran)
    pipeline.build(demo_model, tmp_path / "bundle", recipe, [text], work=tmp_path / "work")
    assert ran == [0, 1, 2, 3] and ran[: len(done)] == done, "finished layers were done again"
    assert digests(tmp_path / "bundle") == digests(tmp_path / "whole")


def test_killed_and_resumed(demo_model: Path, text: Path, tmp_path: Path) -> None:
    """SIGKILL somewhere in the middle of another process; the lock is free again and the bytes are the same."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RTN.replace("samples: 4", "samples: 64"))
    command = [
        sys.executable, "-m", "moepack", "build", str(demo_model), "-o", str(tmp_path / "bundle"), "-r", str(recipe),
        "-c", str(text), "--work", str(tmp_path / "work"), "--quiet",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    marker = tmp_path / "work" / "quantize" / "layer-001" / "done.json"
    deadline = time.monotonic() + 120
    while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "bundle").exists()
    pipeline.build(demo_model, tmp_path / "bundle", str(recipe), [text], work=tmp_path / "work")
    pipeline.build(demo_model, tmp_path / "whole", str(recipe), [text])
    assert digests(tmp_path / "bundle") == digests(tmp_path / "whole")


def test_changed_settings_are_refused_by_name(demo_model: Path, text: Path, evaluation: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    pipeline.calibrate(demo_model, work, parse_recipe(RTN, "test"), [text])
    pipeline.quantize(work)
    for change, name in (
        (("length: 64", "length: 32"), "calibration tokens"),
        (("batch_size: 2", "batch_size: 4"), "batch_size"),
        (("rtn", "hqq"), "method"),
        (("loss_tokens: 64", "loss_tokens: 65"), "loss_tokens"),
    ):
        with pytest.raises(InputError, match=f"another {name}"):
            pipeline.build(demo_model, tmp_path / "b", parse_recipe(RTN.replace(*change), "t"), [text], work=work)
    with pytest.raises(InputError, match="another calibration tokens"):
        pipeline.build(demo_model, tmp_path / "b", parse_recipe(RTN, "t"), [evaluation], work=work)
    other = parse_recipe(RTN.replace("rtn", "hqq"), "t")
    pipeline.build(demo_model, tmp_path / "b", other, [text], work=work, fresh=True)
    assert inspect(tmp_path / "b")["methods"]["w2"] == {"hqq": 64}


def test_two_builds_in_one_work_directory(demo_model: Path, text: Path, tmp_path: Path) -> None:
    from moepack.pipeline.work import WorkDirectory

    first, other = WorkDirectory(tmp_path / "work"), WorkDirectory(tmp_path / ".b.work-used")
    WorkDirectory(tmp_path / ".b.work-left").close()
    with pytest.raises(TargetError, match="another build is at work"):
        pipeline.build(demo_model, tmp_path / "b", parse_recipe(RTN, "t"), [text], work=tmp_path / "work")
    first.close()
    WorkDirectory(tmp_path / "work").close()
    with pytest.raises(InputError, match=r"no-model"):
        pipeline.build(tmp_path / "no-model", tmp_path / "b", parse_recipe(RTN, "t"), [text])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.work-used", "work"], "a killed build's folder goes"
    other.close()


def test_quantised_by_another_recipe_than_calibrated(demo_model: Path, text: Path, tmp_path: Path) -> None:
    """Nothing is quantised yet, so nothing is mixed; the bundle tells of the recipe that made it."""
    from moepack.pipeline.add import add

    work, other = tmp_path / "work", tmp_path / "other.yaml"
    other.write_text(RTN.replace("rtn", "rtn, min_tokens: 3"))
    pipeline.calibrate(demo_model, work, parse_recipe(RTN, "t"), [text])
    pipeline.quantize(work, str(other))
    pipeline.pack(work, tmp_path / "b")
    assert moepack.open(tmp_path / "b").manifest.provenance["recipe"] == other.read_text()
    add(tmp_path / "b", work, ["w1"])
    assert "w1" in [v.name for v in moepack.open(tmp_path / "b").versions]
    with pytest.raises(InputError, match="another min_tokens: 3, now 0"):
        pipeline.build(demo_model, tmp_path / "c", parse_recipe(RTN, "t"), [text], work=work)
    (work / "settings.json").unlink()
    with pytest.raises(InputError, match="run moepack calibrate first"):
        pipeline.quantize(work)


def test_calibration_of_another_recipe_is_not_gone_by(demo_model: Path, text: Path, tmp_path: Path) -> None:
    """Nor told of in the bundle: nothing was calibrated by it."""
    work = tmp_path / "work"
    first = parse_recipe(RTN, "t")
    pipeline.calibrate(demo_model, work, first, [text])
    calibration = replace(first.calibration, samples=512, seed=9, data=())
    notes = Notes()
    pipeline.quantize(work, replace(first, calibration=calibration, mtp="keep"), reporter=notes)
    pipeline.pack(work, tmp_path / "b")
    provenance = moepack.open(tmp_path / "b").manifest.provenance
    assert parse_recipe(str(provenance["recipe"]), "kept") == replace(first, text=str(provenance["recipe"]))
    assert any("calibrated already" in note for note in notes.notes)
    (work / "run.json").write_text("[]")
    for use in (lambda: pipeline.quantize(work), lambda: pipeline.pack(work, tmp_path / "c")):
        with pytest.raises(InputError, match="run moepack calibrate first"):
            use()


class Notes(Reporter):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_starting_over_is_stopped(
    demo_model: Path, text: Path, evaluation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What followed from the text before is not taken for what follows from the new one, wherever --fresh stopped."""
    from moepack.pipeline.work import WorkDirectory

    work, recipe = tmp_path / "work", parse_recipe(RTN, "t")
    pipeline.build(demo_model, tmp_path / "new", recipe, [evaluation])
    for stops, at in ((WorkDirectory, "begin"), (shutil, "rmtree")):
        pipeline.build(demo_model, tmp_path / "old", recipe, [text], work=work, fresh=True)
        real, seen = getattr(stops, at), list[object]()

        def stop(*args: Any, real: Any = real, seen: list[object] = seen, **more: Any) -> Any:
            seen.append(args)
            if len(seen) == 2:
                raise KeyboardInterrupt
            return real(*args, **more)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(stops, at, stop)
            pipeline.build(demo_model, tmp_path / "b", recipe, [evaluation], work=work, fresh=True)
        with contextlib.suppress(InputError):  # refused, or whole
            pipeline.calibrate(demo_model, work, recipe, [evaluation])
            pipeline.build(demo_model, tmp_path / "b", recipe, [evaluation], work=work)
            assert tree(tmp_path / "b") == tree(tmp_path / "new")
            shutil.rmtree(tmp_path / "b")
        shutil.rmtree(tmp_path / "old")
        shutil.rmtree(work)


def test_stages_in_the_wrong_order(demo_model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run moepack calibrate first"):
        pipeline.quantize(tmp_path / "work")
    with pytest.raises(InputError, match="run moepack calibrate first"):
        pipeline.pack(tmp_path / "work", tmp_path / "b")
    pipeline.calibrate(demo_model, tmp_path / "work", parse_recipe(RTN, "t"), [text])
    with pytest.raises(InputError, match="not quantised"):
        pipeline.pack(tmp_path / "work", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_manifest_tells_how_the_bundle_was_made(bundle: Path) -> None:
    manifest = moepack.open(bundle).manifest
    made = manifest.provenance
    assert "method: rtn" in made["recipe"] and made["method"] == "rtn"
    assert made["calibration"]["samples"] == 16 and len(made["calibration"]["tokens_sha256"]) == 64
    assert made["tools"]["moepack"] == moepack.__version__ and "torch" in made["tools"]
    assert list(made["checkpoint"]["files"]) == ["config.json", "model.safetensors"]
    assert str(Path.home()) not in json.dumps(dict(made)) and "/" not in made["checkpoint"]["name"]


def test_loss_falls_with_width(bundle: Path) -> None:
    tables = moepack.open(bundle).calibration()
    falls = np.concatenate([(np.diff(t.relative, axis=1) > 0).all(1) for t in tables.layers])
    assert falls.mean() >= 0.99


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE behaves so on Linux")
def test_a_full_disk_is_one_line_and_leaves_nothing(demo_model: Path, text: Path, tmp_path: Path) -> None:
    """A limit on file size stands in for a full disk: the write fails in the middle of a stage."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RTN)
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from moepack.cli import main\n"
        "import torch, transformers, moepack.pack.codec.exponent_fast\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        f"sys.argv = ['moepack', 'build', {str(demo_model)!r}, '-o', {str(tmp_path / 'out' / 'b')!r}, "
        f"'-r', {str(recipe)!r}, '-c', {str(text)!r}, '-q']\n"
        "main()"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert out.returncode == 2
    assert [line for line in out.stderr.splitlines() if line.startswith("moepack: ")], out.stderr
    assert "Traceback" not in out.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
