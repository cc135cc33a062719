"""What changing versions while serving is worth, and what it costs: quality in a budget, and TPOT, in one run.

    python -m benchmarks.residency --checkpoint MODEL --calibration FILE... --data FILE...

Builds one bundle with two versions, `bf16` and `--low`. The files of `--data` are read one after another in one
session, so the workload shifts twice where there are three. At each of three budgets between all-low and all-bf16 it
serves them under: all-low; the best static map for the first file (the experts that the router chose most there, which
the policies below are not told); `hotness`; and `lru`, which loads what is asked for and waits. Then it decodes token
by token, with and without promotions forced at the rate limit, the two taking turns. Without arguments: the model and
texts in examples/.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import moepack
from benchmarks.common import Target, arguments, finish
from moepack.evaluate import Evaluation, evaluate
from moepack.pipeline import build
from moepack.progress import RichReporter, quiet_libraries
from moepack.recipe import parse_recipe
from moepack.runtime.trace import read_trace

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SHARES = (0.2, 0.4, 0.6)  # of the way from all-low to all-bf16


def first_file_map(trace: Path, rooms: list[int], high: str, low: str) -> list[list[str]]:
    """A map with the experts that a trace's router chose most at the high version."""
    records = read_trace(trace).records
    table = []
    for position, room in enumerate(rooms):
        totals = Counter[int]()
        for record in records:
            totals.update(dict(enumerate(record.counts[position])))
        best = {e for e, _ in totals.most_common(room)}
        table.append([high if e in best else low for e in range(len(records[0].counts[position]))])
    return table


def quality(bundle: Path, low: str, data: list[str], options: Any, work: Path) -> tuple[list[Any], list[Target]]:
    """Rows by budget and policy, and whether hotness wins where the workload has shifted."""
    names = [Path(f).stem for f in data]

    def score(policy: str, memory: int | None = None, files: list[str] = data, trace: Path | None = None) -> Evaluation:
        return evaluate(
            bundle, files, policy, device_memory=memory, dtype=options.dtype, length=options.length,
            samples=options.windows, trace=trace,
        )  # fmt: skip

    def row(share: str, policy: str, got: Evaluation) -> dict[str, Any]:
        out: dict[str, Any] = {"budget": share, "policy": policy}
        out |= {n: f.perplexity for n, f in zip(names, got.files, strict=True)}
        out |= {"promotions": got.promotions, "waits": got.forward_waits, "tokens/s": got.tokens_per_second}
        return out | {"peak MB": got.resident_bytes_peak / 1e6}

    first = work / "first.jsonl"
    all_low = score(f"static:{low}", trace=None)
    all_high = score("static:bf16")
    score(f"static:{low}", files=data[:1], trace=first)
    rows = [row("", f"all {low}", all_low), row("", "all bf16", all_high)]
    targets = []
    span = all_high.resident_bytes_peak - all_low.resident_bytes_peak
    hot = f"hotness:lo={low},interval={options.interval},rate={options.rate}"
    for share in SHARES:
        budget, shown = all_low.resident_bytes_peak + int(share * span), f"{share:.0%}"
        model = moepack.load(bundle, policy=hot, device_memory=budget, dtype=getattr(torch, options.dtype))
        rooms = model.moepack.live.plan.room()
        model.moepack.close()
        file = work / "map.json"
        # A static map needs no low version beside a high one: it has room for more experts.
        per_layer = [int(n + n * _ratio(model)) for n in rooms]
        file.write_text(json.dumps({"versions": first_file_map(first, per_layer, "bf16", low)}))
        static, live, lru = score(f"static:{file}", budget), score(hot, budget), score(f"lru:lo={low}", budget)
        rows += [row(shown, "static, first file", static), row(shown, "hotness", live), row(shown, "lru", lru)]
        for i, name in enumerate(names[1:], start=1):
            against = live.files[i].perplexity
            ratio = against / all_low.files[i].perplexity
            targets.append(Target(f"{shown}, {name}: hotness over all {low}", ratio, 1, "lower"))
            ratio = against / static.files[i].perplexity
            targets.append(Target(f"{shown}, {name}: hotness over the static map", ratio, 1, "lower"))
        targets.append(Target(f"{shown}: times a forward pass waited under hotness", live.forward_waits, 0, "lower"))
        targets.append(Target(f"{shown}: peak over the budget", live.resident_bytes_peak / budget, 1, "lower"))
    return rows, targets


def _ratio(model: Any) -> float:
    """Bytes of a low expert over what a high one takes more."""
    plan = model.moepack.live.plan
    low, high = plan.sizes[0][plan.low], plan.sizes[0][plan.high]
    return float(low / (high - low))


