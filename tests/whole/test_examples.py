"""The training script makes a model that the pipeline takes."""

import runpy
import sys

from support import ROOT

from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.evaluate import evaluate
from moepack.reports.verify import verify


def test_train_then_build(text, evaluation, tmp_path, monkeypatch, capsys):
    command = [
        ROOT / "examples" / "train.py", "--text", text, "-o", tmp_path / "model", "--steps", "40",
        "--batch", "4", "--length", "64", "--vocabulary", "512", "--layers", "2", "--hidden", "32", "--experts", "4",
        "--expert-size", "32",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [str(c) for c in command])
    runpy.run_path(str(command[0]), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if "loss" in line]
    assert losses and losses[-1] < 6.2, "it does not learn: a uniform guess over 512 tokens has a loss of 6.24"
    recipe = parse_recipe("quantize: {method: rtn}\ncalibration: {samples: 8, length: 64}", "test")
    build(tmp_path / "model", tmp_path / "bundle", recipe, [text])
    assert verify(tmp_path / "bundle", tmp_path / "model") == []
    assert evaluate(tmp_path / "bundle", [str(evaluation)], length=64, samples=8).perplexity < 512
