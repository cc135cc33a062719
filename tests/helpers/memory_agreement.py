"""Run as a process of its own: serves a bundle in a budget and compares what the process takes with what is reserved.

    python tests/helpers/memory_agreement.py BUNDLE MODEL BUDGET [DEVICE]

Prints JSON: the peak of anonymous resident memory (of the allocator on a GPU) above that before loading, the tracker's
peak, and what it counts. Warms up on MODEL first, a tiny one, so that what libraries take once does not count.
"""

import gc
import json
import os
import sys
import threading
import time

import torch
from support import ids as token_ids
from support import load_for_logits

from benchmarks.limited.cage import anonymous

POLICY = "hotness:hi=bf16,lo=w2,prior=none,interval=0.1,rate=0,margin=0,slack=0"


class Sampler:
    """The most anonymous memory there was, looked at every millisecond."""

    def __init__(self):
        self.peak, self._stop = 0, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop:
            self.peak = max(self.peak, anonymous(os.getpid()))
            time.sleep(0.001)

    def close(self) -> int:
        """End, and say the peak."""
        self._stop = True
        self._thread.join()
        return self.peak


def ids(model, tokens: int, seed: int = 0) -> torch.Tensor:
    return token_ids(tokens, seed).to(model.device)


def promote(model):
    """Serve until the budget is full, five seconds at the most."""
    end = time.monotonic() + 5
    while time.monotonic() < end and model.moepack.tracker.free > 8 << 20:
        model(ids(model, 512, seed=int(1000 * time.monotonic())), use_cache=False)


@torch.inference_mode()
def serve(model):
    """Promotions to the budget's brim, caches that grow past what was asked and die, prefills at the peak."""
    promote(model)
    cache = None
    for step in range(3):
        cache = model(ids(model, 512, seed=step), past_key_values=cache, use_cache=True).past_key_values
    for step in range(8):
        cache = model(ids(model, 1, seed=step), past_key_values=cache, use_cache=True).past_key_values
    del cache
    end = time.monotonic() + 10
    while time.monotonic() < end and model.moepack.tracker.held("kv"):
        time.sleep(0.05)
    promote(model)
    model(ids(model, 512), use_cache=True)


def main():
    """Warm up, load, serve, print."""
    bundle, tiny, budget, *rest = sys.argv[1:]
    device = rest[0] if rest else "cpu"
    gpu = device.startswith("cuda")
    warm = load_for_logits(tiny, device=device, policy=POLICY, device_memory=256 << 20)
    with torch.inference_mode():
        for tokens in (1, 512):
            warm(ids(warm, tokens), use_cache=True)
    warm.moepack.close()
    del warm
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else anonymous(os.getpid())
    sampler = Sampler()
    model = load_for_logits(bundle, device=device, policy=POLICY, device_memory=int(budget), kv_tokens=1024)
    serve(model)
    serving = model.moepack
    serving.close()
    sampled = sampler.close()
    taken = (torch.cuda.max_memory_allocated() if gpu else sampled) - before
    facts = {"taken": taken, "reserved": serving.tracker.peak, "budget": int(budget), "fixed": str(serving.fixed)}
    print(json.dumps(facts | {"named": serving.tracker.named(), "counters": serving.counters()}))


if __name__ == "__main__":
    main()
