"""The dry run: its bytes are those of the bundle that the build then makes, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from typer.testing import CliRunner

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.dense import watch_part
from moepack.calibrate.forward import Observation
from moepack.calibrate.stream import StreamedModel
from moepack.calibrate.tokens import LAYER, LayerTokens, expert_tokens
from moepack.cli import app
from moepack.pack.errors import InputError, MoepackError
from moepack.pipeline import estimate as module
from moepack.pipeline.bound import place
from moepack.pipeline.build import build
from moepack.pipeline.estimate import _shared_out, estimate
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.inspect import inspect

RECIPE = """
quantize: {method: rtn, group_size: {w4: 128, w2: 32}, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_bytes_are_exact(family: str, demo_model: Path, text: Path, tmp_path: Path) -> None:
    """With biases, transposed and interleaved matrices, and layers without experts among the families."""
    checkpoint = tiny_models.save_tiny(family, tmp_path / "checkpoint", demo_model)
    recipe = parse_recipe(RECIPE, "test")
    expected = estimate(checkpoint, tmp_path / "out" / "bundle", recipe, [text])
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    build(checkpoint, tmp_path / "bundle", recipe, [text])
    facts = inspect(tmp_path / "bundle")
    assert expected.versions == {name: v["bytes"] for name, v in facts["versions"].items()}
    headers = 64 * 1024
    assert expected.dense_bytes <= facts["dense_bytes"] <= expected.dense_bytes + headers
    assert expected.experts == facts["experts"] and expected.layers == facts["moe_layers"]
    assert all(part > 0 for part in expected.memory.values()) and expected.seconds["quantise"] > 0


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


def test_the_probe_is_of_what_a_build_brings_experts() -> None:
    """Of 32 experts three with as many tokens as few, some and many get, beside tokens that they were not sent."""
    g = torch.Generator().manual_seed(0)
    # Of 300 tokens expert e is sent one in 32 - e, so that experts come in the order of their tokens.
    sent = [[e if t % (32 - e) == 0 else 32 for e in range(32)] for t in range(300)]
    seen = Observation(torch.randn(300, 8, generator=g), torch.tensor(sent, dtype=torch.int32), torch.ones(300, 32), 50)
    made = _shared_out(seen, 60_000, 32, 3)
    shares = [200 * sum(t % (32 - e) == 0 for t in range(300)) for e in (5, 16, 26)]
    layer = LayerTokens.of(made)
    assert len(made.inputs) == shares[-1] + 2 * LAYER and len(layer.learn) == LAYER
    for e, share in enumerate(shares):
        tokens = expert_tokens(made, layer, e, 8, 10**9, 4096)
        assert len(tokens.learn) == share and len(tokens.measure) == min(share, 4096) and len(tokens.others) > 64
    every = Observation(seen.inputs, torch.arange(4, dtype=torch.int32).repeat(300, 1), torch.ones(300, 4), 50)
    few = _shared_out(every, 100, 4, 3)  # every token to every expert
    assert few.inputs.shape == (100, 8) and few.experts.tolist() == [[0, 1, 2]] * 100


@pytest.mark.parametrize("workers", [1, 3])
def test_the_probe_makes_as_many_batches_at_once_as_a_build(
    workers: int, demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits here for as many others; the first, of one expert, has none at its side."""
    together, alone, make = threading.Barrier(workers), [], module.make_expert_batch

    def waiting(task: Any, *rest: Any) -> Any:
        if len(task.experts) == 1:
            alone.append(task)
        else:
            together.wait(timeout=30)
        return make(task, *rest)

    recipe = parse_recipe(RECIPE, "test")
    monkeypatch.setattr(module, "make_expert_batch", waiting)
    monkeypatch.setattr(module, "workers", lambda device, need: workers)
    batches = [range(n, n + 4) for n in range(0, 16, 4)]
    monkeypatch.setattr("moepack.quantize.expert_batch.expert_batches", lambda *asked: batches)
    monkeypatch.setattr(module, "place", lambda *asked: replace(place(*asked), batches=workers))
    assert estimate(demo_model, tmp_path / "bundle", recipe, [text]).seconds["quantise"] > 0
    assert len(alone) == 1 and together.n_waiting == 0


@pytest.mark.parametrize(("windows", "available", "times"), [(6, 1 << 40, 5 + 5 + 1), (6, 0, 15), (4, 1 << 40, 10)])
def test_batches_are_timed_as_a_build_has_them(
    windows: int, available: int, times: int, demo_model: Path, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With memory that is reused, all of a layer's batches but the first two take what one takes that finds some; and
    each takes its dense matrices' moments, of the tokens that are learnt from in all windows."""
    warm: list[bool] = []
    watched: list[int] = []

    @contextmanager
    def reusing() -> Iterator[None]:
        warm.append(True)
        yield
        warm.pop()

    def timed(run: Any, *of: Any) -> Any:
        observation, _ = taken(run, *of)
        return observation, 1.0 if warm else 5.0

    def watch(stream: Any, matrices: Any, count: int, length: int) -> Any:
        watched.append(count)
        return watch_part(stream, matrices, count, length)

    def batch(watch: Any, count: int) -> None:
        watched.append(count)

    taken = module._DryRun._pass
    monkeypatch.setattr(module._DryRun, "_pass", timed)
    monkeypatch.setattr(module, "reusing", reusing)
    monkeypatch.setattr("moepack.calibrate.dense.watch_part", watch)
    monkeypatch.setattr("moepack.calibrate.dense.DenseWatch.batch", batch)
    monkeypatch.setattr("moepack.pipeline.bound.available_memory", lambda: available)
    recipe = parse_recipe(f"dense: [w8]\n{RECIPE.replace('samples: 4', f'samples: {windows}')}", "test")
    said = estimate(demo_model, tmp_path / "bundle", recipe, [text])
    layers = len(StreamedModel(open_checkpoint(demo_model)).layers)
    assert said.seconds["calibrate"] == times * layers
    assert watched == [windows] + [2] * (3 if times == 11 else 1)


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
