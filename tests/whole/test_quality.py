"""What the versions may cost on a trained model of 21 M parameters, where it stands beside the checkout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moepack
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.evaluate import evaluate
from moepack.reports.verify import verify


@pytest.fixture(scope="module")
def tiny(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [shared / "data" / n for n in ("wikitext2-valid.txt", "gsm8k-train-1500.jsonl", "python-stdlib.jsonl")]
    recipe = parse_recipe("calibration: {samples: 192, length: 256, batch_size: 16}", "test")
    path = tmp_path_factory.mktemp("tiny") / "bundle"
    build(shared / "models" / "tiny-qwen3-moe", path, recipe, texts)
    return path


def test_bit_identity(tiny: Path, shared: Path) -> None:
    assert verify(tiny, shared / "models" / "tiny-qwen3-moe") == []


def test_losses(tiny: Path) -> None:
    """Loss falls with width for 99 % of experts; one bit is below 0.5, and 0.25 on average."""
    tables = moepack.open(tiny).calibration()
    relative = np.concatenate([t.relative for t in tables.layers])
    assert (np.diff(relative, axis=1) > 0).all(1).mean() >= 0.99
    one_bit = relative[:, tables.versions.index("w1")]
    assert one_bit.mean() < 0.25 and (one_bit < 0.5).mean() >= 0.97


def test_perplexity(tiny: Path, shared: Path) -> None:
    data = [str(shared / "data" / n) for n in ("wikitext2-test.txt", "gsm8k-test.jsonl", "humaneval.jsonl")]
    plain = evaluate(shared / "models" / "tiny-qwen3-moe", data, dtype="float32", samples=32)
    for version, most in (("bf16", 0.1), ("w4", 0.6), ("w3", 1.5), ("w2", 6.0)):
        ours = evaluate(tiny, data, f"static:{version}", dtype="float32", samples=32)
        for a, b in zip(ours.files, plain.files, strict=True):
            assert 100 * (a.perplexity / b.perplexity - 1) <= most, (version, a.file)
