"""Time per output token while versions are swapped at the rate limit, and while none is."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import moepack
from benchmarks.common import Row, Target
from moepack.families.arguments import cache_in, with_cache
from moepack.runtime.planning.capacity import base_bytes

from .quality import PLENTY, RATE


def tpot(bundle: Path, low: str, options: argparse.Namespace) -> tuple[list[Row], list[Target]]:
    """Decoding steps, with and without swaps at the rate limit, in turns so that both see the same machine.

    Half of the experts fit at bf16. A turn with swaps wants one half and, once that is there, the other: each swap is a
    low version fetched, a bf16 one freed, another fetched.
    """
    policy = f"hotness:hi=bf16,lo={low},between=no,interval=1e9,rate={RATE}"
    dtype = getattr(torch, options.dtype)
    model = moepack.load(bundle, policy=policy, device_memory=PLENTY, dtype=dtype)
    live = model.moepack.manager
    assert live is not None
    plan = live.plan
    model.moepack.close()
    half = (base_bytes(plan.sizes, plan.experts, 0) + base_bytes(plan.sizes, plan.experts)) // 2
    model = moepack.load(bundle, policy=policy, device_memory=plan.fixed + half + plan.reserve, dtype=dtype)
    live = model.moepack.manager
    assert live is not None
    keys = list(live.residency.entries)
    halves = [dict.fromkeys(keys[i::2][:-8], 0) for i in range(2)]  # with room for a KV reserve
    turns, steps = (4, 40) if options.quick else (16, 100)  # of decoding, half of them with promotions; tokens of each
    times: dict[bool, list[float]] = {False: [], True: []}
    moved = 0
    seconds = 0.0
    with torch.inference_mode():
        for turn in range(turns):
            forced = bool(turn % 2)
            out = model(torch.ones(1, 32, dtype=torch.long), use_cache=True)
            before = live.device.moved
            began_at = time.perf_counter()
            for step in range(steps):
                if forced and not live.transitions.queues().updates and not len(live.residency.flying):
                    halves.reverse()
                    live.transitions.want(halves[0])
                token = torch.full((1, 1), 5 + step)
                began = time.perf_counter()
                out = model(token, use_cache=True, **with_cache(model, cache_in(out)))
                times[forced].append(time.perf_counter() - began)
            if forced:
                moved += live.device.moved - before
                seconds += time.perf_counter() - began_at
                live.transitions.want({})
                while len(live.residency.flying):
                    time.sleep(0.001)
    counts = live.residency.counts
    model.moepack.close()
    rows = []
    marks = {}
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
