"""Whether loss tables say what experts lose on tokens that they were not fitted to, and whether their errors cover.

    python -m benchmarks.losses [--checkpoint MODEL --data FILE...]

Of generated experts (inputs correlated from column to column, of unequal variance) and of a checkpoint's, by tokens an
expert: the true loss, on tokens that nothing has seen, over the one that a build would put into the table, mean over
experts; the same over the loss on the expert's own tokens as it is, which is what is corrected; and the share of
experts whose true loss is within two standard errors, that of the truth included. Without arguments: the model and
texts in examples/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import EXAMPLES, Target, arguments, finish
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.experts import ExpertWeights
from moepack.calibrate.forward import CalibrationPass, Observation
from moepack.calibrate.gather import gather_batch
from moepack.calibrate.stream import StreamedModel
from moepack.calibrate.text.windows import calibration_windows, load_tokenizer
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.quantize.expert_batch import ExpertBatch, Settings, expert_batches, quantise_batch
from moepack.quantize.grid import dequantise
from moepack.quantize.pooling import MEASURED, measured_row, pooled
from moepack.runtime.patches import quiet_libraries

COUNTS = (64, 256, 1024, 4096)
BITS = (4, 3, 2, 1)
VERSIONS = tuple(Version.of(f"w{b}", 64) for b in BITS)
LENGTH = 256  # tokens of a window of text
LEAST = 64  # tokens that the truth of one expert needs


class Silu:
    """Stands for a family's experts module, of which a gate activation is all that is wanted."""

    has_gate = True

    def _apply_gate(self, out: Tensor) -> Tensor:
        gate, up = out.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True)
class Case:
    """A layer's experts: what they are calibrated on, and what the truth is measured on."""

    module: Any
    weights: ExpertWeights
    learn: Observation
    truth: Observation


def generated(hidden: int, inner: int, experts: int, tokens: int, seed: int, unseen: int = 4096) -> Case:
    """Experts of Gaussian weights, each sent `tokens` tokens on average: correlated inputs (AR(1), 0.9).

    Args:
        hidden, inner: columns of the two matrices.
        experts: how many.
        tokens: an expert's, on average.
        seed: of everything.
        unseen: tokens of each expert that the truth is measured on; every expert is sent all of them.
    """
    g = torch.Generator().manual_seed(seed)
    spread = torch.exp(0.5 * torch.randn(hidden, generator=g))

    def inputs(count: int) -> Tensor:
        x = torch.randn(count, hidden, generator=g)
        for c in range(1, hidden):
            x[:, c] = 0.9 * x[:, c - 1] + math.sqrt(1 - 0.81) * x[:, c]
        return x * spread

    matrices = Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner)
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    first, second = ((torch.randn(*s, generator=g) * 0.05).bfloat16() for s in shapes)
    layer = ExpertLayer(0, "generated", experts, matrices)
    top_k = 2
    total = max(1, experts * tokens // top_k)
    chosen = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(total)]).to(torch.int32)
    learn = Observation(inputs(total), chosen, torch.rand(total, top_k, generator=g), 64)
    everyone = torch.arange(experts, dtype=torch.int32).expand(unseen, experts)
    truth = Observation(inputs(unseen), everyone, torch.ones(unseen, experts), 64)
    return Case(Silu(), ExpertWeights(layer, (first, second), (None, None), False), learn, truth)


