"""What changing versions while serving is worth, and what it costs: quality in a budget, and TPOT, in one run.

    python -m benchmarks.residency --checkpoint MODEL --calibration FILE... --data FILE... [--plot FILE]

Builds one bundle with `bf16`, `w4`, `w3` and `--low`. The files of `--data` are read one after another in one session,
so the workload shifts twice where there are three. At each of three budgets between all-low and all-bf16 it serves them
under: all-low; two static maps for the first file, which the policies below are not told: the experts that the router
chose most there, and those that save most loss there, each with all the room there is, as a map needs no reserve;
`hotness` with the two versions bf16 and low alone, with two of its own choice, and with its ladder of all versions; and
`lru`, which loads what is asked for and waits. Then it decodes token by token, with and without swaps forced at the
rate limit, the two taking turns. Last, a policy that asks for new experts all the time, with passes on one thread, two
and eight: how many promotions get through. Without arguments: the model and texts in examples/.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moepack
from benchmarks.common import Target, arguments, finish
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.progress import RichReporter, quiet_libraries
from moepack.reports.evaluate import Evaluation, evaluate
from moepack.runtime.planning.capacity import base_bytes, even_room
from moepack.runtime.planning.plan import Plan
from moepack.runtime.trace import read_trace

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PLENTY = 1 << 40  # bytes: a budget that nothing comes near
SHARES = (0.2, 0.4, 0.6)  # of the way from all-low to all-bf16


def first_file_maps(trace: Path, plan: Plan, room: int) -> dict[str, list[list[str]]]:
    """Maps from a trace's router counts: as many experts at bf16 as fit `room` bytes beyond all-low, by two rules."""
    totals = np.sum([np.array(record.counts, dtype=float) for record in read_trace(trace).records], axis=0)
    rooms = even_room([row[0] - row[plan.base] for row in plan.sizes], plan.experts, room)
    high, low = str(plan.ladder[0]), str(plan.ladder[plan.base])
    maps = {}
    for name, values in (
        ("most used", totals),
        ("by loss", totals * np.array([x[:, plan.base] - x[:, 0] for x in plan.losses])),
    ):
        best = [set(np.argsort(-row, kind="stable")[:n].tolist()) for row, n in zip(values, rooms, strict=True)]
        maps[name] = [[high if e in top else low for e in range(n)] for top, n in zip(best, plan.experts, strict=True)]
    return maps


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
        out |= {"promotions": got.promotions, "demotions": got.demotions, "MB copied": got.bytes_moved / 1e6}
        out |= {"waits": got.forward_waits, "tokens/s": got.tokens_per_second}
        return out | {"peak MB": got.resident_bytes_peak / 1e6}

    first = work / "first.jsonl"
    all_low, all_high = score(f"static:{low}", PLENTY), score("static:bf16", PLENTY)
    score(f"static:{low}", files=data[:1], trace=first)
    rows = [row("", f"all {low}", all_low), row("", "all bf16", all_high)]
    targets = []
    span = all_high.resident_bytes_peak - all_low.resident_bytes_peak
    timing = f"interval={options.interval},rate={options.rate}"
    hot = f"hotness:hi=bf16,lo={low},between=no,{timing}"
    model = moepack.load(bundle, policy=hot, device_memory=PLENTY, dtype=getattr(torch, options.dtype))
    plan = model.moepack.live.plan
    model.moepack.close()
    for share in SHARES:
        budget, shown = all_low.resident_bytes_peak + int(share * span), f"{share:.0%}"
        statics = []
        for name, table in first_file_maps(first, plan, int(share * span)).items():
            file = work / "map.json"
            file.write_text(json.dumps({"versions": table}))
            statics.append(score(f"static:{file}", budget))
            rows.append(row(shown, f"static, first file, {name}", statics[-1]))
        live, own = score(hot, budget), score(f"hotness:between=no,{timing}", budget)
        ladder = score(f"hotness:{timing}", budget)
        rows += [row(shown, "hotness, the two", live), row(shown, "hotness, two of its choice", own)]
        rows.append(row(shown, "hotness", ladder))
        rows.append(row(shown, "lru", score(f"lru:hi=bf16,lo={low}", budget)))
        for i, name in enumerate(names[1:], start=1):
            against = live.files[i].perplexity
            ratio = against / all_low.files[i].perplexity
            targets.append(Target(f"{shown}, {name}: the two over all {low}", ratio, 1, "lower"))
            ratio = against / min(s.files[i].perplexity for s in statics)
            targets.append(Target(f"{shown}, {name}: the two over the better static map", ratio, 1, "lower"))
        for i, name in enumerate(names):
            best = all_high.files[i].perplexity
            off = [100 * abs(run.files[i].perplexity / best - 1) for run in (ladder, live, own)]
            label = f"{shown}, {name}: % between all bf16 and the ladder, beyond the better two"
            targets.append(Target(label, off[0] - min(off[1:]), 0.05, "lower"))
        targets.append(Target(f"{shown}: times a forward pass waited under hotness", live.forward_waits, 0, "lower"))
        targets.append(Target(f"{shown}: peak over the budget", live.resident_bytes_peak / budget, 1, "lower"))
    return rows, targets


