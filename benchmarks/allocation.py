"""What an allocator is worth: perplexity of several allocations of the same bytes, in one run.

    python -m benchmarks.allocation --checkpoint MODEL --calibration FILE... --data FILE...

Builds one bundle, then serves it under one map of versions after another, in float32. `--average-bits` counts bits of
codes: 2.5 is half the experts at 3 bits and half at 2. The bytes of that mix, with its scales, zero points and padding,
are the budget of all allocators but `prefix_split`, which gets 2.5 bits of code in every layer, as in its paper. What
depends on chance is averaged over several seeds. The mix made by gptqmodel and by HQQ stands beside. Without arguments:
the model and texts in examples/.

With `--divergence`, only what losses are weighted by is compared, by the divergence from `bf16` in nats a token: each
with its 95 % interval, and that of its difference from the default on the same text. With `--reach`, weighting by the
logits is compared so with the default at several budgets.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import EXAMPLES, Target, arguments, built, finish, texts
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import Version, lossy
from moepack.pipeline.allocate import (
    LayerCosts,
    bundle_costs,
    calibrated_importance,
    expected_losses,
    named,
    split_layers,
    total_bytes,
)
from moepack.pipeline.recipe import WEIGHTS
from moepack.reports.evaluate import Evaluation, divergences, evaluate
from moepack.reports.intervals import clustered
from moepack.runtime.allocation.knapsack import greedy, spent, uniform
from moepack.runtime.patches import quiet_libraries
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.policies.contract import Versions

RANDOM_PREFIX = "prefix, random order"
LOCAL = tuple(w for w in WEIGHTS if w != "logits")  # what needs no pass of its own
BUDGETS, REACH = (1.5, 2.0, 2.5, 3.0), ("gates", "logits", "uniform mix")


def mix_bytes(versions: Sequence[Version], costs: list[LayerCosts], average: float) -> int:
    """Bytes of the mix of two neighbouring widths whose codes average to so many bits."""
    low = math.floor(average)
    share = average - low
    column = {v.name: i for i, v in enumerate(versions)}
    rows = [row for layer in costs for row in layer.sizes]
    wide = sum(row[column[f"w{low + 1}"]] for row in rows) if share else 0.0
    return int(share * wide + (1 - share) * sum(row[column[f"w{low}"]] for row in rows))


def maps(bundle: Bundle, costs: list[LayerCosts], average: float, seeds: int) -> Iterator[tuple[str, list[Versions]]]:
    """Each allocation by its name; those by chance several times."""
    versions, budget = bundle.versions, mix_bytes(bundle.versions, costs, average)
    sizes = [row for layer in costs for row in layer.sizes]
    losses = {w: [row for layer in costs for row in expected_losses(layer, w)] for w in LOCAL}
    mix = uniform(sizes, budget)
    yield "uniform mix", [named(mix, versions, costs)]
    shuffled = [random.Random(seed).sample(mix, len(mix)) for seed in range(seeds)]
    yield "uniform mix, random experts", [named(m, versions, costs) for m in shuffled]
    for weight in LOCAL:
        yield f"greedy, {weight}", [named(greedy(sizes, losses[weight], budget), versions, costs)]
    yield "prefix_split", [split_layers(versions, costs, calibrated_importance(costs), average)]
    orders = [[[r.random() for _ in c.tokens] for c in costs] for r in map(random.Random, range(seeds))]
    yield RANDOM_PREFIX, [split_layers(versions, costs, order, average) for order in orders]


def weighed(costs: list[LayerCosts]) -> dict[str, list[list[float]]]:
    """The losses of all experts by what they are weighted with, the default first.

    "by layer" divides a layer's losses by the square of what its experts put out over the calibration tokens, "by root"
    by the root of that: a layer whose output is larger bears a larger error. "and error" adds a standard error to each
    loss: an allocation that is shy of what is not well known.
    """
    out = {w: [row for layer in costs for row in expected_losses(layer, w)] for w in WEIGHTS}
    if out["logits"] == out["gates"]:  # a bundle that was built without
        del out["logits"]
    powers = []
    for layer in costs:
        squares = [max((g / r for g, r in zip(*rows, strict=True) if r), default=0.0) for rows in
                   zip(layer.gated, layer.relative, strict=True)]  # fmt: skip
        powers.append(sum(n * s for n, s in zip(layer.tokens, squares, strict=True)) or 1.0)
    own = [(layer, power, expected_losses(layer, "gates")) for layer, power in zip(costs, powers, strict=True)]
    out["gates, by layer"] = [[x / power for x in row] for _, power, rows in own for row in rows]
    out["gates, by root"] = [[x / math.sqrt(power) for x in row] for _, power, rows in own for row in rows]
    out["relative"] = [[(n + 1) * x for x in row] for layer in costs
                       for n, row in zip(layer.tokens, layer.relative, strict=True)]  # fmt: skip
    out["gates and error"] = [
        [x + (n + 1) * e for x, e in zip(row, errors, strict=True)]
        for layer, _, rows in own
        for n, row, errors in zip(layer.tokens, rows, layer.gated_error, strict=True)
    ]
    return out


def divergence_rows(
    bundle: Bundle, data: list[str], average: float, windows: int, some: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What each weighting's map loses, or that of `some`, by divergence from `bf16`."""
    small = lossy(bundle.versions)
    costs = bundle_costs(bundle, small)
    sizes = [row for layer in costs for row in layer.sizes]
    budget = mix_bytes(small, costs, average)
    tables = {name: named(greedy(sizes, losses, budget), small, costs) for name, losses in weighed(costs).items()}
    tables["uniform mix"] = named(uniform(sizes, budget), small, costs)
    tables = {name: table for name, table in tables.items() if not some or name in some}
    with tempfile.TemporaryDirectory() as work:
        policies = []
        for i, table in enumerate(tables.values()):
            file = Path(work) / f"{i}.json"
            file.write_text(json.dumps({"versions": table}))
            policies.append(f"static:{file}")
        found = divergences(bundle.path, data, policies, samples=windows)
    first, rows = found[0], []
    for name, got in zip(tables, found, strict=True):
        one = clustered(got.sums, got.counts)
        less = clustered([a - b for a, b in zip(got.sums, first.sums, strict=True)], got.counts)
        rows.append(
            {
                "bits": average,
                "losses weighted by": name,
                "KL, mnats": 1e3 * one.mean,
                "95 %": f"{1e3 * one.low:.4g}-{1e3 * one.high:.4g}",
                "from the default, %": 100 * less.mean / (one.mean - less.mean),
                "its 95 %": f"{100 * less.low / (one.mean - less.mean):+.2f} to "
                f"{100 * less.high / (one.mean - less.mean):+.2f}",
            }
        )
    return rows


