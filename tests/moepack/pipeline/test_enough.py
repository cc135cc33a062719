"""Enough text: tokens are counted before a build, windows are taken until they suffice, who stayed short is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import Notes, tree
from tiny_models import save_tiny

import moepack
from moepack.pack.errors import InputError
from moepack.pack.tables import FEW_TOKENS
from moepack.pipeline import build as pipeline
from moepack.pipeline import enough
from moepack.pipeline.recipe import TextSource, parse_recipe
from moepack.reports.inspect import inspect, render

RECIPE = """
versions: [w4]
quantize: {method: rtn, loss_tokens: 64}
calibration: {samples: %d, length: 32, batch_size: 4%s}
"""


def test_windows_are_added_until_they_suffice(
    demo_model: Path, text: Path, evaluation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, until = [text, evaluation], 60
    model = save_tiny("qwen3_moe", tmp_path / "model", demo_model)  # random routers leave no expert out
    pipeline.calibrate(model, tmp_path / "all", parse_recipe(RECIPE % (60, ""), "x"), sources)
    recipe, notes = parse_recipe(RECIPE % (8, f", until: {until}, most: 60"), "x"), Notes()
    pipeline.calibrate(model, tmp_path / "some", recipe, sources, reporter=notes)
    run = json.loads((tmp_path / "some" / "run.json").read_text())
    count = run["samples"]
    assert 8 < count < 60 and sum(run["windows"]) == count and abs(run["windows"][0] - run["windows"][1]) <= 1
    assert notes.notes[0] == f"calibration takes {count} windows: every expert has {until} tokens"
    # Of all 60 windows, source after source, those that are the first `count` in turn: 0, 30, 1, 31 ...
    turn = [2 * (i % 30) + i // 30 for i in range(60)]
    kept = [[i for i in range(60) if turn[i] < n] for n in (count, count - 1)]
    least = []
    for rows in kept:
        tables = [load_file(p) for p in sorted((tmp_path / "all" / "calibrate").glob("layer-*/statistics.safetensors"))]
        by_window = [t["prefill_counts"] + t["decode_counts"] for t in tables]
        least.append(min(int(c[rows].sum(0).min()) for c in by_window))
    assert least[0] >= until > least[1]
    # Going on takes the same windows without counting again; another rule counts.
    monkeypatch.setattr(enough, "_count", lambda *_: pytest.fail("counted again"))
    pipeline.build(model, tmp_path / "b", recipe, sources, work=tmp_path / "some")
    assert moepack.open(tmp_path / "b").manifest.provenance["calibration"]["windows"] == run["windows"]
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"made with (until|most|samples) [0-9]+, now"):
        other = parse_recipe(RECIPE % (8, ", until: 2, most: 60"), "x")
        pipeline.build(model, tmp_path / "c", other, sources, work=tmp_path / "some")


def test_the_limit_is_kept_and_said(demo_model: Path, text: Path, tmp_path: Path) -> None:
    notes = Notes()
    recipe = parse_recipe(RECIPE % (4, ", until: 100000, most: 6"), "x")
    pipeline.build(demo_model, tmp_path / "b", recipe, [text], reporter=notes)
    facts = inspect(tmp_path / "b")
    assert facts["calibration_tokens"] == 6 * 32
    assert "calibration takes 6 windows, the most: 64 experts still have fewer than 100000 tokens" in notes.notes
    # Six windows bring 384 tokens to a layer's 16 experts: most are below what losses need.
    tables = moepack.open(tmp_path / "b").calibration()
    few = sum(int((t.tokens < 256).sum()) for t in tables.layers)
    assert FEW_TOKENS == 256 and few > 32
    said = {"below": 256, "experts": few}
    assert facts["few_tokens"] == said == moepack.open(tmp_path / "b").manifest.provenance["calibration"]["few_tokens"]
    assert any(n.startswith(f"{few} of 64 experts were reached by fewer than 256 tokens") for n in notes.notes)
    assert f"{few} experts had fewer than 256" in str(render(facts).caption)
    assert f"{few} of 64 experts had fewer than 256" in (tmp_path / "b" / "README.md").read_text()


def test_what_cannot_be_is_refused_before_tokens_are_counted(demo_model: Path, text: Path, tmp_path: Path) -> None:
    recipe = RECIPE % (4, ", until: 100, most: 6")
    for more, address, word in (
        ("allocation: {average_bits: 1}", None, "cannot be met"),
        ("", "127.0.0.1:1", "say --engine ray"),
    ):
        notes = Notes()
        with pytest.raises(InputError, match=word):
            pipeline.build(
                demo_model, tmp_path / "b", parse_recipe(recipe + more, "x"), [text], reporter=notes, address=address
            )
        assert notes.notes == []


def test_nothing_is_said_where_all_have_enough() -> None:
    assert enough.advice({}, 64) == ""
    assert "3 of 1,024 experts" in (said := enough.advice({2: 1, 7: 2}, 1024)) and "layer 7: 2" in said


def test_weights_of_a_recipe_reach_the_windows(short_model: Path, text: Path, evaluation: Path, tmp_path: Path) -> None:
    mixed = f"calibration: {{data: [{{source: '{text}', weight: 3}}, '{evaluation}'], samples: 8, length: 32}}"
    recipe = parse_recipe(f"versions: [w4]\nquantize: {{method: rtn, loss_tokens: 64}}\n{mixed}", "x")
    assert recipe.calibration.data == (TextSource(str(text), 3.0), TextSource(str(evaluation), 1.0))
    pipeline.build(short_model, tmp_path / "b", recipe)
    calibration = moepack.open(tmp_path / "b").manifest.provenance["calibration"]
    assert calibration["windows"] == [6, 2] and calibration["sources"] == [text.name, evaluation.name]
    pipeline.build(short_model, tmp_path / "c", recipe, [evaluation])
    assert moepack.open(tmp_path / "c").manifest.provenance["calibration"]["windows"] == [8]
    assert tree(tmp_path / "b") != tree(tmp_path / "c")