def tpot(bundle: Path, low: str, options: Any) -> tuple[list[Any], list[Target]]:
    """Decoding steps, with and without swaps at the rate limit, in turns so that both see the same machine.

    Half of the experts fit at bf16. A turn with swaps wants one half and, once that is there, the other: each swap is a
    low version fetched, a bf16 one freed, another fetched.
    """
    policy = f"hotness:hi=bf16,lo={low},between=no,interval=1e9,rate={options.rate}"
    dtype = getattr(torch, options.dtype)
    model = moepack.load(bundle, policy=policy, device_memory=PLENTY, dtype=dtype)
    plan = model.moepack.live.plan
    model.moepack.close()
    half = (base_bytes(plan.sizes, plan.experts, 0) + base_bytes(plan.sizes, plan.experts)) // 2
    model = moepack.load(bundle, policy=policy, device_memory=plan.fixed + half + plan.reserve, dtype=dtype)
    live = model.moepack.live
    keys = list(live.residency.entries)
    halves = [dict.fromkeys(keys[i::2][:-8], 0) for i in range(2)]  # with room for a KV reserve
    times: dict[bool, list[float]] = {False: [], True: []}
    moved, seconds = 0, 0.0
    with torch.inference_mode():
        for turn in range(options.turns):
            forced = bool(turn % 2)
            out = model(torch.ones(1, 32, dtype=torch.long), use_cache=True)
            before, began_at = live.device.moved, time.perf_counter()
            for step in range(options.steps):
                if forced and not live.transitions.queues().updates and not live.residency.in_flight():
                    halves.reverse()
                    live.transitions.want(halves[0])
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
    counts = live.residency.counts
    model.moepack.close()
    rows, marks = [], {}
    for forced, values in times.items():
        marks[forced] = statistics.median(values), statistics.quantiles(values, n=100)[98]
        rows.append(
            {
                "budget": "",
                "policy": "TPOT, swaps at the rate limit" if forced else "TPOT, none",
                "TPOT median ms": 1000 * marks[forced][0],
                "TPOT p99 ms": 1000 * marks[forced][1],
                "promotions": counts.promotions if forced else 0,
                "demotions": counts.demotions if forced else 0,
                "MB copied": moved / 1e6 if forced else 0.0,
                "MB/s": moved / seconds / 1e6 if forced else 0.0,
                "waits": live.waits,
            }
        )
    return rows, [
        Target("TPOT median with swaps over without", marks[True][0] / marks[False][0], 1.05, "lower"),
        Target("TPOT p99 with swaps over without", marks[True][1] / marks[False][1], 1.25, "lower"),
    ]


def overlap(bundle: Path, low: str, data: list[str], options: Any) -> tuple[list[Any], list[Target]]:
    """Promotions while passes overlap: all threads read another text every two seconds, so that what is hot changes."""
    from moepack.calibrate.data import load_tokenizer, windows

    tokenizer, tokens = load_tokenizer(bundle), options.length // 4
    texts = [windows(name, tokenizer, tokens, 64) for name in data]
    fast = "alpha=0,margin=0,slack=0,anchor=0,interval=0.5,rate=0"
    model = moepack.load(bundle, policy=f"hotness:hi=bf16,lo={low},between=no", device_memory=PLENTY)
    plan = model.moepack.live.plan
    model.moepack.close()
    half = (base_bytes(plan.sizes, plan.experts, 0) + base_bytes(plan.sizes, plan.experts)) // 2
    rows, promoted = [], {}
    for threads in (1, 2, 8):
        model = moepack.load(
            bundle, policy=f"hotness:hi=bf16,lo={low},between=no,{fast}", dtype=getattr(torch, options.dtype),
            device_memory=plan.fixed + half + plan.reserve, prefill_tokens=tokens, batch=threads,
        )  # fmt: skip
        until, passes = time.monotonic() + options.seconds, [0] * threads

        def work(number: int, model: Any = model, until: float = until, passes: list[int] = passes) -> None:
            rng = np.random.default_rng(number)
            with torch.inference_mode():
                while time.monotonic() < until:
                    text = texts[int(time.monotonic() / 2) % len(texts)]
                    at = int(rng.integers(len(text)))
                    model(text[at : at + 1].roll(int(rng.integers(tokens)), 1), use_cache=False)
                    passes[number] += 1

        running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        counters = model.moepack.counters()
        promoted[threads] = counters["promotions"]
        row = {"budget": "", "policy": f"{threads} threads, {sum(passes) / options.seconds:.0f} passes a second"}
        row |= {name: counters[name] for name in ("promotions", "demotions")}
        rows.append({**row, "waits": counters["forward_waits"], "peak MB": model.moepack.resident_bytes_peak / 1e6})
        model.moepack.close()
    if promoted[1] < 20:  # too short a session, or too large a budget: hardly any were asked for
        return rows, []
    return rows, [Target("promotions with 8 threads over those with 1", promoted[8] / promoted[1], 0.7, "higher")]


