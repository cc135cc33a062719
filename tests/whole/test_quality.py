"""What the versions may cost on trained models: the one in examples/, and a larger one where it stands beside.

Bounds are per cent of perplexity above plain transformers in float32, at least half as much again as was measured.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from support import ROOT, build_from

import moepack
from moepack.pipeline.build import build
from moepack.pipeline.recipe import load_recipe
from moepack.reports.evaluate import evaluate
from moepack.reports.inspect import inspect
from moepack.runtime.planning.options import LoadOptions


@dataclass(frozen=True)
class Case:
    """A model, what it is calibrated and evaluated on, and what its versions may cost."""

    model: Path
    calibration: tuple[Path, ...]
    data: tuple[Path, ...]
    samples: int  # of 256 tokens, to calibrate on
    windows: int  # of 256 tokens, to evaluate on for each file
    most: dict[str, float]  # version -> per cent. The bundle has these and w1
    one_bit: float  # mean relative output error of w1


EXAMPLES, SHARED = ROOT / "examples", ROOT.parent / "shared"
_CALIBRATION = ("wikitext2-valid.txt", "gsm8k-train-1500.jsonl", "python-stdlib.jsonl")
_DATA = ("wikitext2-test.txt", "gsm8k-test.jsonl", "humaneval.jsonl")
CASES = {
    "example": Case(
        EXAMPLES / "mini-qwen3-moe", (EXAMPLES / "text" / "calibration.jsonl",),
        (EXAMPLES / "text" / "evaluation.jsonl",), 96, 48, {"bf16": 0.01, "w4": 0.6, "w3": 2, "w2": 9, "w1": 70}, 0.3,
    ),
    "shared": Case(
        SHARED / "models" / "tiny-qwen3-moe", tuple(SHARED / "data" / name for name in _CALIBRATION),
        tuple(SHARED / "data" / name for name in _DATA), 32, 8, {"bf16": 0.1, "w4": 0.6, "w2": 6}, 0.25,
    ),
}  # fmt: skip


@functools.cache
def perplexities(case, path, policy):
    """By file."""
    options, data = LoadOptions(policy=policy, dtype="float32"), [str(file) for file in CASES[case].data]
    return [f.perplexity for f in evaluate(path, data, options, length=256, samples=CASES[case].windows).files]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """The bundle of a case by the default method, made when it is first asked for."""
    root = tmp_path_factory.mktemp("quality")

    def made(name):
        case = CASES[name]
        if not (root / name).exists():
            versions = f"versions: [{', '.join(dict.fromkeys([*case.most, 'w1']))}]\n"
            recipe = f"{versions}quantize: {{loss_tokens: 512}}\ncalibration: {{samples: {case.samples}, length: 256}}"
            build_from(recipe, case.model, root / name, case.calibration)
        return root / name

    return made


@pytest.fixture(params=CASES)
def made(request, bundles):
    if not CASES[request.param].model.is_dir():
        pytest.skip("the shared models are not beside this checkout")
    return request.param, bundles(request.param)


def test_losses(made):
    """Loss falls with width for 99 % of experts; one bit is below 0.5 for 97 %."""
    case, bundle = made
    tables = moepack.open(bundle).calibration()
    relative = np.concatenate([t.relative for t in tables.layers])
    assert (np.diff(relative, axis=1) > 0).all(1).mean() >= 0.99
    one_bit = relative[:, tables.versions.index("w1")]
    assert one_bit.mean() < CASES[case].one_bit and (one_bit < 0.5).mean() >= 0.97


def test_perplexity(made):
    case, bundle = made
    plain = perplexities(case, CASES[case].model, None)
    for version, most in CASES[case].most.items():
        ours = perplexities(case, bundle, f"static:{version}")
        rises = [100 * (a / b - 1) for a, b in zip(ours, plain, strict=True)]
        assert max(rises) <= most, (version, rises)


def test_better_than_rounding(bundles, bundle):
    """At every width; `bundle` is the same model rounded to nearest, which takes no calibration."""
    ours = bundles("example")
    for version in ("w4", "w3", "w2", "w1"):
        made, rounded = (perplexities("example", path, f"static:{version}") for path in (ours, bundle))
        assert made < rounded, version
    made_by = inspect(ours)["methods"]
    assert made_by["w1"].get("sign", 0) >= 60 and made_by["w2"].get("gptq", 0) >= 56


def test_the_default_recipe_loses_less_at_equal_bytes(bundles, tmp_path):
    """Than versions of one width, between whose divergences (logarithms, by bits) it lies."""
    case = CASES["example"]
    recipe = load_recipe("default")
    windows = replace(recipe.calibration, samples=case.samples, length=256)
    quantize = replace(recipe.quantize, loss_tokens=512)
    calibration = [str(file) for file in case.calibration]
    shortened = replace(recipe, calibration=windows, quantize=quantize, text="")
    build(case.model, tmp_path / "bundle", shortened, calibration)

    def bits_and_divergence(path, version):
        options = LoadOptions(policy=f"static:{version}", dtype="float32")
        data = [str(file) for file in case.data]
        divergence = evaluate(path, data, options, length=256, samples=case.windows, kl=True).kl
        return inspect(path)["versions"][version]["bits_per_weight"], np.log(divergence)

    line = [bits_and_divergence(bundles("example"), version) for version in ("w2", "w3", "w4")]
    for version in ("w2d3", "w3d4"):
        bits, divergence = bits_and_divergence(tmp_path / "bundle", version)
        assert divergence < np.log(0.75) + np.interp(bits, *zip(*line, strict=True)), version
