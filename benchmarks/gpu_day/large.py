"""Qwen3-30B-A3B on generated weights: a whole bundle that the runtime loads and serves, in budgets that hold it or not.

Tokens are those of a text of one topic (limited/shapes.py), so that experts come again as they do in a text.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

import moepack
from benchmarks.common import Row, least_budget
from benchmarks.limited.shapes import SHAPES, Shape, text
from moepack.families.arguments import with_cache

from .bundles import made_bundle, sized
from .rows import Entry, Measured, Rows, Setting
from .served import captures

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from moepack.runtime.served_model import ServedModel

WHOLE = SHAPES["qwen3-moe"]
QUARTER = SHAPES["quarter"]
# tokens: of a prompt, before the clock, on the clock, of the cache
PROMPT = 512
WARM = 16
STEPS = 48
ROOM = 1024
# that the server decodes together, and tokens of each one's prompt
SEQUENCES = (1, 4, 16)
READ = 64
HOTNESS = "hotness:hi=w4,lo=w2"
PINNED = "hotness:hi=w4,lo=w4@pinned"
PAGED = "paged:lo=pinned"
BUDGETS = {  # bytes for the whole model; for a small one somewhat more than the least
    f"{PINNED} in 8 GB": (WHOLE, PINNED, 8e9),
    f"a quarter, {PAGED} in 4 GB": (QUARTER, PAGED, 4e9),
    f"{HOTNESS} in 14 GB": (WHOLE, HOTNESS, 14e9),
    "lru:hi=w4,lo=absent in 8 GB": (WHOLE, "lru:hi=w4,lo=absent", 8e9),
}


def rows(setting: Setting) -> Rows:
    """The stage's rows: kernels that read host memory first, and last what waits for the host in every layer."""
    out = {"bundles are written": Entry(lambda: written(setting), on_cpu=True)}
    budgets = {
        label: Entry(partial(limited, setting, *how), on_cpu=how[1] in (HOTNESS, PINNED))
        for label, how in BUDGETS.items()
    }
    last = list(budgets)[-1]
    out |= {label: entry for label, entry in budgets.items() if label != last}
    out["w4, dense w8: token, launched one by one"] = Entry(lambda: token(setting, graphs=False), on_cpu=True)
    out["w4, dense w8: token, by graph"] = Entry(lambda: token(setting, graphs=True))
    out["w4, dense w8: prompt of 512"] = Entry(lambda: prompt(setting), on_cpu=True)
    for kind in ("Launch", "Synchronize"):
        out[f"w4, dense w8: {kind.lower()} calls of a token"] = Entry(partial(calls, setting, kind), on_cpu=True)
    for n in SEQUENCES:
        work = partial(server, setting, n)
        out[f"w4, dense w8: a step of the server, {n} sequence{'s' * (n > 1)}"] = Entry(work, on_cpu=n == 4)
    return out | {last: budgets[last]}


def written(setting: Setting) -> Measured:
    """Seconds to write the bundles, or to find those that an earlier run wrote."""
    began = time.perf_counter()
    for shape in (WHOLE, QUARTER):
        made_bundle(setting, shape)
    return Measured(time.perf_counter() - began, "s")


def _load(setting: Setting, shape: Shape, policy: str, budget: float | None) -> ServedModel:
    load = partial(
        moepack.load,
        made_bundle(setting, shape),
        device=setting.device,
        policy=policy,
        dense="w8",
        kv_tokens=ROOM,
        prefill_tokens=PROMPT,
        all_logits=False,
    )
    if budget is not None and setting.small:
        budget = 1.25 * least_budget(lambda memory: load(device_memory=memory))
    model: ServedModel = load(device_memory=None if budget is None else round(budget))
    return model


@lru_cache(1)
def _whole(setting: Setting) -> tuple[ServedModel, float]:
    """The model with all experts at w4, for several rows, and the seconds that it took to load."""
    began = time.perf_counter()
    return _load(setting, WHOLE, "static:w4", None), time.perf_counter() - began


def _cache(model: PreTrainedModel, static: bool) -> Cache:
    """A cache; passes with a static one are captured."""
    from transformers import DynamicCache, StaticCache

    return StaticCache(config=model.config, max_cache_len=ROOM) if static else DynamicCache(config=model.config)


def _pass(model: PreTrainedModel, cache: Cache, ids: list[int], setting: Setting) -> float:
    """Seconds of a pass, with the host's wait for its logits."""
    began = time.perf_counter()
    given = torch.tensor([ids], device=setting.torch)
    out = model(given, use_cache=True, logits_to_keep=1, **with_cache(model, cache))
    out.logits[0, -1, 0].item()
    return time.perf_counter() - began


def _ids(setting: Setting) -> tuple[list[int], list[int]]:
    """A prompt, and the tokens that follow it."""
    vocabulary = sized(setting, WHOLE).vocabulary
    ids = [i % vocabulary for i in text(0, PROMPT + WARM + STEPS, 1)]
    return ids[:PROMPT], ids[PROMPT:] if not setting.small else ids[PROMPT : PROMPT + 12]


def _times(model: PreTrainedModel, cache: Cache, setting: Setting) -> tuple[float, list[float]]:
    first, after = _ids(setting)
    with torch.inference_mode():
        read = _pass(model, cache, first, setting)
        times = [_pass(model, cache, [i], setting) for i in after]
    return read, times[-STEPS:] if not setting.small else times[4:]