def plot(rows: list[Any], names: list[str], low: str, file: Path) -> None:
    """Perplexity of each text over that of all bf16, by budget and policy; and TPOT."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ends = {r["policy"]: r for r in rows if r["policy"].startswith("all ")}
    policies = list(dict.fromkeys(r["policy"] for r in rows if r["budget"]))
    figure, axes = plt.subplots(1, len(names) + 1, figsize=(4 * len(names) + 3, 3.6), layout="constrained")
    for axis, name in zip(axes, names, strict=False):
        best = ends["all bf16"][name]
        for policy in policies:
            mine = [r for r in rows if r["policy"] == policy]
            axis.plot([r["budget"] for r in mine], [100 * (r[name] / best - 1) for r in mine], "o-", label=policy)
        axis.axhline(100 * (ends[f"all {low}"][name] / best - 1), color="gray", linestyle=":", label=f"all {low}")
        axis.set(title=name, xlabel="budget, from all low to all bf16", ylabel="perplexity above bf16, %")
    axes[0].legend(fontsize=7)
    timed = [r for r in rows if "TPOT median ms" in r]
    for i, kind in enumerate(("TPOT median ms", "TPOT p99 ms")):
        axes[-1].bar([x + 0.4 * i for x in range(len(timed))], [r[kind] for r in timed], 0.4, label=kind[5:-3])
    axes[-1].set_xticks([x + 0.2 for x in range(len(timed))], [r["policy"][6:] for r in timed], fontsize=8)
    axes[-1].set(title="TPOT", ylabel="ms")
    axes[-1].legend(fontsize=8)
    figure.savefig(file, dpi=80)


def main() -> None:
    """Parse arguments, build, serve, print."""
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe")
    parser.add_argument("--bundle", type=Path, help="one that is built already, with bf16 and the low version")
    parser.add_argument("--calibration", action="append", help="text to calibrate on")
    parser.add_argument("--data", action="append", help="text to serve, in this order")
    parser.add_argument("--plot", type=Path, help="draw perplexity by budget, and TPOT, into this file")
    parser.add_argument("--low", default="w2", help="the low version")
    parser.add_argument("--method", default="gptq", help="the recipe's quantize.method")
    parser.add_argument("--samples", type=int, default=192, help="calibration windows of 256 tokens")
    parser.add_argument("--windows", type=int, default=128, help="windows to serve, a file")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--dtype", default="bfloat16", help="of activations")
    parser.add_argument("--interval", type=float, default=0.1, help="T_u in seconds: these sessions are short")
    parser.add_argument("--rate", type=float, default=200.0, help="megabytes a second for promotions")
    parser.add_argument("--turns", type=int, default=16, help="of decoding, half of them with promotions")
    parser.add_argument("--steps", type=int, default=100, help="tokens a turn")
    parser.add_argument("--seconds", type=float, default=20.0, help="of passes that overlap, a number of threads")
    args = parser.parse_args()
    quiet_libraries()
    calibration = args.calibration or [str(EXAMPLES / "text" / "calibration.jsonl")]
    data = args.data or [str(EXAMPLES / "text" / "evaluation.jsonl")]
    if args.quick:
        args.windows, args.samples, args.turns, args.steps, args.seconds = 32, 32, 4, 40, 4.0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bundle = args.bundle
        if bundle is None:
            bundle = work / "bundle"
            shown = f"calibration: {{samples: {args.samples}, length: 256, batch_size: 16}}"
            versions = ", ".join(dict.fromkeys(["bf16", "w4", "w3", args.low]))
            text = f"versions: [{versions}]\nquantize: {{method: {args.method}}}\n{shown}"
            with RichReporter() as reporter:
                build(args.checkpoint, bundle, parse_recipe(text, "benchmark"), calibration, reporter=reporter)
        rows, targets = quality(bundle, args.low, data, args, work)
        more, others = tpot(bundle, args.low, args)
        threaded, last = overlap(bundle, args.low, data, args)
        more, others = [*more, *threaded], [*others, *last]
    names = [Path(f).stem for f in data]
    columns = ["budget", "policy", *names, "promotions", "demotions", "MB copied", "waits", "tokens/s", "peak MB"]
    columns += ["TPOT median ms", "TPOT p99 ms", "MB/s"]
    if args.plot is not None:
        plot([*rows, *more], names, args.low, args.plot)
    finish(f"residency of {args.checkpoint.name}", columns, [*rows, *more], [*targets, *others], args.json)


if __name__ == "__main__":
    main()
