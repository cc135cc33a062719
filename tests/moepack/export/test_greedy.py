"""What the libraries that read exports say, held to what the bundle says: greedy texts and perplexity."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exported.__main__ import READER, Said, compared, interpreter, judged, said
from moepack.calibrate.text.windows import calibration_windows, load_tokenizer
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
versions: [bf16, w4]
quantize: {method: rtn, group_size: 64, loss_tokens: 64, zeros: symmetric}
calibration: {samples: 4, length: 64, batch_size: 4}
"""


@pytest.fixture(scope="module")
def symmetric(demo_model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("greedy") / "bundle"
    build(demo_model, path, parse_recipe(RECIPE, "test"), [text])
    return path


@pytest.fixture(scope="module")
def ours(symmetric: Path, demo_model: Path, text: Path) -> Said:
    windows = calibration_windows([str(text)], load_tokenizer(demo_model), 8, 96, 0).ids.numpy()
    return said(symmetric, windows, 5, 24)


@pytest.mark.parametrize("target", READER)
def test_it_says_what_the_bundle_says(target: str, symmetric: Path, ours: Said, tmp_path: Path) -> None:
    python = interpreter(target)
    if python is None:
        pytest.skip(f"{READER[target]} is not installed")
    row = compared(symmetric, target, python, ours, tmp_path)
    assert [t.name for t in judged([row]) if not t.met] == [], row
    assert row["same tokens"] >= 0.95 * row["tokens"] and 0 < row["+-"] < row["perplexity"]
