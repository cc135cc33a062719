"""Errors and divergences of schemes, on a trained model and on generated matrices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding import Mean
from benchmarks.peers.quality import LENGTH, Watched, divergence_of, errors, log_probabilities, replaced, watched
from benchmarks.quantise import ENOUGH, Case

from .schemes import TODAY, TURNED, Scheme

PARTS = ("gate, up", "down")
OURS = "today's error over it"
Rows = list[dict[str, Any]]


def of_model(
    checkpoint: Path, calibration: list[str], data: list[str], windows: tuple[int, int], every: Sequence[Scheme]
) -> Rows:
    """A row a scheme: bits, relative output error of each matrix on held-out tokens, and divergence where both fit.

    Args:
        checkpoint: a small Qwen3-MoE, run in float32.
        calibration: texts for moments.
        data: texts for errors and divergence.
        windows: how many of each, of 256 tokens.
        every: the schemes; today's versions are among them.
    """
    from transformers import AutoModelForCausalLM

    from moepack.calibrate.text.windows import calibration_windows, load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    tokenizer = load_tokenizer(checkpoint)
    learn = watched(model, calibration_windows(calibration, tokenizer, windows[0], LENGTH, 0).ids)
    ids = calibration_windows(data, tokenizer, windows[1], LENGTH, 0).ids
    held, reference = watched(model, ids), log_probabilities(model, ids)
    moments = [[seen.moments(m) for m in range(2)] for seen in learn]
    weights = [w for seen in learn for w in seen.weights()]
    counts = [w.numel() for w in learn[0].weights()]
    cols = [w.shape[2] for w in learn[0].weights()]
    rows, by_window = [], dict[str, list[float]]()
    for scheme in every:
        row: dict[str, Any] = {"model": checkpoint.name, "who": scheme.who, "encoding": scheme.name}
        sizes = [side.size(n) for side, n in zip(scheme.sides, cols, strict=True)]
        row["bits/weight"] = sum(s * n for s, n in zip(sizes, counts, strict=True)) / sum(counts)
        made: dict[int, list[Tensor]] = {}
        for m in (i for i in range(2) if scheme.fits(i, cols[i])):
            made[m] = [scheme.sides[m].values(w.weights()[m], own[m]) for w, own in zip(learn, moments, strict=True)]
            row[f"error {PARTS[m]}"] = _error(learn, held, m, made[m])
        if len(made) == 2:
            with replaced(weights, [v for pair in zip(made[0], made[1], strict=True) for v in pair]):
                found = divergence_of(model, ids, reference)
            by_window[f"{scheme.who} {scheme.name}"] = found
            mean = Mean.of(found)
            row |= {"KL, mnat": 1e3 * mean.value, "+-": 1e3 * mean.half}
        rows.append(row)
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True)
    _compare(rows, by_window)
    return rows


def _error(learn: Sequence[Watched], held: Sequence[Watched], matrix: int, made: Sequence[Tensor]) -> float:
    got: list[float] = []
    for seen, later, values in zip(learn, held, made, strict=True):
        enough = later.counts >= ENOUGH
        weight = seen.weights()[matrix][enough]
        got += errors(Case(weight, weight, later.moments(matrix)[enough]), values[enough])
    return statistics.geometric_mean(got)


def _compare(rows: Rows, by_window: Mapping[str, Sequence[float]]) -> None:
    """Add each divergence over that of today's versions at as many bits: between two of them, and beyond, log-linear.

    Of a rotated version also over that of the plain one.
    """
    known = {row["encoding"]: row["bits/weight"] for row in rows if row["who"] == "moepack"}
    anchors = [(known[name], by_window[f"moepack {name}"]) for name in reversed(TODAY)]
    for row in rows:
        own = by_window.get(f"{row['who']} {row['encoding']}")
        if own is not None:
            row["of today's at these bits"], row["ratio +-"] = ratio_of(own, at_bits(anchors, row["bits/weight"]))
            turned = row["encoding"].endswith(TURNED)
            plain = by_window.get(f"{row['who']} {row['encoding'].removesuffix(TURNED)}")
            if turned and plain is not None:  # ideas may have such names too
                row["of the plain version's"], row["plain +-"] = ratio_of(own, plain)


def ratio_of(own: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """A sum over another, and half of its 95 % interval: each window is compared with itself."""
    ratio = sum(own) / sum(beside)
    rest = [a - ratio * b for a, b in zip(own, beside, strict=True)]
    return ratio, Mean.of(rest).half / statistics.fmean(beside)


def at_bits(anchors: Sequence[tuple[float, Sequence[float]]], bits: float) -> list[float]:
    """Values at so many bits, of anchors by rising bits: each value's logarithm on the line through two anchors."""
    place = next((i for i in range(1, len(anchors) - 1) if bits <= anchors[i][0]), len(anchors) - 1)
    (low, below), (high, above) = anchors[place - 1], anchors[place]
    share = (bits - low) / (high - low)
    return [math.exp((1 - share) * math.log(a) + share * math.log(b)) for a, b in zip(below, above, strict=True)]


