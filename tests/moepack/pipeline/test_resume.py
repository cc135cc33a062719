"""Killed builds resume to the same bytes; a full disk is one line, and the build goes on once there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import HELPERS, ROOT, tree

from moepack.pack.errors import InputError
from moepack.pipeline.build import build, quantize
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
quantize: {method: rtn, group_size: 64, loss_tokens: 128}
calibration: {samples: 8, length: 128, batch_size: 8}
"""


def test_kills_at_random_moments(short_model: Path, text: Path, tmp_path: Path) -> None:
    """By hand the same script made twenty of each of its kinds. test_identity.py stops stages at their seams."""
    script = HELPERS / "kill_and_resume.py"
    command = [sys.executable, str(script), str(short_model), str(text), str(tmp_path), "--kills", "2"]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}"}
    )
    assert run.returncode == 0, run.stderr
    assert "2 kills" in run.stdout


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
    short_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of four experts: the second run makes only those that the first had not."""
    import moepack.pipeline.executors
    import moepack.quantize.expert_batch as module

    monkeypatch.setattr(module, "MOST", 4)
    recipe, made = parse_recipe(RECIPE, "test"), []
    original = moepack.pipeline.executors.local.make_expert_batch

    def counted(task, *rest):  # type: ignore[no-untyped-def]
        made.append((task.layer, task.experts.start))
        if len(made) == 7:
            raise KeyboardInterrupt
        return original(task, *rest)

    monkeypatch.setattr(moepack.pipeline.executors.local, "make_expert_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        build(short_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
    assert made[-1] == (1, 8) and len(list((tmp_path / "w" / "objects").iterdir())) == 2
    build(short_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
    assert made[7:] == [(1, 8), (1, 12)]
    build(short_model, tmp_path / "c", recipe, [text])
    assert tree(tmp_path / "b") == tree(tmp_path / "c")


def test_losses_of_two_estimates_are_not_mixed(
    short_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither finished layers nor a layer's finished batches are taken from a run that estimated otherwise."""
    import moepack.pipeline.executors
    import moepack.quantize.losses

    recipe, addresses = parse_recipe(RECIPE, "test"), []
    original, now = moepack.pipeline.executors.local.make_expert_batch, moepack.quantize.losses.ESTIMATE

    def stopped(task, *rest):  # type: ignore[no-untyped-def]
        for number in (now - 1, now, now):
            monkeypatch.setattr(moepack.quantize.losses, "ESTIMATE", number)
            addresses.append(task.address("observed"))
        if task.layer:
            raise KeyboardInterrupt
        return original(task, *rest)

    monkeypatch.setattr(moepack.pipeline.executors.local, "make_expert_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        build(short_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
    assert addresses[0] != addresses[1] == addresses[2]
    monkeypatch.setattr(moepack.quantize.losses, "ESTIMATE", now + 1)
    with pytest.raises(InputError, match=rf"another estimate of losses: {now}, now {now + 1}: .*--fresh"):
        build(short_model, tmp_path / "b", recipe, [text], work=tmp_path / "w")
