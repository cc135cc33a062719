"""The dry run: its bytes are those of the bundle that the build then makes, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moepack.cli import app
from moepack.pack.errors import InputError, MoepackError
from moepack.pipeline.build import build
from moepack.pipeline.estimate import estimate
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
quantize: {method: rtn, group_size: {w4: 128, w2: 32}, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def test_command(demo_model: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    arguments = ["build", str(demo_model), "-o", str(tmp_path / "b"), "-r", str(recipe), "-c", str(text), "--dry-run"]
    out = CliRunner().invoke(app, [*arguments, "--json", "--quiet"])
    assert out.exit_code == 0, out.output
    assert set(json.loads(out.stdout)["versions"]) == {"bf16", "w4", "w3", "w2", "w1"}
    assert not (tmp_path / "b").exists()
    shown = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert shown.exit_code == 0 and "bundle, bytes" in shown.output


def test_a_dry_run_refuses_what_a_build_refuses(demo_model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    recipe = parse_recipe(RECIPE, "test")
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("full", {}, "is not empty"),
        ("file/below", {}, "is not a writable directory"),
        ("b", {"work": tmp_path / "file"}, "cannot be used as a work directory"),
        ("b", {"engine": "nope"}, "engine 'nope' is unknown"),
        ("b", {"address": "localhost:1"}, "say --engine ray"),
        ("b", {"engine": "ray", "address": "127.0.0.1:1"}, "Ray at 127.0.0.1:1: nobody answers there"),
        ("b", {"engine": "ray", "address": "a..b:1"}, "Ray at a..b:1: nobody answers there"),
    )
    for output, more, message in cases:
        for run in (estimate, build):
            with pytest.raises(MoepackError, match=message):
                run(demo_model, tmp_path / output, recipe, [text], **more)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]


def test_disk_beside_the_bundle(demo_model: Path, text: Path, tmp_path: Path) -> None:
    """Layer files are linked into the bundle; where the work directory is on another disk, they lie there twice."""
    recipe = parse_recipe(RECIPE, "test")
    near = estimate(demo_model, tmp_path / "b", recipe, [text], work=tmp_path / "w").work_bytes
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm on a disk of its own")
    said = estimate(demo_model, tmp_path / "b", recipe, [text], work=shm / f"work-{os.getpid()}")
    assert said.work_bytes >= near + sum(said.versions.values()) - said.dense_bytes
    assert not (shm / f"work-{os.getpid()}").exists()


def test_what_the_build_would_refuse_is_refused(demo_model: Path, text: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE.replace("samples: 4, length: 64", "samples: 4, length: 2000000"), "test")
    with pytest.raises(InputError):
        estimate(tmp_path / "nothing", tmp_path / "b", recipe, [text])