def tpot(bundle: Path, low: str, options: Any) -> tuple[list[Any], list[Target]]:
    """Decoding steps, with and without promotions at the rate limit, in turns so that both see the same machine."""
    policy = f"hotness:lo={low},interval=1e9,rate={options.rate}"
    model = moepack.load(bundle, policy=policy, device_memory=1 << 40, dtype=getattr(torch, options.dtype))
    live = model.moepack.live
    keys = list(live.residency.entries)
    times: dict[bool, list[float]] = {False: [], True: []}
    moved = 0
    began_at: float = 0
    seconds = 0.0
    with torch.inference_mode():
        for turn in range(options.turns):
            forced = bool(turn % 2)
            out = model(torch.ones(1, 32, dtype=torch.long), use_cache=True)
            before, began_at = live.device.moved, time.perf_counter()
            for step in range(options.steps):
                if forced and not live.transitions.queues().updates:  # all there: let them go, and fetch them again
                    live.transitions.want({})
                    for key in keys:
                        live.transitions.residency.start(key, live.plan.low)
                    live.transitions.want(dict.fromkeys(keys, live.plan.high))
                token = torch.full((1, 1), 5 + step)
                began = time.perf_counter()
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                times[forced].append(time.perf_counter() - began)
            if forced:
                moved += live.device.moved - before
                seconds += time.perf_counter() - began_at
            live.transitions.want({})
            while live.residency.in_flight():
                time.sleep(0.001)
            for key in keys:
                live.residency.start(key, live.plan.low)
            model(torch.ones(1, 1, dtype=torch.long))
    model.moepack.close()
    rows, marks = [], {}
    for forced, values in times.items():
        cuts = statistics.quantiles(values, n=100)
        marks[forced] = statistics.median(values), cuts[98]
        rows.append(
            {
                "budget": "",
                "policy": "TPOT, promotions at the rate limit" if forced else "TPOT, none",
                "TPOT median ms": 1000 * marks[forced][0],
                "TPOT p99 ms": 1000 * marks[forced][1],
                "copied MB/s": moved / seconds / 1e6 if forced else 0.0,
                "waits": live.waits,
            }
        )
    return rows, [
        Target("TPOT median with promotions over without", marks[True][0] / marks[False][0], 1.05, "lower"),
        Target("TPOT p99 with promotions over without", marks[True][1] / marks[False][1], 1.25, "lower"),
    ]


def main() -> None:
    """Parse arguments, build, serve, print."""
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe")
    parser.add_argument("--bundle", type=Path, help="one that is built already, with bf16 and the low version")
    parser.add_argument("--calibration", action="append", help="text to calibrate on")
    parser.add_argument("--data", action="append", help="text to serve, in this order")
    parser.add_argument("--low", default="w2", help="the low version")
    parser.add_argument("--method", default="gptq", help="the recipe's quantize.method")
    parser.add_argument("--samples", type=int, default=192, help="calibration windows of 256 tokens")
    parser.add_argument("--windows", type=int, default=128, help="windows to serve, a file")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--dtype", default="bfloat16", help="of activations")
    parser.add_argument("--interval", type=float, default=0.25, help="T_u in seconds: these sessions are short")
    parser.add_argument("--rate", type=float, default=200.0, help="megabytes a second for promotions")
    parser.add_argument("--turns", type=int, default=16, help="of decoding, half of them with promotions")
    parser.add_argument("--steps", type=int, default=100, help="tokens a turn")
    args = parser.parse_args()
    quiet_libraries()
    calibration = args.calibration or [str(EXAMPLES / "text" / "calibration.jsonl")]
    data = args.data or [str(EXAMPLES / "text" / "evaluation.jsonl")]
    if args.quick:
        args.windows, args.samples, args.turns, args.steps = 32, 32, 4, 40
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bundle = args.bundle
        if bundle is None:
            bundle = work / "bundle"
            shown = f"calibration: {{samples: {args.samples}, length: 256, batch_size: 16}}"
            text = f"versions: [bf16, {args.low}]\nquantize: {{method: {args.method}}}\n{shown}"
            with RichReporter() as reporter:
                build(args.checkpoint, bundle, parse_recipe(text, "benchmark"), calibration, reporter=reporter)
        rows, targets = quality(bundle, args.low, data, args, work)
        more, others = tpot(bundle, args.low, args)
    names = [Path(f).stem for f in data]
    columns = ["budget", "policy", *names, "promotions", "waits", "tokens/s", "peak MB"]
    columns += ["TPOT median ms", "TPOT p99 ms", "copied MB/s"]
    finish(f"residency of {args.checkpoint.name}", columns, [*rows, *more], [*targets, *others], args.json)


if __name__ == "__main__":
    main()
