"""Generated experts, and their true losses on unseen tokens beside those that a build would put into the table."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.calibrate.experts import ExpertWeights
from moepack.calibrate.forward import Observation
from moepack.calibrate.gather import gather_batch
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.quantize.expert_batch import ExpertBatch, Settings, expert_batches, quantise_batch
from moepack.quantize.grid import dequantise
from moepack.quantize.pooling import MEASURED, measured_row, pooled

BITS = (4, 3, 2, 1)
VERSIONS = tuple(Version.of(f"w{b}", 64) for b in BITS)
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
