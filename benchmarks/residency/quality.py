"""Quality in a budget, by policy, in one session whose workload shifts."""

import json
from pathlib import Path

import numpy as np

import moepack
from benchmarks.common import Row, Target
from moepack.reports.evaluate import Evaluation, evaluate
from moepack.runtime.planning.capacity import even_room
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.plan import Plan
from moepack.runtime.trace import read_trace

LOW = "w2"
PLENTY = 1 << 40  # bytes: a budget that nothing comes near
INTERVAL = 0.1  # T_u in seconds: these sessions are short
RATE = 200  # megabytes a second for promotions
WINDOWS = 80  # that are served, a file
LENGTH = 128  # tokens of each
SHARES = (0.2, 0.4, 0.6)  # of the way from all-low to all-bf16


def first_file_maps(trace: Path, plan: Plan, room: int) -> dict[str, list[list[str]]]:
    """Maps from a trace's router counts: as many experts at bf16 as fit `room` bytes beyond all-low, by two rules."""
    totals = np.sum([np.array(record.counts, dtype=float) for record in read_trace(trace).records], axis=0)
    rooms = even_room([row[0] - row[plan.base] for row in plan.sizes], plan.experts, room)
    high = str(plan.ladder[0])
    low = str(plan.ladder[plan.base])
    maps = {}
    for name, values in (
        ("most used", totals),
        ("by loss", totals * np.array([x[:, plan.base] - x[:, 0] for x in plan.losses])),
    ):
        best = [set(np.argsort(-row, kind="stable")[:n].tolist()) for row, n in zip(values, rooms, strict=True)]
        maps[name] = [[high if e in top else low for e in range(n)] for top, n in zip(best, plan.experts, strict=True)]
    return maps


def planned(bundle: Path, policy: str) -> Plan:
    """The plan of a policy in a budget that nothing comes near."""
    model = moepack.load(bundle, policy=policy, device_memory=PLENTY)
    with model.moepack as served:
        assert served.manager is not None
        return served.manager.plan


def quality(bundle: Path, data: list[str], windows: int, work: Path) -> tuple[list[Row], list[Target]]:
    """Rows by budget and policy, and whether hotness wins where the workload has shifted."""
    names = [Path(f).stem for f in data]

    def score(policy: str, memory: int | None = None, files: list[str] = data, trace: Path | None = None) -> Evaluation:
        served = LoadOptions(policy=policy, device_memory=memory)
        return evaluate(bundle, files, served, length=LENGTH, samples=windows, trace=trace)

    def row(share: str, policy: str, got: Evaluation) -> Row:
        out: Row = {"budget": share, "policy": policy}
        out |= {n: f.perplexity for n, f in zip(names, got.files, strict=True)}
        out |= {"promotions": got.promotions, "MB copied": got.bytes_moved / 1e6}
        out |= {"waits": got.forward_waits, "tokens/s": got.tokens_per_second}
        return out | {"peak MB": got.resident_bytes_peak / 1e6}

    first = work / "first.jsonl"
    all_low = score(f"static:{LOW}", PLENTY)
    all_high = score("static:bf16", PLENTY)
    score(f"static:{LOW}", files=data[:1], trace=first)
    rows = [row("", f"all {LOW}", all_low), row("", "all bf16", all_high)]
    targets = []
    span = all_high.resident_bytes_peak - all_low.resident_bytes_peak
    timing = f"interval={INTERVAL},rate={RATE}"
    hot = f"hotness:hi=bf16,lo={LOW},between=no,{timing}"
    plan = planned(bundle, hot)
    for share in SHARES:
        budget = all_low.resident_bytes_peak + int(share * span)
        shown = f"{share:.0%}"
        statics = []
        for name, table in first_file_maps(first, plan, int(share * span)).items():
            file = work / "map.json"
            file.write_text(json.dumps({"versions": table}))
            statics.append(score(f"static:{file}", budget))
            rows.append(row(shown, f"static, first file, {name}", statics[-1]))
        live = score(hot, budget)
        own = score(f"hotness:between=no,{timing}", budget)
        ladder = score(f"hotness:{timing}", budget)
        rows += [row(shown, "hotness, the two", live), row(shown, "hotness, two of its choice", own)]
        rows.append(row(shown, "hotness", ladder))
        rows.append(row(shown, "lru", score(f"lru:hi=bf16,lo={LOW}", budget)))
        for i, name in enumerate(names[1:], start=1):
            against = live.files[i].perplexity
            ratio = against / all_low.files[i].perplexity
            targets.append(Target(f"{shown}, {name}: the two over all {LOW}", ratio, 1, "lower"))
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