def generated(kind: str, rows: int, cols: int) -> Case:
    """A matrix whose inputs are AR(1), 0.9, of spread variance.

    `normal`: normally distributed weights. `heavy`: Student's t with 5 degrees of freedom. `outliers`: normal weights,
    and one input in 64 is 16 times as large.
    """
    g = torch.Generator().manual_seed(rows + cols)
    weight = torch.randn(1, rows, cols, generator=g)
    if kind == "heavy":
        weight /= torch.randn(5, rows, cols, generator=g).square().mean(0).sqrt()
    spread = torch.exp(0.5 * torch.randn(cols, generator=g))[:, None]
    if kind == "outliers":
        spread[torch.randperm(cols, generator=g)[: cols // 64]] *= 16

    def moments() -> Tensor:
        x = torch.randn(cols, 4 * cols, generator=g)
        for c in range(1, cols):
            x[c] = 0.9 * x[c - 1] + (1 - 0.81) ** 0.5 * x[c]
        x *= spread
        return (x @ x.T / x.shape[1])[None]

    return Case(weight * 0.02, moments(), moments())


def of_generated(
    kind: str, shapes: Sequence[tuple[int, int]], every: Sequence[Scheme], made: Callable[..., Case] = generated
) -> Rows:
    """A row a scheme: bits, and the relative output errors of one matrix of each shape."""
    cases, out = [made(kind, *shape) for shape in shapes], []
    for scheme in every:
        if not all(scheme.fits(m, case.weight.shape[2]) for m, case in enumerate(cases)):
            continue
        row: dict[str, Any] = {"model": f"generated, {kind}", "who": scheme.who, "encoding": scheme.name}
        sizes = [side.size(case.weight.shape[2]) for side, case in zip(scheme.sides, cases, strict=True)]
        row["bits/weight"] = (2 * sizes[0] + sizes[1]) / 3  # up is as large as gate
        for part, side, case in zip(PARTS, scheme.sides, cases, strict=True):
            row[f"error {part}"] = errors(case, side.values(case.weight, case.learn))[0]
        out.append(row)
    compare_errors(out)
    return out


def compare_errors(rows: Rows) -> None:
    """Add to others' rows today's error at as many bits over theirs, of the matrix where that is more."""
    known = {row["encoding"]: row for row in rows if row["who"] == "moepack"}
    for row in (r for r in rows if r["who"] != "moepack"):
        ratios = []
        for name in (f"error {part}" for part in PARTS):
            anchors = [(known[w]["bits/weight"], [known[w][name]]) for w in reversed(TODAY)]
            ratios.append(at_bits(anchors, row["bits/weight"])[0] / row[name])
        row[OURS] = max(ratios)
