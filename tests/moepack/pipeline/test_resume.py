"""Killed builds resume to the same bytes; a full disk is one line, and the build goes on once there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import HELPERS, tree

from moepack.pack.errors import InputError, TargetError
from moepack.pipeline.build import build, quantize
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
quantize: {method: rtn, group_size: 64, loss_tokens: 128}
calibration: {samples: 8, length: 128, batch_size: 8}
"""


@pytest.mark.parametrize("how", [[], ["--stages"]], ids=["build", "calibrate, build"])
def test_kills_at_random_moments(how: list[str], short_model: Path, text: Path, tmp_path: Path) -> None:
    """Twenty of each, and on Ray of the build and of its workers, were made by hand with the same script."""
    script = HELPERS / "kill_and_resume.py"
    command = [sys.executable, str(script), str(short_model), str(text), str(tmp_path), "--kills", "2", *how]
    environment = {**os.environ, "PYTHONPATH": str(script.parent)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert "2 kills" in run.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB: less than the demo model's bundle takes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs more rights; test_pipeline limits file sizes instead")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_then_room(small_disk: Path, demo_model: Path, text: Path, tmp_path: Path) -> None:
    recipe, work, bundle = parse_recipe(RECIPE, "test"), small_disk / "work", small_disk / "bundle"
    build(demo_model, tmp_path / "reference", recipe, [text])
    with pytest.raises((TargetError, OSError), match=r"(?i)no space|cannot be written") as caught:
        build(demo_model, bundle, recipe, [text], work=work)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in small_disk.iterdir()) == ["work"]
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    build(demo_model, bundle, recipe, [text], work=work)
    assert tree(bundle) == tree(tmp_path / "reference")
    assert not list((work / "objects").iterdir()), "objects are dropped once their layer is done"


def test_nothing_is_thrown_away_that_cannot_be_made_again(short_model: Path, text: Path, tmp_path: Path) -> None:
    recipe, work = parse_recipe(RECIPE, "test"), tmp_path / "work"
    build(short_model, tmp_path / "bundle", recipe, [text], work=work)
    before = tree(work / "quantize")
    with pytest.raises(InputError, match="layer 0: what its experts saw was not kept"):
        quantize(work, fresh=True)
    assert before and tree(work / "quantize") == before
    (work / "calibrate" / "layer-001" / "done.json").unlink()  # as after a calibration that was killed
    (work / "calibrate" / "layer-000" / "observation.safetensors").touch()
    with pytest.raises(InputError, match="layer 1 is not calibrated: run moepack calibrate to its end"):
        quantize(work, fresh=True)
    assert tree(work / "quantize") == before


def test_a_killed_layer_keeps_its_finished_batches(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of four experts: the second run makes only those that the first had not."""
    import moepack.pipeline.executors
    import moepack.quantize.expert_batch as module

    monkeypatch.setattr(module, "MOST", 4)
    recipe, made = parse_recipe(RECIPE, "test"), []
    original = moepack.pipeline.executors.make_batch

    def counted(task, *rest):  # type: ignore[no-untyped-def]
        made.append((task.layer, task.experts.start))
        if len(made) == 7:
            raise KeyboardInterrupt
        return original(task, *rest)

    monkeypatch.setattr(moepack.pipeline.executors, "make_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        build(demo_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
    assert made[-1] == (1, 8) and len(list((tmp_path / "w" / "objects").iterdir())) == 2
    build(demo_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
    assert made[7:] == [(1, 8), (1, 12), *((layer, e) for layer in (2, 3) for e in (0, 4, 8, 12))]
    build(demo_model, tmp_path / "c", recipe, [text])
    assert tree(tmp_path / "b") == tree(tmp_path / "c")


def test_losses_of_two_estimates_are_not_mixed(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither finished layers nor a layer's finished batches are taken from a run that estimated otherwise."""
    import moepack.pipeline.executors
    import moepack.quantize.losses

    recipe, addresses = parse_recipe(RECIPE, "test"), []
    original, now = moepack.pipeline.executors.make_batch, moepack.quantize.losses.ESTIMATE

    def stopped(task, *rest):  # type: ignore[no-untyped-def]
        for number in (now - 1, now, now):
            monkeypatch.setattr(moepack.quantize.losses, "ESTIMATE", number)
            addresses.append(task.address("observed"))
        if task.layer:
            raise KeyboardInterrupt
        return original(task, *rest)

    monkeypatch.setattr(moepack.pipeline.executors, "make_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        build(demo_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
    assert addresses[0] != addresses[1] == addresses[2]
    monkeypatch.setattr(moepack.quantize.losses, "ESTIMATE", now + 1)
    with pytest.raises(InputError, match=rf"another estimate of losses: {now}, now {now + 1}: .*--fresh"):
        build(demo_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
