"""Promotions while forward passes overlap, by threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moepack
from benchmarks.common import Target
from moepack.calibrate.text.windows import load_tokenizer, windows
from moepack.runtime.planning.capacity import base_bytes

THREADS = (1, 2, 4, 8)
WARM = 6.0  # seconds before counting: at first, activations of passes that run at once push experts out
FAST = "alpha=0,margin=0,slack=0,anchor=0,interval=0.1,rate=0"
PLENTY = 1 << 40  # bytes: a budget that nothing comes near
SHIFT = 2.0  # seconds until all threads read another text, so that other experts are hot


def overlap(bundle: Path, low: str, data: list[str], options: Any) -> tuple[list[Any], list[Target]]:
    """Rows by threads. All have the same bytes of experts: half of the way from all-low to all-bf16.

    Passes that run at once each take activations from the budget, and those come from the experts. So each number of
    threads gets what its passes take beside half of the experts. Thread counts go up, then down, so that a machine that
    others use is as busy for all.
    """
    tokens = options.tokens
    tokenizer = load_tokenizer(bundle)
    texts = [windows(name, tokenizer, tokens, 64) for name in data]
    policy = f"hotness:hi=bf16,lo={low},between=no,{FAST}"
    dtype = getattr(torch, options.dtype)

    def load(threads: int, memory: int) -> Any:
        return moepack.load(
            bundle, policy=policy, dtype=dtype, device_memory=memory, prefill_tokens=tokens, batch=threads
        )

    budgets: dict[int, int] = {}
    sums: dict[int, dict[str, float]] = {}
    for threads in THREADS:
        model = load(threads, PLENTY)
        plan = model.moepack.manager.plan
        half = (base_bytes(plan.sizes, plan.experts, 0) + base_bytes(plan.sizes, plan.experts)) // 2
        beside = _session(model, texts, threads, 1.0)["kv"]
        budgets[threads] = plan.fixed + half + plan.reserve + int(beside)
        model.moepack.close()
    for threads in (*THREADS, *reversed(THREADS)):
        model = load(threads, budgets[threads])
        found = _session(model, texts, threads, options.seconds / 2, WARM)
        before = sums.get(threads, dict.fromkeys(found, 0.0))
        sums[threads] = {name: before[name] + value for name, value in found.items()}
        sums[threads]["peak MB"] = model.moepack.resident_bytes_peak / 1e6
        model.moepack.close()
    return [_row(threads, found, options.seconds) for threads, found in sums.items()], _judged(sums)


def _session(model: Any, texts: list[Any], threads: int, seconds: float, warm: float = 0.0) -> dict[str, float]:
    """What passes and the library's own threads did for so many seconds, after `warm` seconds of the same."""
    began = time.monotonic() + warm
    until = began + seconds
    length = texts[0].shape[1]
    passes = [0] * threads
    processor = [0.0] * threads
    reserved = 0

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        before = 0.0
        with torch.inference_mode():
            while (now := time.monotonic()) < until:
                if not before and now >= began:
                    before, passes[number] = time.thread_time(), 0
                text = texts[int(now / SHIFT) % len(texts)]
                at = int(rng.integers(len(text)))
                model(text[at : at + 1].roll(int(rng.integers(length)), 1), use_cache=False)
                passes[number] += 1
        if not before:  # one pass took all of it
            before, passes[number] = time.thread_time(), 0
        processor[number] = time.thread_time() - before

    running = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    time.sleep(warm)
    counters = model.moepack.counters()
    own = _own()
    while time.monotonic() < until:
        time.sleep(0.02)
        reserved = max(reserved, model.moepack.manager.transitions.kv_bytes)
    after = model.moepack.counters()
    own = _own() - own
    for thread in running:
        thread.join()
    counted = {name: float(after[name] - counters[name]) for name in ("promotions", "demotions", "forward_waits")}
    return {**counted, "passes": sum(passes), "in passes": sum(processor), "own": own, "kv": reserved}


def _own() -> float:
    """Processor seconds of the threads that decide, copy and publish."""
    clocks = [t.ident for t in threading.enumerate() if t.name.startswith("moepack-")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in clocks if ident)


def _row(threads: int, found: dict[str, float], seconds: float) -> dict[str, Any]:
    passes = max(1.0, found["passes"])
    return {
        "budget": "",
        "policy": f"{threads} thread{'s' * (threads > 1)}",
        "passes a second": found["passes"] / seconds,
        "promotions": int(found["promotions"]),
        "demotions": int(found["demotions"]),
        "waits": int(found["forward_waits"]),
        "processor ms a pass": 1000 * found["in passes"] / passes,
        "and for promotions": 1000 * found["own"] / passes,
        "peak MB": found["peak MB"],
    }


def _judged(sums: dict[int, dict[str, float]]) -> list[Target]:
    one = sums[1]["promotions"]
    if one < 20:  # too short a session, or too large a budget: hardly any promotion was wanted
        return []
    return [
        Target(f"promotions with {n} threads over those with 1", sums[n]["promotions"] / one, 0.7, "higher")
        for n in THREADS[1:]
    ]
