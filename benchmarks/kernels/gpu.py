"""The GPU half of `benchmarks.kernels`: experts from their packed bytes beside torch's BF16 grouped product.

Each pass is captured in a CUDA graph and replayed, so that launches cost what they cost a server. The floor is the
bytes of the experts that have tokens over the rate of a copy inside the device, its reads and its writes both counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common import Target
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.kernels.forms import handle, make_forms


def module_like() -> Any:
    """An experts module whose gate is silu(gate) * up, which the kernel fuses."""
    from transformers.integrations.moe import _default_apply_gate

    members = {"has_gate": True, "act_fn": torch.nn.SiLU(), "_apply_gate": _default_apply_gate}
    return type("Experts", (), members)()


def layer_like(
    matrices: tuple[Matrix, ...], versions: Sequence[Version], of_expert: Sequence[str], device: torch.device
) -> tuple[Any, dict[str, int]]:
    """What gpu.forward reads of a layer and its snapshot, extents random, in the versions named; and their bytes."""
    numbers = {v.name: i for i, v in enumerate(versions)}
    sizes = {v.name: v.resident_size(matrices) for v in versions}
    generator = torch.Generator().manual_seed(0)
    words, keep = [], []
    for name in of_expert:
        extent = torch.randint(0, 1 << 15, (sizes[name] // 2,), dtype=torch.int16, generator=generator)
        extent.bitwise_and_(0x03FF).bitwise_or_(0x3C00)  # as BF16: near 0.01; as codes: whatever
        keep.append(extent.to(device))
        words.append(handle(keep[-1].data_ptr(), numbers[name]))
    table = torch.from_numpy(np.array(words, np.uint64).view(np.int64)).to(device)
    used = [v for v in versions if v.name in set(of_expert)]
    forms = [[make_forms(matrices, v)[i] for v in versions[: numbers[used[-1].name] + 1]] for i in range(2)]
    layer = SimpleNamespace(
        layer=ExpertLayer(0, "experts", len(of_expert), matrices),
        device_table=lambda: table,
        served=sorted(numbers[v.name] for v in used),
        forms=lambda i: forms[i],
        keep=keep,
    )
    layer.of = layer
    return layer, sizes


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
    work()
    if not torch.cuda.is_available():
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds(work: Callable[[], object], runs: int) -> float:
    """The median of several runs on the device's clock."""
    times: list[float] = []
    for _ in range(runs + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def measure(
    shape: str, sizes: tuple[int, int, int, int], versions: Sequence[Version], runs: int
) -> tuple[list[dict[str, Any]], list[Target]]:
    """Rows and targets of one layer: decode with 1 and 16 tokens, prefill with 2,048."""
    from moepack.runtime.experts.gpu import forward
    from moepack.runtime.experts.handles import LayerCall

    device = torch.device("cuda")
    hidden, inner, experts, top_k = sizes
    matrices = (Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner))
    room = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    rate = room.numel() / seconds(lambda: room[: 1 << 29].copy_(room[1 << 29 :]), runs)
    weights = [torch.randn(experts, m.rows, m.cols, device=device).mul_(0.02).bfloat16() for m in matrices]
    module, rows, targets = module_like(), [], []
    mixes = {v.name: [v.name] * experts for v in versions}
    mixes["mixed"] = [versions[e % len(versions)].name for e in range(experts)]
    with torch.inference_mode():
        for tokens in (1, 16, 2048):
            x = torch.randn(tokens, hidden, device=device).bfloat16()
            picks = [torch.randperm(experts)[:top_k] for _ in range(tokens)]
            index, gates = torch.stack(picks).to(device), torch.full((tokens, top_k), 1 / top_k, device=device)
            theirs = seconds(replayed(lambda x=x, i=index: grouped(weights[0], weights[1], x, i)), runs)  # type: ignore[misc]
            for name, of_expert in mixes.items():
                layer, size = layer_like(matrices, versions, of_expert, device)
                work = replayed(lambda x=x, i=index, g=gates, k=layer: forward(LayerCall(module, k, x, i, g)))  # type: ignore[misc]
                ours = seconds(work, runs)
                used = {int(e) for e in torch.stack(picks).reshape(-1)}
                floor = sum(size[of_expert[e]] for e in used) / rate
                rows.append({"shape": f"{shape}, GPU", "version": name, "tokens": tokens, "ours us": ours * 1e6,
                             "torch BF16 us": theirs * 1e6, "bytes floor us": floor * 1e6, "speed-up": theirs / ours,
                             "over floor": ours / floor})  # fmt: skip
                if tokens == 1 and name in ("w4", "w3", "w2", "w1"):
                    label = f"{shape}, GPU, {name}, 1 token: bytes over time, of the copy rate"
                    targets.append(Target(label, floor / ours, 0.6, "higher"))
    return rows, targets