def main() -> None:
    """Parse arguments, build, allocate, evaluate, print."""
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe")
    parser.add_argument("--calibration", action="append", help="text to calibrate on")
    parser.add_argument("--data", action="append", help="text to evaluate on")
    parser.add_argument("--average-bits", type=float, default=2.5, help="of the codes, from 1 to 4")
    parser.add_argument("--samples", type=int, default=384, help="calibration windows")
    parser.add_argument("--length", type=int, default=256, help="tokens of a calibration window")
    parser.add_argument("--windows", type=int, default=128, help="windows of 512 tokens to evaluate on, a file")
    parser.add_argument("--seeds", type=int, default=3, help="random orders to average over")
    parser.add_argument("--divergence", action="store_true", help="compare what losses are weighted by, and no more")
    parser.add_argument("--reach", action="store_true", help="compare weighting by the logits at several budgets")
    args = parser.parse_args()
    if not 1 <= args.average_bits <= 4:
        parser.error("--average-bits is from 1 to 4")
    quiet_libraries()
    _, data = texts(args)
    samples, windows, seeds = (16, 2, 1) if args.quick else (args.samples, args.windows, args.seeds)

    def made_by(method: str, into: Path) -> Bundle:
        exact = "bf16, " if args.divergence else ""
        return open_bundle(built(args, into, f"{exact}w4, w3, w2, w1", method=method, samples=samples))

    if args.reach:
        with tempfile.TemporaryDirectory() as work:
            more = "\nallocation: {average_bits: 4, weight: logits}"
            bundle = open_bundle(
                built(args, Path(work) / "b", "bf16, w4, w3, w2, w1", method="gptq", samples=samples, more=more)
            )
            budgets = (2.5,) if args.quick else BUDGETS
            compared = [row for bits in budgets for row in divergence_rows(bundle, data, bits, windows, REACH)]
        most = max(row["from the default, %"] for row in compared if row["losses weighted by"] == "logits")
        held = [Target("divergence over the default's, at the worst budget", 1 + most / 100, 1, "lower")]
        what = f"divergence of {args.checkpoint.name} from bf16, by bits of code on average"
        finish(what, list(compared[0]), compared, held, args.json)
        return
    if args.divergence:
        with tempfile.TemporaryDirectory() as work:
            compared = divergence_rows(made_by("gptq", Path(work) / "gptq"), data, args.average_bits, windows)
        worst = max(row["from the default, %"] for row in compared[1:])
        best = min(row["from the default, %"] for row in compared[1:])
        held = [Target("divergence of the best other weighting over the default's", 1 + best / 100, 0.98, "higher")]
        held.append(Target("that of the worst", 1 + worst / 100, 1, "higher"))
        what = f"divergence of {args.checkpoint.name} from bf16, codes of {args.average_bits:g} bits on average"
        finish(what, list(compared[0]), compared, held, args.json)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:

        def score(bundle: Bundle, table: Versions) -> Evaluation:
            file = Path(work) / "map.json"
            file.write_text(json.dumps({"versions": table}))
            return evaluate(bundle.path, data, LoadOptions(policy=f"static:{file}", dtype="float32"), samples=windows)

        bundle = made_by("gptq", Path(work) / "gptq")
        costs = bundle_costs(bundle)
        plain = evaluate(args.checkpoint, data, LoadOptions(dtype="float32"), samples=windows)
        rows.append(_row("transformers", [plain], None, 16.0, None))
        for name, tables in maps(bundle, costs, args.average_bits, seeds):
            scores = [score(bundle, table) for table in tables]
            size = statistics.mean(total_bytes(t, bundle.versions, costs) for t in tables)
            loss = statistics.mean(_loss(t, bundle, costs) for t in tables)
            rows.append(_row(name, scores, plain, 8 * size / bundle.expert_weights, loss))
        for method in ("gptqmodel", "hqq"):
            other = made_by(method, Path(work) / method)
            name, tables = next(maps(other, bundle_costs(other), args.average_bits, seeds))
            size, loss = total_bytes(tables[0], other.versions, costs), _loss(tables[0], other, bundle_costs(other))
            rows.append(
                _row(f"{name}, {method}", [score(other, tables[0])], plain, 8 * size / other.expert_weights, loss)
            )
    files = [Path(f.file).stem for f in plain.files]
    mean = {r["allocation"]: statistics.geometric_mean(r[f] for f in files) for r in rows}
    greedy_ratio, prefix_ratio = mean["greedy, gates"] / mean["uniform mix"], mean["prefix_split"] / mean[RANDOM_PREFIX]
    targets = [
        Target("greedy: perplexity over that of the uniform mix", greedy_ratio, 1, "lower"),
        Target("prefix_split: perplexity over that of a random order", prefix_ratio, 1, "lower"),
    ]
    columns = ["allocation", "bits/weight", "expected loss", *files, "mean %", "worst %"]
    title = f"perplexity of {args.checkpoint.name}, codes of {args.average_bits:g} bits on average"
    finish(title, columns, rows, targets, args.json)


def _loss(table: Versions, bundle: Bundle, costs: list[LayerCosts]) -> float:
    """The expected loss of a map, weighted by gates."""
    column = {v.name: i for i, v in enumerate(bundle.versions)}
    pairs = zip(table, costs, strict=True)
    return sum(spent(expected_losses(c, "gates"), [column[name] for name in row]) for row, c in pairs)


def _row(
    name: str, scores: list[Evaluation], plain: Evaluation | None, bits: float, loss: float | None
) -> dict[str, Any]:
    """One allocation: geometric means over its scores; rises in per cent above the plain model."""
    row: dict[str, Any] = {"allocation": name, "bits/weight": bits, "expected loss": "" if loss is None else loss}
    rises = []
    for i, file in enumerate(scores[0].files):
        value = statistics.geometric_mean(s.files[i].perplexity for s in scores)
        row[Path(file.file).stem] = value
        rises.append(100 * (value / plain.files[i].perplexity - 1) if plain else 0.0)
    return {**row, "mean %": f"{statistics.mean(rises):+.3f}", "worst %": f"{max(rises):+.3f}"}


if __name__ == "__main__":
    main()
