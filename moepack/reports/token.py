"""Where a token's time goes: one decoding step by module, beside the time to read the modules' bytes.

The model's own forward runs, with a clock around each module; the time of inner modules does not count for the outer
one. A part is a kind of module (PARTS). Its floor is the bytes of the weights that it reads, divided by the rate at
which the same threads read memory and do nothing else. A clock costs about a microsecond, which counts as "other".
With clocks, queries, keys and values come from the modules' own code: the one call that serves them has no module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.families.arguments import with_cache
from moepack.pack.errors import InputError
from moepack.runtime.planning.options import DEFAULTS, LoadOptions
from moepack.shared.opening import check, load_model, locate

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from moepack.runtime.serving import Serving

PARTS = ("experts", "lm_head", "linears", "attention", "router", "norms", "embedding", "other")


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a step that modules of one kind take."""

    name: str  # one of PARTS
    calls: int  # calls of such modules in a step
    seconds: float  # their time in a step: the median of the measured steps
    bytes: int  # bytes of their weights that a step reads
    floor: float  # seconds to read these bytes


@dataclass(frozen=True, slots=True)
class TokenTime:
    """How long one decoding step of one sequence takes."""

    policy: str
    dense: str | None  # the version of the dense matrices
    threads: int
    context: int  # tokens in the cache
    seconds: float  # median seconds of a step without clocks
    clocked: float  # median seconds of a step with clocks, of about a microsecond each
    rate: float  # bytes a second that the threads read
    parts: tuple[Part, ...]  # largest first
    replaced: dict[str, int]  # class -> how many of its modules kernels replace


class _Clock:
    """Seconds and calls by part. An inner module's time does not count for the module around it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.calls = dict.fromkeys(PARTS, 0)
        self._inner: list[float] = [0.0]

    def around(self, part: str, forward: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                inner = self._inner.pop()
                self._inner[-1] += took
                self.seconds[part] += took - inner
                self.calls[part] += 1

        return timed


def token_time(path: str | Path, options: LoadOptions = DEFAULTS, context: int = 128, steps: int = 32) -> TokenTime:
    """Serve a bundle on this machine's CPU and measure decoding steps by module.

    Args:
        path: a bundle's directory or Hub id.
        options: how the bundle is served.
        context: tokens in the cache before the first step.
        steps: how many steps are measured with clocks, and again without.

    Raises:
        InputError: if `path` is not a bundle.
    """
    source = locate(path)
    if not source.is_bundle:
        raise InputError(f"{path}: not a bundle: it has no manifest.json")
    options = options.filled(kv_tokens=context + 2 * steps + 8, prefill_tokens=context, all_logits=False)
    check(source, options)

    import torch

    from moepack.runtime.devices.reading import read_rate

    model = load_model(source, options)
    with model.moepack as serving, torch.inference_mode():
        for _ in _steps(model, context, 4):  # compile kernels and fill caches
            pass
        plain = statistics.median(_steps(model, context, steps))
        clock = _Clock()
        parts = _parts(model, serving)
        for name, part in parts.items():
            module = model.get_submodule(name)
            module.forward = clock.around(part, module.forward)
        rounds: list[dict[str, float]] = []
        clocked = []
        for took in _steps(model, context, steps, clock):
            rounds.append({p: s for p, s in clock.seconds.items() if p != "other"})
            rounds[-1]["other"] = max(0.0, took - sum(rounds[-1].values()))
            clocked.append(took)
        sizes = _bytes(model, serving, parts)
        rate = read_rate(torch.device("cpu"))
        assert rate is not None
        found = [
            Part(p, clock.calls[p], statistics.median(r[p] for r in rounds), sizes.get(p, 0), sizes.get(p, 0) / rate)
            for p in PARTS
        ]
        found.sort(key=lambda part: -part.seconds)
        return TokenTime(
            serving.policy,
            options.dense,
            torch.get_num_threads(),
            context,
            plain,
            statistics.median(clocked),
            rate,
            tuple(found),
            dict(serving.replaced),
        )


def _steps(model: Any, context: int, steps: int, clock: _Clock | None = None) -> Iterator[float]:
    """Yield the seconds of each step after a prompt of `context` tokens."""
    import torch
    from transformers import DynamicCache

    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (1, context), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    kept = with_cache(model, cache)
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **kept)
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        if clock is not None:
            clock.seconds = dict.fromkeys(PARTS, 0.0)
            clock.calls = dict.fromkeys(PARTS, 0)
        began = time.perf_counter()
        out = model(input_ids=token, use_cache=True, **kept)
        yield time.perf_counter() - began


def _parts(model: PreTrainedModel, serving: Serving) -> dict[str, str]:
    """Map the names of modules to their parts. Modules inside experts have none."""
    from torch import nn

    from moepack.runtime.dense.packed import PackedLinear

    experts = {layer.module for layer in serving.bundle.layers}
    blocks = {name.rpartition(".")[0] for name in experts}
    out = dict[str, str]()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if any(name.startswith(f"{e}.") for e in experts):
            continue
        if name in experts:
            out[name] = "experts"
        elif module is head:
            out[name] = "lm_head"
        elif parent in blocks and last in ("gate", "router"):
            out[name] = "router"
        elif isinstance(module, nn.Linear | PackedLinear):
            out[name] = "linears"
        elif isinstance(module, nn.Embedding):
            out[name] = "embedding"
        elif "Norm" in type(module).__name__:
            out[name] = "norms"
        elif last in ("self_attn", "attention", "linear_attn") or type(module).__name__.endswith("RotaryEmbedding"):
            out[name] = "attention"
    return out


def _bytes(model: PreTrainedModel, serving: Serving, parts: dict[str, str]) -> dict[str, int]:
    """Bytes of weights that one step reads, by part: a token's `top_k` experts count at their layer's mean size."""
    from moepack.runtime.planning.fixed import top_k

    out = dict[str, int]()
    chosen = top_k(model.config)
    for name, part in parts.items():
        if part in ("linears", "lm_head", "router", "norms"):
            module = model.get_submodule(name)
            held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            out[part] = out.get(part, 0) + sum(t.numel() * t.element_size() for t in held)
    for layer in serving.layers:
        sizes = [handle.extent.numel() for handle in layer.current.handles]
        out["experts"] = out.get("experts", 0) + chosen * sum(sizes) // max(1, len(sizes))
    return out


def render(found: TokenTime) -> Table:
    """Make a table with a row for each part, in microseconds."""
    from rich.table import Table

    title = (
        f"one token: {found.seconds * 1e3:.2f} ms ({found.clocked * 1e3:.2f} with clocks), {found.threads} "
        f"threads, {found.context} tokens of cache, memory read at {found.rate / 1e9:.1f} GB/s"
    )
    named = ", ".join(f"{count} {name}" for name, count in found.replaced.items())
    table = Table("part", title=title, caption=f"kernels replace, beside linear maps and experts: {named or 'nothing'}")
    for column in ("calls", "us", "share", "MB read", "floor, us", "over floor"):
        table.add_column(column, justify="right")
    for part in found.parts:
        over = f"{part.seconds / part.floor:.2f}" if part.floor > 1e-6 else "-"
        share = f"{part.seconds / found.clocked:.0%}"
        floor = f"{part.floor * 1e6:.0f}" if part.bytes else "-"
        size = f"{part.bytes / 1e6:.1f}" if part.bytes else "-"
        table.add_row(part.name, str(part.calls), f"{part.seconds * 1e6:.0f}", share, size, floor, over)
    return table
