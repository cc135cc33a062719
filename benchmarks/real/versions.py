"""What each version costs the upcycled model in divergence, perplexity and answers, by recipe."""

import functools
import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

import moepack
from benchmarks.common import Row, build
from moepack.reports.evaluate import evaluate
from moepack.reports.inspect import inspect
from moepack.reports.intervals import clustered
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.served_model import ServedModel

from .tasks import Question, answered, questions

RECIPES = {  # what is built: versions, and options of quantize
    "uniform": ("bf16, w4, w3, w2", "method: gptq"),
    "default": ("bf16, w4d5, w3d4, w2d3", "method: gptq, refine: true, scale_bits: 8"),
}
_CALIBRATION = "{samples: 32, length: 512, batch_size: 4, dtype: float32}"


def compared(
    made: Path,
    work: Path,
    tokenizer: PreTrainedTokenizerBase,
    calibration: Sequence[str],
    data: Sequence[str],
    windows: int,
    each: int,
) -> list[Row]:
    """Build `made` by each recipe under `work`, and evaluate each of its versions on `data` in float32.

    Args:
        windows: of 512 tokens, a file.
        each: questions of each kind.
    """
    asked = questions(each)
    rows: list[Row] = []
    for name, (versions, options) in RECIPES.items():
        bundle = work / name  # removed before the next one: each has several gigabytes
        text = f"versions: [{versions}]\nquantize: {{{options}}}\ncalibration: {_CALIBRATION}"
        build(made, bundle, text, calibration)
        for version, described in inspect(bundle)["versions"].items():
            if version == "bf16" and rows:
                continue
            row = {"recipe": name, "version": version, "bits/weight": described["bits_per_weight"]}
            rows.append(row | scored(bundle, version, tokenizer, data, windows, asked))
            print(rows[-1], flush=True)
        shutil.rmtree(bundle)
    return rows


def scored(
    bundle: Path,
    version: str,
    tokenizer: PreTrainedTokenizerBase,
    data: Sequence[str],
    windows: int,
    asked: Sequence[Question],
) -> Row:
    """What one version of a bundle costs in divergence, perplexity and answers."""
    served = LoadOptions(policy=f"static:{version}", dtype="float32")
    score = evaluate(bundle, data, served, samples=windows, kl=version != "bf16")
    model = moepack.load(bundle, policy=f"static:{version}", dtype="float32")
    with model.moepack:
        right = answered(functools.partial(_logits, model), tokenizer, asked)
    outcomes = [float(outcome) for kind in right.values() for outcome in kind]
    share = clustered(outcomes, [1] * len(outcomes))
    return {
        "KL": score.kl or "",
        "KL, 95 %": _interval(score.kl_interval),
        "perplexity": score.perplexity,
        "right answers %": 100 * share.mean,
        "95 %": f"{100 * share.low:.0f} to {100 * share.high:.0f}",
    }


def at_equal_bits(rows: Sequence[Row], base: str, other: str) -> dict[str, float]:
    """The share of the divergence of recipe `base` that versions of another leave, at as many bits a weight of experts.

    The base's divergence there lies on the line between the logarithms of its neighbours'. A version with more or
    fewer bits than all of the base's has no share, and neither has one without a positive divergence.
    """
    line = sorted((row["bits/weight"], math.log(row["KL"])) for row in rows if row["recipe"] == base and _diverges(row))
    shares = {}
    for row in rows:
        if row["recipe"] != other or not _diverges(row):
            continue
        for (bits, kl), (more, less) in itertools.pairwise(line):
            if bits <= row["bits/weight"] <= more:
                part = (row["bits/weight"] - bits) / (more - bits)
                shares[row["version"]] = row["KL"] / math.exp(kl + part * (less - kl))
    return shares


def _diverges(row: Row) -> bool:
    return isinstance(row["KL"], float) and row["KL"] > 0


def _logits(model: ServedModel, ids: Tensor) -> Tensor:
    return cast(Tensor, model(input_ids=ids, use_cache=False).logits)


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"
