"""Experts from their packed bytes on a GPU, beside torch's BF16 grouped product: the layers of `benchmarks.gpu_day`.

Each pass is captured in a CUDA graph and replayed, so that launches cost what they cost a server. The floor is the
bytes of the experts that have tokens over the rate of a copy inside the device, its reads and its writes both counted.
Without a GPU it runs in Triton's interpreter, on a layer that is small enough.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from benchmarks.common import Row
from moepack.pack.spec import ExpertLayer, Matrix, Version, align
from moepack.runtime.experts.gpu import forward
from moepack.runtime.experts.handles import LayerCall, LayerExperts, Snapshot
from moepack.runtime.kernels.affine_triton import DECODE
from moepack.runtime.kernels.forms import Routing
from moepack.runtime.kernels.routing_triton import fits, route

from .layers import extent_like, module_like

T = TypeVar("T")


def layer_like(matrices: tuple[Matrix, ...], version: Version, experts: int, device: torch.device) -> Snapshot:
    """A layer of experts that are all alike, in memory of their own."""
    layer = LayerExperts(ExpertLayer(0, "experts", experts, matrices), [version], device)
    room = torch.empty(experts, align(version.resident_size(matrices), 64) + 64, dtype=torch.uint8, device=device)
    extent = extent_like(matrices, version, np.random.default_rng(0))
    for e, place in enumerate(room):
        there = place[-place.data_ptr() % 64 :][: len(extent)].copy_(extent)
        layer.publish(e, layer.of.over(version, there))
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
    sizes: tuple[int, int, int, int], version: Version, tokens: int, runs: int, device: torch.device, cache: int
) -> Row:
    """One layer's forward, all its experts in one version, ours and torch's.

    One run goes through so many layers that their experts take over four times `cache` bytes, those of the device's L2.
    On a CPU, with Triton's interpreter, it shows that everything runs.
    """
    hidden, inner, experts, top_k = sizes
    matrices = (Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner))
    room = torch.empty(1 << (30 if device.type == "cuda" else 20), dtype=torch.uint8, device=device)
    half = len(room) // 2
    rate = len(room) / seconds(lambda: room[:half].copy_(room[half:]), runs)
    weights = [torch.randn(experts, m.rows, m.cols, device=device).mul_(0.02).bfloat16() for m in matrices]
    module = module_like()
    size = version.resident_size(matrices)
    with torch.inference_mode():
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        gates = torch.full((tokens, top_k), 1 / top_k, device=device)
        chosen = routings(tokens, experts, top_k, device)
        work = replayed(partial(_all, partial(grouped, weights[0], weights[1], x), chosen))
        theirs = seconds(work, runs) / len(chosen)
        count = 4 * cache // (size * experts) + 1
        layers = [layer_like(matrices, version, experts, device) for _ in range(count)]
        calls = [LayerCall(module, k, x, i, gates) for k in layers for i in chosen]
        ours = seconds(replayed(partial(_all, served, calls)), runs) / len(calls)
    used = sum(len(i.unique()) for i in chosen) / len(chosen)
    floor = used * size / rate
    times = {"ours us": ours * 1e6, "torch BF16 us": theirs * 1e6, "bytes floor us": floor * 1e6}
    return {**times, "over floor": ours / floor, "MB": count * size * experts / 1e6}
