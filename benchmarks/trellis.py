"""Trellis versions beside affine ones: what each leaves of a model's divergence at as many bits.

    python -m benchmarks.trellis --model DIR [--layers N]
    python -m benchmarks.trellis --quick

Of the same weights and second moments, each version quantises the experts of every N-th layer, down towards what the
quantised gate and up make (`refine`), with scales of a byte, and the model's divergence from itself is measured in
float32 on text that no version saw. `of affine` is the divergence over that of affine versions at as many bits, on the
line between the logarithms of two of them. The first rows are normal numbers: what is left of their variance as error,
and the processor time of a weight.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import EXAMPLES, Row, arguments, finish
from benchmarks.decoding import Mean
from benchmarks.peers.quality import divergence_of, log_probabilities, replaced
from benchmarks.quantise import Layer, observed
from benchmarks.real.make import written
from benchmarks.real.source import cache
from benchmarks.real.texts import DOMAINS
from benchmarks.real.versions import at_equal_bits
from moepack.calibrate.gather import gather_batch
from moepack.calibrate.text.windows import calibration_windows
from moepack.pack.spec import Version
from moepack.pipeline.recipe import Quantize
from moepack.quantize.expert_batch import Settings, batch_moments, refit_down
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import quantise, quantise_all

AFFINE = ("w1d2", "w2", "w2d3", "w3d4")
TRELLIS = ("t2", "t2d3", "t3")


def fitted(layer: Layer, version: Version) -> list[Tensor]:
    """Both matrices of all experts as a build with `refine` makes them at a version, float32 [experts, rows, cols]."""
    settings = Settings("gptq", (version,), refine=True)
    experts = range(layer.weights.layer.experts)
    batch = gather_batch(layer.module, layer.weights, experts, layer.seen, settings, torch.device("cpu"))
    moments = torch.stack([m.mean() for m in batch_moments(batch)[0]])
    first = quantise_all("gptq", batch.weights[0], moments, [version])
    second = refit_down(batch, settings, first)
    return [dequantise(made[version], version.at(i)) for i, made in enumerate((first, second))]


def of_model(folder: Path, learn: Tensor, held: Tensor, step: int) -> list[Row]:
    """A row a version. `learn` and `held` are int64 [windows, length]; every `step`-th layer is quantised."""
    layers = list(observed(folder, learn))[::step]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    modules = [model.get_submodule(layer.weights.layer.module) for layer in layers]
    weights = [module.get_parameter(n).data for module in modules for n in ("gate_up_proj", "down_proj")]
    reference = log_probabilities(model, held)
    shapes = layers[0].weights.layer.matrices
    rows: list[Row] = []
    for name in (*AFFINE, *TRELLIS):
        version = Version.of(name, Quantize().size(name), scale_bits=8)
        bits = 8 * sum(s.size for s in version.sections(shapes)) / sum(m.weights for m in shapes)
        with torch.inference_mode(), replaced(weights, [made for layer in layers for made in fitted(layer, version)]):
            divergence = Mean.of(divergence_of(model, held, reference))
        kind = "trellis" if version.trellis else "affine"
        row: Row = {"recipe": kind, "version": name, "bits/weight": bits, "KL": divergence.value, "+-": divergence.half}
        print(row, flush=True)
        rows.append(row)
    left = at_equal_bits(rows, "affine", "trellis")
    return [row | {"of affine": left[row["version"]]} if row["version"] in left else row for row in rows]


def of_normal() -> Iterator[Row]:
    """Mean squared error of normal numbers of variance 1, by version."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for name in ("w2", "t2", "w3", "t3"):
        version = Version.of(name, 128, scale_bits=8)
        began = time.process_time()
        made = quantise("gptq", weight[None], torch.eye(512)[None], version)
        spent = 1e6 * (time.process_time() - began) / weight.numel()
        error = (dequantise(made, version)[0] - weight).square().mean()
        kind = "trellis" if version.trellis else "affine"
        yield {"recipe": kind, "version": f"{name}, normal numbers", "normal error": float(error), "us a weight": spent}


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=cache() / "model", help="made by benchmarks.real --make")
    parser.add_argument("--layers", type=int, default=5, help="every so many layers are quantised")
    parser.add_argument("--samples", type=int, default=32, help="windows of 512 tokens to fit to")
    parser.add_argument("--windows", type=int, default=24, help="of 512 tokens to measure on")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        learn, held = _windows(args, Path(work))
    model = EXAMPLES / "mini-qwen3-moe" if args.quick else args.model
    rows = [*of_normal(), *of_model(model, learn, held, 1 if args.quick else args.layers)]
    finish("trellis codes", rows, [], args.json)


def _windows(args: argparse.Namespace, work: Path) -> tuple[Tensor, Tensor]:
    if args.quick:
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "mini-qwen3-moe")
        seen, unseen = ([str(EXAMPLES / "text" / f"{name}.jsonl")] for name in ("calibration", "evaluation"))
        counts = (8, 4)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        seen, unseen = ([written(work, tokenizer, d, held=h) for d in DOMAINS] for h in (False, True))
        counts = (args.samples, args.windows)
    length = 128 if args.quick else 512
    learn, held = (
        calibration_windows(files, tokenizer, count, length, 0).ids
        for files, count in zip((seen, unseen), counts, strict=True)
    )
    return learn, held


if __name__ == "__main__":
    main()
