"""transformers' own model of Qwen3-30B-A3B's shape on generated weights: a token by launches and by graph.

All layers share one set of experts in BF16, larger than four times an H100's L2; each has matrices of its own outside
them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.limited.shapes import SHAPES

from .bundles import FEW
from .rows import Entry, Measured, Rows, Setting

THEIRS = "token, transformers' own BF16"
WARM = 3


def rows(setting: Setting) -> Rows:
    """The stage's rows."""
    return {
        f"{THEIRS}, launched one by one": Entry(lambda: eager(setting), on_cpu=True),
        f"{THEIRS}, by graph": Entry(lambda: by_graph(setting)),
    }


@lru_cache(1)
def _model(setting: Setting) -> Any:
    """The model, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = FEW if setting.small else SHAPES["qwen3-moe"]
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(shape.config()))
        config = AutoConfig.from_pretrained(work)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("grouped_mm")
    torch.manual_seed(0)
    shared: dict[str, Any] = {}
    for module in model.modules():
        of_experts = type(module).__name__.endswith("Experts")
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if of_experts and name in shared:
                module._parameters[name] = shared[name]
                continue
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=setting.torch)
            made = made.fill_(1.0) if parameter.dim() == 1 else made.normal_(0, 0.02)
            module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
            if of_experts:
                shared[name] = module._parameters[name]
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(setting.torch)
    return model


def _timed(work: Callable[[], object], count: int) -> Measured:
    """Milliseconds of a run, in the median."""
    times = list[float]()
    for _ in range(count):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    took = statistics.median(times)
    return Measured(took * 1e3, "ms", more={"tokens/s": 1 / took})


def eager(setting: Setting) -> Measured:
    """Milliseconds of a token, in the median."""
    from transformers import DynamicCache

    model = _model(setting)
    cache, ids = DynamicCache(config=model.config), torch.ones(1, 1, dtype=torch.long, device=setting.torch)

    def step() -> None:
        model(ids, past_key_values=cache, use_cache=True).logits[0, -1, 0].item()

    with torch.inference_mode():
        for _ in range(WARM):
            step()
        return _timed(step, 3 if setting.small else 40)


def by_graph(setting: Setting) -> Measured:
    """Milliseconds of a replay of one token's pass, without a cache of keys and values."""
    model, ids = _model(setting), torch.ones(1, 1, dtype=torch.long, device=setting.torch)
    with torch.inference_mode():
        for _ in range(WARM):
            model(ids, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(ids, use_cache=False)

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return _timed(replay, 40)
