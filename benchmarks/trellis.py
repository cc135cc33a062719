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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.common import EXAMPLES, Row, arguments, finish
from benchmarks.decoding import Mean
from benchmarks.peers.quality import divergence_of, log_probabilities, replaced
from benchmarks.real.make import written
from benchmarks.real.source import cache
from benchmarks.real.texts import DOMAINS
from benchmarks.real.versions import at_equal_bits
from moepack.calibrate.text.windows import calibration_windows
from moepack.pack.spec import Matrix, Version
from moepack.pipeline.recipe import Quantize
from moepack.quantize.expert_batch import RIDGE, SPARSE
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import quantise

if TYPE_CHECKING:
    from torch import nn

AFFINE = ("w1d2", "w2", "w2d3", "w3d4")
TRELLIS = ("t2", "t2d3", "t3")
COLUMNS = ("recipe", "version", "bits/weight", "KL", "+-", "of affine", "normal error", "us a weight")
Fit = Callable[[Tensor, Tensor, int], Tensor]  # weight [rows, cols], moments, 0 for gate and up or 1 for down


@dataclass
class Seen:
    """The experts of one layer, and what reached them."""

    module: nn.Module  # with gate_up_proj and down_proj
    inputs: list[Tensor]
    chosen: list[Tensor]

    def see(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """A forward pre-hook."""
        self.inputs.append(arguments[0])
        self.chosen.append(arguments[1])

    def of(self, expert: int) -> Tensor:
        """The inputs that were sent to an expert, or all of them where it got fewer than 64."""
        inputs = torch.cat(self.inputs)
        own = inputs[(torch.cat(self.chosen) == expert).any(-1)]
        return own if len(own) >= 64 else inputs

    def fitted(self, by: Fit) -> list[Tensor]:
        """Both matrices of all experts, quantised."""
        first, second = (self.module.get_parameter(name).data for name in ("gate_up_proj", "down_proj"))
        act = cast("Callable[[Tensor], Tensor]", self.module.get_submodule("act_fn"))

        def hidden(x: Tensor, weight: Tensor) -> Tensor:
            gate, up = (x @ weight.T).chunk(2, dim=-1)
            return act(gate) * up

        made = first.clone(), second.clone()
        for expert in range(len(first)):
            x = self.of(expert)
            made[0][expert] = by(first[expert], x.T @ x / len(x), 0)
            exact = hidden(x, first[expert])
            got = hidden(x, made[0][expert])
            product = got.T @ got / len(x)
            damping = (RIDGE + SPARSE * len(product) / len(x)) * float(product.diagonal().mean())
            missing = got.T @ (exact - got) / len(x)
            shift = torch.linalg.solve(product + damping * torch.eye(len(product)), missing)
            made[1][expert] = by(second[expert] + second[expert] @ shift.T, product, 1)
        return list(made)


def of_model(folder: Path, learn: Tensor, held: Tensor, step: int) -> list[Row]:
    """A row a version. `learn` and `held` are int64 [windows, length]; every `step`-th layer is quantised."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    found = [m for m in model.modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3]
    layers = [Seen(module, [], []) for module in found[::step]]
    hooks = [layer.module.register_forward_pre_hook(layer.see) for layer in layers]
    with torch.inference_mode():
        for window in learn:
            model(window[None], logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    reference = log_probabilities(model, held)
    shapes = [Matrix("", *layers[0].module.get_parameter(n).shape[1:]) for n in ("gate_up_proj", "down_proj")]
    rows: list[Row] = []
    for name in (*AFFINE, *TRELLIS):
        version = Version.of(name, Quantize().size(name), scale_bits=8)
        bits = 8 * sum(s.size for s in version.sections(shapes)) / sum(m.weights for m in shapes)
        divergence = _divergence(model, layers, partial(_fitted, version), held, reference)
        kind = "trellis" if version.trellis else "affine"
        row: Row = {"recipe": kind, "version": name, "bits/weight": bits, "KL": divergence.value, "+-": divergence.half}
        print(row, flush=True)
        rows.append(row)
    left = at_equal_bits(rows, "affine", "trellis")
    return [row | {"of affine": left[row["version"]]} if row["version"] in left else row for row in rows]


def _fitted(version: Version, weight: Tensor, moments: Tensor, matrix: int) -> Tensor:
    made = quantise("gptq", weight[None], moments[None], version, matrix=matrix)
    return dequantise(made, version.at(matrix))[0]


def _divergence(model: PreTrainedModel, layers: Sequence[Seen], by: Fit, held: Tensor, reference: list[Tensor]) -> Mean:
    weights = [layer.module.get_parameter(n).data for layer in layers for n in ("gate_up_proj", "down_proj")]
    with torch.inference_mode():
        made = [matrix for layer in layers for matrix in layer.fitted(by)]
        with replaced(weights, made):
            return Mean.of(divergence_of(model, held, reference))


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
    finish("trellis codes", COLUMNS, rows, [], args.json)


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