def trained(checkpoint: Path, data: list[str], layers: int, windows: int, seed: int = 0) -> Iterator[Case]:
    """Some layers of a checkpoint: half of the windows to calibrate on, the other half for the truth."""
    opened = open_checkpoint(checkpoint)
    stream = StreamedModel(opened)
    some = list(stream.expert_layers)
    some = some[:: max(1, len(some) // layers)][:layers]
    ids = calibration_windows(data, load_tokenizer(opened.path), windows, LENGTH, seed).ids
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    walk = CalibrationPass(stream, ids, 8, torch.float32)
    stream.load(None)
    stream.to_compute(None, torch.float32)
    walk.start()
    stream.free(None)
    cut = len(ids) // 2 * LENGTH
    for index in range(max(some) + 1):
        _, weights = stream.split(index, stream.load(index))
        stream.to_compute(index, torch.float32)
        seen = walk.run_layer(index)
        if index in some and weights is not None and seen is not None:
            learnt = Observation(seen.inputs[:cut], seen.experts[:cut], seen.gates[:cut], LENGTH)
            unseen = Observation(seen.inputs[cut:], seen.experts[cut:], seen.gates[cut:], LENGTH)
            yield Case(stream.experts_module(index), weights, learnt, unseen)
        stream.free(index)


def thinned(case: Case, tokens: int, seed: int) -> Case:
    """A case whose experts were seldom chosen: of each, `tokens` tokens at the most are left, drawn by chance."""
    chosen, g = case.learn.experts.clone(), torch.Generator().manual_seed(seed)
    nobody = case.weights.layer.experts
    for expert in range(nobody):
        token, slot = torch.where(case.learn.experts == expert)
        lost = torch.randperm(len(token), generator=g)[tokens:]
        chosen[token[lost], slot[lost]] = nobody
    return replace(case, learn=replace(case.learn, experts=chosen))


def table_and_truth(case: Case, versions: tuple[Version, ...] = VERSIONS) -> dict[str, Tensor]:
    """What a build's table would say, and what is true: float64 [experts, versions] each.

    Returns:
        "mse" and "mse_error" of the table; "plain", the loss on the expert's own tokens as it is; "true" and
        "true_error", its standard error; experts of fewer than LEAST unseen tokens are left out.
    """
    settings = Settings("gptq", versions)
    cpu = torch.device("cpu")
    rows: list[dict[str, list[float]]] = []
    found: dict[str, list[list[float]]] = {"plain": [], "true": [], "true_error": []}
    kept = []
    for part in expert_batches(case.weights.layer, settings):
        batch = gather_batch(case.module, case.weights.select(part), part, case.learn, settings, cpu)
        for i, items in enumerate(quantise_batch(batch, settings)):
            rows.append(measured_row([(v.own, v.others) for v in items]))
            token = torch.where((case.truth.experts == part[i]).any(1))[0]
            values = [[dequantise(q, v.version.at(m))[v.index] for m, q in enumerate(v.quantised)] for v in items]
            plain = [_errors(batch, i, (a, b), batch.inputs[batch.tokens[i].measure]).mean() for a, b in values]
            kept.append(len(token) >= LEAST)
            found["plain"].append([float(p) for p in plain])
            cluster = (token // case.truth.length).unique(return_inverse=True)[1]
            true = [_clustered(_errors(batch, i, (a, b), case.truth.inputs[token]), cluster) for a, b in values]
            found["true"].append([t[0] for t in true])
            found["true_error"].append([t[1] for t in true])
    raw = {k: torch.tensor([r[k] for r in rows], dtype=torch.float64) for k in MEASURED}
    out = {k: v.double() for k, v in pooled(raw).items() if k.startswith("mse")}
    out |= {k: torch.tensor(v, dtype=torch.float64) for k, v in found.items()}
    return {k: v[torch.tensor(kept)] for k, v in out.items()}


def _errors(batch: ExpertBatch, i: int, matrices: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Mean squared error of the output, by token."""
    first, second = batch.biases[i]
    x = x.float()
    want = batch.forward.out(batch.forward.act(x, batch.weights[0][i], first), batch.weights[1][i], second)
    got = batch.forward.out(batch.forward.act(x, matrices[0], first), matrices[1], second)
    return (got - want).square().mean(1).double()


def _clustered(values: Tensor, cluster: Tensor) -> tuple[float, float]:
    """The mean and its standard error, clusters being the sample."""
    if len(values) == 0:
        return 0.0, 0.0
    mean = values.mean()
    count = int(cluster.max()) + 1
    residual = torch.zeros(count, dtype=torch.float64).index_add_(0, cluster, values - mean)
    return float(mean), float((residual.square().sum() * count / max(1, count - 1)).sqrt() / len(values))


def inside(found: dict[str, Tensor]) -> Tensor:
    """Which true losses are within two standard errors, bool [experts, versions]."""
    error = (found["mse_error"].square() + found["true_error"].square()).sqrt()
    return (found["true"] - found["mse"]).abs() <= 2 * error


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe")
    parser.add_argument("--data", action="append", help="text to calibrate on and to find the truth on")
    parser.add_argument("--hidden", type=int, default=1024, help="columns of the generated experts' inputs")
    parser.add_argument("--experts", type=int, default=8, help="generated experts")
    parser.add_argument("--layers", type=int, default=2, help="layers of the checkpoint")
    parser.add_argument("--windows", type=int, default=320, help=f"of text, {LENGTH} tokens each, half for the truth")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(COUNTS), help="tokens an expert")
    args = parser.parse_args()
    quiet_libraries()
    hidden, experts, layers, counts = args.hidden, args.experts, args.layers, args.tokens
    if args.quick:
        hidden, experts, layers, counts = 128, 4, 1, [64, 256]
    data = args.data or [str(EXAMPLES / "text" / "calibration.jsonl")]
    layered = list(trained(args.checkpoint, data, layers, 64 if args.quick else args.windows))
    rows: list[dict[str, Any]] = []
    ratios, covered = [], []
    for count in counts:
        kinds = {
            f"generated, {hidden} columns": [generated(hidden, hidden // 4, experts, count, 0)],
            args.checkpoint.name: [thinned(case, count, seed) for seed, case in enumerate(layered)],
        }
        for kind, cases in kinds.items():
            parts = [table_and_truth(case) for case in cases]
            found = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
            within = inside(found)
            covered.append(within)
            for column, bits in enumerate(BITS):
                true = found["true"][:, column]
                ratio = float((true / found["mse"][:, column]).mean())
                ratios.append(ratio)
                rows.append(
                    {
                        "experts": kind,
                        "tokens": count,
                        "version": f"w{bits}",
                        "true / measured": ratio,
                        "true / on own tokens": float((true / found["plain"][:, column]).mean()),
                        "standard error %": 100 * float((found["mse_error"] / found["mse"])[:, column].mean()),
                        "inside two": float(within[:, column].double().mean()),
                    }
                )
    coverage = float(torch.cat([c.flatten() for c in covered]).double().mean())
    targets = [
        Target("true over measured, the lowest", min(ratios), 0.87, "higher"),
        Target("true over measured, the highest", max(ratios), 1.15, "lower"),
        Target("inside two standard errors, at least", coverage, 0.90, "higher"),
        Target("inside two standard errors, at most", coverage, 0.99, "lower"),
    ]
    finish("Losses of tables against the truth", list(rows[0]), rows, targets, args.json)


if __name__ == "__main__":
    main()
