"""Run as a process of its own: serves a bundle in a budget and compares what the process takes with what is reserved.

    python tests/helpers/memory_agreement.py BUNDLE MODEL BUDGET [DEVICE]

Prints JSON: bytes before loading, the peak of anonymous resident memory (of the allocator on a GPU), the tracker's
peak, and marks on the way. Warms up on MODEL first, a tiny one, so that what libraries take once does not count.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import moepack

POLICY = "hotness:hi=bf16,lo=w2,prior=none,interval=0.1,rate=0,margin=0,slack=0"


def anonymous() -> int:
    """Anonymous resident memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not say")


class Sampler:
    """The most anonymous memory there was, looked at every millisecond; and beside each rise, what was reserved."""

    def __init__(self) -> None:
        self.peak, self.phase, self._stop = 0, 0, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            now = anonymous()
            self.peak, self.phase = max(self.peak, now), max(self.phase, now)
            time.sleep(0.001)

    def close(self) -> int:
        """End, and say the peak."""
        self._stop = True
        self._thread.join()
        return self.peak


def ids(model: Any, tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(1, 4000, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return drawn.to(model.device)


def serve(model: Any, seconds: float, sampler: Sampler) -> list[Any]:
    """Promotions to the budget's brim, caches that grow past what was asked and die, prefills at the peak."""
    marks, serving = [], model.moepack

    def mark(name: str) -> None:
        marks.append((name, sampler.phase, serving.tracker.reserved))
        sampler.phase = 0

    mark("loaded")
    with torch.inference_mode():
        end = time.monotonic() + seconds
        while time.monotonic() < end and serving.tracker.free > 8 << 20:
            model(ids(model, 512, seed=int(1000 * time.monotonic())), use_cache=False)
        mark("promoted")
        out = None
        for step in range(3):
            cache = None if out is None else out.past_key_values
            out = model(ids(model, 512, seed=step), past_key_values=cache, use_cache=True)
            mark(f"cache of {512 * (step + 1)}")
        for step in range(8):
            out = model(ids(model, 1, seed=step), past_key_values=out.past_key_values, use_cache=True)
        mark("decoded")
        del out, cache
        end = time.monotonic() + 10
        while time.monotonic() < end and serving.tracker.held("kv"):
            time.sleep(0.05)
        end = time.monotonic() + seconds
        while time.monotonic() < end and serving.tracker.free > 8 << 20:
            model(ids(model, 512, seed=int(1000 * time.monotonic())), use_cache=False)
        model(ids(model, 512), use_cache=True)
        mark("promoted again")
    return marks


def main() -> None:
    """Warm up, load, serve, print."""
    bundle, tiny, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    gpu = device.startswith("cuda")
    warm = moepack.load(tiny, device=device, policy=POLICY, device_memory=64 << 20)
    with torch.inference_mode():
        for tokens in (1, 512):
            model_out = warm(ids(warm, tokens), use_cache=True)
    del model_out
    warm.moepack.close()
    del warm
    import gc

    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else anonymous()
    sampler = Sampler()
    began = time.monotonic()
    model = moepack.load(bundle, device=device, policy=POLICY, device_memory=budget, kv_tokens=1024)
    loaded = time.monotonic() - began
    after_load = sampler.peak
    marks = serve(model, 5.0, sampler)
    model.moepack.close()
    sampled = sampler.close()
    peak = torch.cuda.max_memory_allocated() if gpu else sampled
    serving = model.moepack
    print(json.dumps({
        "before": before, "peak": peak, "taken": peak - before, "reserved": serving.tracker.peak, "budget": budget,
        "load_seconds": loaded, "load_peak": after_load - before,
        "fixed": str(serving.fixed), "named": serving.tracker.named(), "counters": serving.counters(),
        "marks": [(n, a - before, r) for n, a, r in marks],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
