"""Time per output token while versions are swapped at the rate limit, and while none is."""

import statistics
import time
from pathlib import Path

import torch

import moepack
from benchmarks.common import Row, Target
from benchmarks.decoding import Reading
from moepack.runtime.planning.capacity import base_bytes

from .quality import RATE, planned


def tpot(bundle: Path, quick: bool) -> tuple[list[Row], list[Target]]:
    """Decoding steps, with and without swaps at the rate limit, in turns so that both see the same machine.

    Half of the experts fit at bf16. A turn with swaps wants one half and, once that is there, the other: each swap is a
    low version fetched, a bf16 one freed, another fetched.
    """
    policy = f"hotness:hi=bf16,lo=w2,between=no,interval=1e9,rate={RATE}"
    plan = planned(bundle, policy)
    half = (base_bytes(plan.sizes, plan.experts, 0) + base_bytes(plan.sizes, plan.experts)) // 2
    model = moepack.load(bundle, policy=policy, device_memory=plan.fixed + half + plan.reserve)
    live = model.moepack.manager
    assert live is not None
    keys = list(live.residency.entries)
    halves = [dict.fromkeys(keys[i::2][:-8], 0) for i in range(2)]  # with room for a KV reserve
    turns, steps = (4, 40) if quick else (16, 100)  # of decoding, half of them with promotions; tokens of each
    times: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        for turn in range(turns):
            forced = bool(turn % 2)
            run = Reading(model)
            run(torch.ones(1, 32, dtype=torch.long))
            for step in range(steps):
                if forced and not live.transitions.queues().updates and not len(live.residency.flying):
                    halves.reverse()
                    live.transitions.want(halves[0])
                token = torch.full((1, 1), 5 + step)
                began = time.perf_counter()
                run(token)
                times[forced].append(time.perf_counter() - began)
            if forced:
                live.transitions.want({})
                while len(live.residency.flying):
                    time.sleep(0.001)
    counts = live.residency.counts
    model.moepack.close()
    rows: list[Row] = []
    for forced, values in times.items():
        row: Row = {"budget": "", "policy": "TPOT, swaps at the rate limit" if forced else "TPOT, none"}
        row["TPOT median ms"] = 1000 * statistics.median(values)
        row["TPOT p99 ms"] = 1000 * statistics.quantiles(values, n=100)[98]
        row |= {"promotions": counts.promotions * forced, "waits": live.waits}
        rows.append(row)
    over = {what: rows[1][f"TPOT {what} ms"] / rows[0][f"TPOT {what} ms"] for what in ("median", "p99")}
    return rows, [
        Target("TPOT median with swaps over without", over["median"], 1.05, "lower"),
        Target("TPOT p99 with swaps over without", over["p99"], 1.25, "lower"),
    ]
