"""Experts from their packed bytes on a GPU, beside torch's BF16 grouped product: the layers of `benchmarks.gpu_day`.

Each pass is captured in a CUDA graph and replayed, so that launches cost what they cost a server. The floor is the
bytes of the experts that have tokens over the rate of a copy inside the device, its reads and its writes both counted.
Without a GPU it runs in Triton's interpreter, on a layer that is small enough.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.common import Row, Target
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.experts.gpu import forward
from moepack.runtime.experts.handles import LayerCall, LayerExperts, Snapshot
from moepack.runtime.kernels.affine_triton import DECODE
from moepack.runtime.kernels.routing_triton import Routing, fits, route

T = TypeVar("T")


def module_like() -> Any:
    """An experts module whose gate is silu(gate) * up, which the kernel fuses."""
    from transformers.integrations.moe import _default_apply_gate

    members = {"has_gate": True, "act_fn": torch.nn.SiLU(), "_apply_gate": _default_apply_gate}
    return type("Experts", (), members)()


def layer_like(
    matrices: tuple[Matrix, ...], versions: Sequence[Version], of_expert: Sequence[str], device: torch.device, seed: int
) -> Snapshot:
    """A layer whose experts are in the versions named, their extents random."""
    layer = LayerExperts(ExpertLayer(0, "experts", len(of_expert), matrices), versions, device)
    by_name = {v.name: v for v in versions}
    generator = torch.Generator(device).manual_seed(seed)
    for e, name in enumerate(of_expert):
        size = by_name[name].resident_size(matrices)
        extent = torch.randint(0, 1 << 15, (size // 2,), dtype=torch.int16, generator=generator, device=device)
        extent.bitwise_and_(0x03FF).bitwise_or_(0x3C00)  # as BF16: near 0.01; as codes: whatever
        layer.publish(e, layer.of.over(by_name[name], extent.view(torch.uint8)))
    return layer.current


def served(call: LayerCall) -> torch.Tensor:
    """Run a layer's experts as a step does: few tokens are routed by one launch."""
    tokens, top_k = call.index.shape
    if fits(tokens, top_k, len(call.experts.handles)):
        given = (call.index.long(), call.weights)
        call = replace(call, routed=route(Routing(top_k), call.experts.device_table(), DECODE.tokens, given=given))
    return forward(call)


def routings(tokens: int, experts: int, top_k: int, device: torch.device) -> list[torch.Tensor]:
    """Choices [tokens, top_k] that together reach all experts once, or often."""
    generator = torch.Generator().manual_seed(tokens)
    if tokens == 1:
        chosen = torch.randperm(experts, generator=generator)
        return [c[None].to(device) for c in chosen.split(top_k) if len(c) == top_k]
    one = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    return [torch.stack(one).to(device)]


def grouped(gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """torch's BF16 grouped product over weights [experts, rows, cols], without the gates."""
    tokens, top_k = index.shape
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(len(gate_up), dtype=torch.int64, device=x.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).to(torch.int32)
    h = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
    gate, up = h.chunk(2, dim=-1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = torch.empty_like(y)
    out[order] = y
    return out.view(tokens, top_k, -1).sum(1)


def replayed(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a CUDA graph; as it is without a GPU."""
    if not torch.cuda.is_available():
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds(work: Callable[[], object], runs: int) -> float:
    """The median of several runs on the device's clock; one run's time without a GPU."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    times: list[float] = []
    for _ in range(runs + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def _all(work: Callable[[T], object], items: Sequence[T]) -> None:
    for item in items:
        work(item)


def measure(
    shape: str,
    sizes: tuple[int, int, int, int],
    versions: Sequence[Version],
    runs: int,
    device: torch.device,
    all_tokens: Sequence[int] = (1, 16, 2048),
    cache: int | None = None,
    mixed: bool = True,
) -> tuple[list[Row], list[Target]]:
    """Rows and targets of one layer: decode with 1 and 16 tokens, prefill with 2,048; and of all versions `mixed`.

    One run goes through so many layers that their experts take over four times `cache` (default: the device's L2). On a
    CPU, with Triton's interpreter, it shows that everything runs.
    """
    hidden, inner, experts, top_k = sizes
    matrices = (Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner))
    on_gpu = device.type == "cuda"
    if cache is None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    room = torch.empty(1 << (30 if on_gpu else 20), dtype=torch.uint8, device=device)
    half = len(room) // 2
    rate = len(room) / seconds(lambda: room[:half].copy_(room[half:]), runs)
    weights = [torch.randn(experts, m.rows, m.cols, device=device).mul_(0.02).bfloat16() for m in matrices]
    module = module_like()
    size = {v.name: v.resident_size(matrices) for v in versions}
    mixes = {v.name: [v.name] * experts for v in versions}
    if mixed:
        mixes["mixed"] = [versions[e % len(versions)].name for e in range(experts)]
    theirs = {}
    rows = []
    targets = []
    inputs = {}
    with torch.inference_mode():
        for n in all_tokens:
            x = torch.randn(n, hidden, device=device).bfloat16()
            gates = torch.full((n, top_k), 1 / top_k, device=device)
            chosen = routings(n, experts, top_k, device)
            inputs[n] = x, gates, chosen
            work = replayed(partial(_all, partial(grouped, weights[0], weights[1], x), chosen))
            theirs[n] = seconds(work, runs) / len(chosen)
        for name, of_expert in mixes.items():
            count = 4 * cache // sum(size[n] for n in of_expert) + 1
            layers = [layer_like(matrices, versions, of_expert, device, i) for i in range(count)]
            for tokens, (x, gates, chosen) in inputs.items():
                calls = [LayerCall(module, k, x, i, gates) for k in layers for i in chosen]
                ours = seconds(replayed(partial(_all, served, calls)), runs) / len(calls)
                used = [{int(e) for e in i.reshape(-1)} for i in chosen]
                floor = sum(size[of_expert[e]] for some in used for e in some) / len(used) / rate
                rows.append(
                    {
                        "shape": f"{shape}, {device.type}",
                        "version": name,
                        "tokens": tokens,
                        "ours us": ours * 1e6,
                        "torch BF16 us": theirs[tokens] * 1e6,
                        "bytes floor us": floor * 1e6,
                        "speed-up": theirs[tokens] / ours,
                        "over floor": ours / floor,
                        "MB": count * sum(size[n] for n in of_expert) / 1e6,
                    }
                )
                if on_gpu and tokens == 1 and name in ("w4", "w3", "w2", "w1"):
                    label = f"{shape}, GPU, {name}, 1 token: bytes over time, of the copy rate"
                    targets.append(Target(label, floor / ours, 0.6, "higher"))
            del layers, calls
    return rows, targets