def token(setting: Setting, graphs: bool) -> Measured:
    """Milliseconds of a token, in the median, all experts at w4 and matrices outside them from packed w8."""
    model, loading = _whole(setting)
    cache = _cache(model, graphs)
    before = torch.cuda.memory_reserved() if setting.on_gpu else 0
    with captures() as said:
        _, times = _times(model, cache, setting)
    taken = (torch.cuda.memory_reserved() if setting.on_gpu else 0) - before
    took = statistics.median(times)
    more = {"tokens/s": 1 / took, "p90 ms": 1e3 * statistics.quantiles(times, n=10)[8], "load s": loading, "log": said}
    more["MB taken by the cache and the graph"] = taken / 1e6
    if graphs:
        more["kernels us"] = _kernels(lambda: _pass(model, cache, _ids(setting)[1][:1], setting))
    return Measured(took * 1e3, "ms", more=more)


def _kernels(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of a pass, by kernel: the dearest."""
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    found = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:24]
    return {f"{e.count} {e.key[:60]}": e.self_device_time_total for e in found}


def prompt(setting: Setting) -> Measured:
    """Milliseconds of a prompt's pass: the median of three after one."""
    ids, _ = _ids(setting)
    model = _whole(setting)[0]
    with torch.inference_mode():
        times = [_pass(model, _cache(model, False), ids, setting) for _ in range(4)]
    took = statistics.median(times[1:])
    return Measured(1e3 * took, "ms", more={"tokens/s": len(ids) / took, "first ms": 1e3 * times[0]})


def calls(setting: Setting, kind: str) -> Measured:
    """How often a token's pass, launched one by one, calls the runtime's functions of a kind."""
    model = _whole(setting)[0]
    cache = _cache(model, False)
    with torch.inference_mode():
        _pass(model, cache, _ids(setting)[0], setting)
        one = torch.ones(1, 1, dtype=torch.long, device=setting.torch)
        counted, more = calls_of(lambda: model(one, use_cache=True, **with_cache(model, cache)), kind, setting)
    return Measured(counted, "calls", limit=0 if kind == "Synchronize" else None, more=more)


def calls_of(work: Callable[[], object], kind: str, setting: Setting) -> tuple[int, Row]:
    """How often work calls the runtime's functions of a kind once it is warm, and which, by torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        work()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * setting.on_gpu]) as seen:
        work()
    averages = seen.key_averages()
    calls = {e.key: e.count for e in averages if e.key.startswith("cu") and kind in e.key}
    calls = {k: n - (k == "cudaDeviceSynchronize") for k, n in calls.items()}  # one is the profiler's own, at its end
    operations = sum(e.count for e in averages if e.key.startswith("aten::"))
    return sum(calls.values()), {"calls": calls, "aten operations": operations}


def server(setting: Setting, sequences: int) -> Measured:
    """Milliseconds of a decoding pass of the server's engine, greedy choice included, in the median."""
    from moepack.server.batching.engine import Engine, StepInput

    model = _whole(setting)[0]
    engine = Engine(model, PROMPT, 0)
    wrapper = model._moepack_wrapper
    try:
        slots = [engine.add(ROOM) for _ in range(sequences)]
        ids = _ids(setting)[0]
        for n, slot in enumerate(slots):
            engine.run([StepInput(slot, ids[n * 7 :][:READ], is_prompt=True)])

        def step(token: int) -> float:
            began = time.perf_counter()
            out = engine.run([StepInput(slot, [ids[token + n]]) for n, slot in enumerate(slots)])
            torch.stack([o[-1].argmax() for o in out if o is not None]).tolist()
            return time.perf_counter() - began

        count = 4 if setting.small else STEPS
        with captures() as said:
            times = [step(n) for n in range(WARM * (not setting.small) + count)][-count:]
            kernels = _kernels(lambda: step(0)) if setting.on_gpu else {}
        captured = wrapper.graphs
        wrapper.graphs = None
        try:
            eager = [step(n) for n in range(count // 4 + 1)]
        finally:
            wrapper.graphs = captured
    finally:
        model.config._attn_implementation = engine._native
    took = statistics.median(times)
    more = {
        "tokens/s": sequences / took,
        "launched one by one ms": 1e3 * statistics.median(eager),
        "log": said,
        "kernels us": kernels,
    }
    return Measured(1e3 * took, "ms", more=more)


def limited(setting: Setting, shape: Shape, policy: str, budget: float) -> Measured:
    """Milliseconds of a token, in the mean, in a budget: what waits is in it."""
    _whole.cache_clear()  # and the model with it
    gc.collect()
    began = time.perf_counter()
    model = _load(setting, shape, policy, budget)
    loading = time.perf_counter() - began
    try:
        live = model.moepack.manager
        assert live is not None
        read, times = _times(model, _cache(model, setting.on_gpu and not live.policy.needs.layers), setting)
        facts = model.moepack.counters()
        more = {
            "tokens/s": len(times) / sum(times),
            "median ms": 1e3 * statistics.median(times),
            "prompt s": read,
            "load s": loading,
            "waits": live.waits,
            "peak MB": model.moepack.resident_bytes_peak / 1e6,
            "layers": sized(setting, shape).layers,
            "host": live.device.host()["mode"] if hasattr(live.device, "host") else "",
            "counters": {k: v for k, v in facts.items() if isinstance(v, int | float)},
        }
    finally:
        model.moepack.close()
    return Measured(1e3 * statistics.fmean(times), "ms", more=more)
