"""A whole model of Qwen3-30B-A3B's shape on generated weights: a token by launches and by graph, and what is launched.

All layers share one set of experts, larger than four times an H100's L2; each has matrices of its own outside them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.gpu import layer_like
from benchmarks.limited.shapes import SHAPES
from moepack.runtime.experts.forward import IMPLEMENTATION

from . import predictions
from .bundles import FEW
from .model import LAYER, Shape
from .predictions import VERSIONS
from .rows import Entry, Measured, Rows, Setting
from .steps import attach

SERVED = ("w4", "w2")
THEIRS = "transformers' own BF16"
WARM = 3


def rows(setting: Setting) -> Rows:
    """The stage's rows."""
    out: Rows = {}
    for name in (*SERVED, THEIRS):
        out[f"token, {name}, launched one by one"] = Entry(partial(eager, setting, name), on_cpu=name != "w2")
        out[f"token, {name}, by graph"] = Entry(partial(by_graph, setting, name))
    out["launches of a token"] = Entry(partial(launches, setting, "Launch"), on_cpu=True)
    out["synchronisations of a token"] = Entry(partial(launches, setting, "Synchronize"), on_cpu=True)
    return out


@lru_cache(1)
def _model(setting: Setting, version: str) -> Any:
    """The model, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import moepack.runtime.plugin  # noqa: F401  # registers the experts' implementation

    shape = FEW if setting.small else SHAPES["qwen3-moe"]
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(shape.config()))
        config = AutoConfig.from_pretrained(work)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("grouped_mm" if version == THEIRS else IMPLEMENTATION)
    torch.manual_seed(0)
    shared: dict[str, Any] = {}
    for module in model.modules():
        for name in list(module._parameters):
            if type(module).__name__.endswith("Experts"):
                p = module._parameters.pop(name)
                if version == THEIRS:
                    if name not in shared:
                        made = torch.empty(p.shape, dtype=p.dtype, device=setting.torch).normal_(0, 0.02)
                        shared[name] = torch.nn.Parameter(made, requires_grad=False)
                    module._parameters[name] = shared[name]
            elif (p := module._parameters[name]) is not None:
                made = torch.empty(p.shape, dtype=p.dtype, device=setting.torch)
                made = made.fill_(1.0) if p.dim() == 1 else made.normal_(0, 0.02)
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(setting.torch)
    if version == THEIRS:
        return model
    small = Shape(shape.hidden, shape.inner, shape.experts, shape.top_k)
    experts = layer_like(
        (small if setting.small else LAYER).matrices, [VERSIONS[version]], [version] * shape.experts, setting.torch, 0
    )
    experts.device_table()
    attach(model, experts)
    return model


def eager(setting: Setting, version: str) -> Measured:
    """Milliseconds of a token, in the median."""
    from transformers import DynamicCache

    model = _model(setting, version)
    times = list[float]()
    cache = DynamicCache(config=model.config)
    ids = torch.ones(1, 1, dtype=torch.long, device=setting.torch)
    with torch.inference_mode():
        for _ in range(WARM + (3 if setting.small else 40)):
            began = time.perf_counter()
            model(ids, past_key_values=cache, use_cache=True).logits[0, -1, 0].item()
            times.append(time.perf_counter() - began)
    rate = setting.predicted("steps", "Qwen3-30B-A3B today", version, "tokens/s", "eager")
    took = statistics.median(times[WARM:])
    return Measured(took * 1e3, "ms", 1e3 / rate if rate else None, more={"tokens/s": 1 / took})


def by_graph(setting: Setting, version: str) -> Measured:
    """Milliseconds of a replay of one token's pass, without a cache of keys and values."""
    model = _model(setting, version)
    ids = torch.ones(1, 1, dtype=torch.long, device=setting.torch)
    with torch.inference_mode():
        for _ in range(WARM):
            model(ids, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        times = list[float]()
        with torch.cuda.graph(graph):
            model(ids, use_cache=False)
        for _ in range(40):
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    rate = setting.predicted("steps", "Qwen3-30B-A3B today", version, "tokens/s", "graph")
    took = statistics.median(times)
    return Measured(took * 1e3, "ms", 1e3 / rate if rate else None, more={"tokens/s": 1 / took})


def launches(setting: Setting, kind: str) -> Measured:
    """How often a token's pass calls the runtime's functions of a kind, by torch.profiler."""
    from transformers import DynamicCache

    model = _model(setting, "w4")
    cache = DynamicCache(config=model.config)
    ids = torch.ones(1, 1, dtype=torch.long, device=setting.torch)
    with torch.inference_mode():
        seen, more = calls_of(lambda: model(ids, past_key_values=cache, use_cache=True), kind, setting)
    counted = predictions.kept()["inputs"]["steps"]["Qwen3-30B-A3B"]
    if kind == "Synchronize":
        return Measured(seen, "calls", limit=counted["synchronisations"], more=more)
    return Measured(seen, "calls", counted["operations"], more=more)


def calls_of(work: Callable[[], object], kind: str, setting: Setting) -> tuple[int, dict[str, Any]]:
    """How often work calls the runtime's functions of a kind once it is warm, and which, by torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(WARM):
        work()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * setting.on_gpu]) as seen:
        work()
    averages = seen.key_averages()
    calls = {e.key: e.count for e in averages if e.key.startswith("cu") and kind in e.key}
    calls = {k: n - (k == "cudaDeviceSynchronize") for k, n in calls.items()}  # one is the profiler's own, at its end
    operations = sum(e.count for e in averages if e.key.startswith("aten::"))
    return sum(calls.values()), {"calls": calls, "aten operations": operations}
