"""Trellis codes (QTIP's bit-shift trellis with a computed code book, as in EXL3) beside moepack's versions.

    python -m benchmarks.trellis --model DIR [--layers N] [--state-bits 12]
    python -m benchmarks.trellis --quick

Of the same weights and second moments, both sides quantise the experts of every N-th layer, down towards what the
quantised gate and up make (`refine`), and the model's divergence from itself is measured in float32 on text that
neither saw. `of ours` is the divergence over that of moepack's versions with scales of a byte at as many bits, on the
line between the logarithms of two of them. The trellis counts its codes and a scale of 16 bits a row; it pays neither
for its first states nor for the rotation of inputs and outputs, both in its favour. The first rows are one
token's products on one thread, moepack's w2 and a prototype of 2-bit trellis codes for AVX2, and normal numbers by
state bits.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.common import EXAMPLES, Row, arguments, finish, lower_quartile, machine
from benchmarks.decoding import Mean
from benchmarks.peers.quality import divergence_of, log_probabilities, replaced
from benchmarks.real.make import written
from benchmarks.real.source import cache
from benchmarks.real.texts import DOMAINS
from benchmarks.real.versions import at_equal_bits
from moepack.calibrate.text.windows import calibration_windows
from moepack.pack.codec.rotation import rotate
from moepack.pack.spec import BLOCKS, Matrix, Rotation, Version
from moepack.pipeline.recipe import Quantize
from moepack.quantize.expert_batch import RIDGE, SPARSE
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import quantise

from .codes import coded, fit, integers, library

if TYPE_CHECKING:
    from torch import nn

ROTATED = " rotated"
OURS = ("w1d2", "w2", "w2d3", "w3d4", "w2d3 rotated")
COLUMNS = ("recipe", "version", "bits/weight", "KL", "+-", "of ours", "normal error", "us")
CODES = {"1MAD": ("trellis_product", 8, 2), "halves": ("trellis_product_halves", 16, 1)}  # function, streams, times x
THEIRS = ((2, 2), (2, 3), (3, 3))  # bits of gate and up, of down
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


def of_model(folder: Path, learn: Tensor, held: Tensor, step: int, state_bits: int, lib: ctypes.CDLL) -> list[Row]:
    """A row a scheme. `learn` and `held` are int64 [windows, length]; every `step`-th layer is quantised."""
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
    for name in OURS:
        plain = name.removesuffix(ROTATED)
        rotation = Rotation(min(max(BLOCKS), shapes[1].cols & -shapes[1].cols)) if name != plain else None
        version = Version.of(plain, Quantize().size(plain), rotation, scale_bits=8)
        bits = 8 * version.resident_size(tuple(shapes)) / sum(m.weights for m in shapes)
        divergence = _divergence(model, layers, partial(_ours, version), held, reference)
        rows.append(_row("moepack" if rotation is None else "rotated", name, bits, divergence))
    for pair in THEIRS:
        bits = sum(b * m.weights + 16 * m.rows for b, m in zip(pair, shapes, strict=True))
        bits /= sum(m.weights for m in shapes)
        by = partial(_theirs, lib, state_bits, pair)
        divergence = _divergence(model, layers, by, held, reference)
        rows.append(_row("trellis", f"{pair[0]} and {pair[1]}", bits, divergence))
    left = at_equal_bits(rows, "moepack", "trellis")
    return [row | {"of ours": left[row["version"]]} if row["version"] in left else row for row in rows]


def _ours(version: Version, weight: Tensor, moments: Tensor, matrix: int) -> Tensor:
    rotation = version.rotation if matrix else None
    if rotation is not None:
        weight = rotate(weight, rotation)
        moments = rotate(rotate(moments, rotation).T.contiguous(), rotation)
    made = dequantise(quantise("gptq", weight[None], moments[None], version, matrix=matrix), version.at(matrix))[0]
    return made if rotation is None else rotate(made, rotation, back=True)


def _theirs(
    lib: ctypes.CDLL, state_bits: int, bits: tuple[int, int], weight: Tensor, moments: Tensor, matrix: int
) -> Tensor:
    return coded(lib, weight, moments, state_bits, bits[matrix])


def _divergence(model: PreTrainedModel, layers: Sequence[Seen], by: Fit, held: Tensor, reference: list[Tensor]) -> Mean:
    weights = [layer.module.get_parameter(n).data for layer in layers for n in ("gate_up_proj", "down_proj")]
    with torch.inference_mode():
        made = [matrix for layer in layers for matrix in layer.fitted(by)]
        with replaced(weights, made):
            return Mean.of(divergence_of(model, held, reference))


def _row(who: str, name: str, bits: float, divergence: Mean) -> Row:
    row: Row = {"recipe": who, "version": name, "bits/weight": bits, "KL": divergence.value, "+-": divergence.half}
    print(row, flush=True)
    return row


def of_normal(lib: ctypes.CDLL) -> Iterator[Row]:
    """Mean squared error of normal numbers of variance 1, by state bits and bits."""
    targets = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    for code, bits, state_bits in product(CODES, (2, 3), (8, 10, 12, 16)):
        error = (fit(lib, targets, state_bits, bits, code) - targets).square().mean()
        yield {"recipe": "trellis", "version": f"{bits}, {state_bits} state bits, {code}", "normal error": float(error)}


def products(lib: ctypes.CDLL, runs: int) -> Iterator[Row]:
    """Microseconds of one token through eight experts of Qwen3-30B-A3B's shape, one thread's own time."""
    from benchmarks.kernels.__main__ import measure
    from benchmarks.kernels.layers import SHAPES

    torch.set_num_threads(1)
    hidden, inner, _, used = SHAPES["Qwen3-30B-A3B"]
    weights = 3 * hidden * inner * used
    (ours,) = [
        row for row in measure("Qwen3-30B-A3B", 1, runs, 1 << 28, False, "huge", ("w2",)) if row["version"] == "w2"
    ]
    cols = hidden
    rows = 8 * weights // cols  # more than caches hold
    codes = torch.randint(0, 1 << 16, (rows, cols // 8), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    x = torch.randint(-127, 128, (cols,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
    yield {"recipe": "moepack", "version": "w2", "us": ours["ours us"]}
    for code, (call, streams, repeats) in CODES.items():
        out = torch.empty(rows, dtype=torch.int32)
        given = x.repeat_interleave(repeats)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, given, out)]
        spent = []
        for _ in range(max(3, runs // 8)):
            began = time.thread_time()
            lib[call](*pointers, ctypes.c_long(rows), ctypes.c_long(cols))
            spent.append((time.thread_time() - began) * weights / (rows * cols))
        if not torch.equal(out[:4].double(), decoded(codes[:4], code, streams) @ x.double()):
            raise SystemExit(f"{call} is wrong")
        theirs = 1e6 * lower_quartile(spent)
        yield {"recipe": "trellis", "version": f"2, {code}", "us": theirs, "of ours": theirs / ours["ours us"]}


def decoded(codes: Tensor, code: str, streams: int) -> Tensor:
    """What a product multiplies by: float64 [rows, cols], of codes uint16 [rows, cols / 8]."""
    words = codes.to(torch.int64).unflatten(1, (-1, streams))  # [rows, steps, streams]
    before = torch.cat([torch.zeros_like(words[:, :1]), words[:, :-1]], dim=1)
    both = before << 16 | words
    states = torch.stack([both >> (14 - 2 * i) & 0xFFFF for i in range(8)], dim=2)  # [rows, steps, 8, streams]
    return integers(states, code).double().flatten(1)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=cache() / "model", help="made by benchmarks.real --make")
    parser.add_argument("--layers", type=int, default=5, help="every so many layers are quantised")
    parser.add_argument("--state-bits", type=int, default=12)
    parser.add_argument("--samples", type=int, default=32, help="windows of 512 tokens to fit to")
    parser.add_argument("--windows", type=int, default=24, help="of 512 tokens to measure on")
    args = parser.parse_args()
    if "avx2" not in machine()["simd"]:
        parser.error("the prototypes are of AVX2, which this processor does not have")
    with tempfile.TemporaryDirectory() as work:
        lib = library(Path(work))
        rows = list(products(lib, 4 if args.quick else 64)) + list(of_normal(lib))
        learn, held = _windows(args, Path(work))
        model = EXAMPLES / "mini-qwen3-moe" if args.quick else args.model
        rows += of_model(
            model, learn, held, 1 if args.quick else args.layers, 8 if args.quick else args.state_bits, lib
        )
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
