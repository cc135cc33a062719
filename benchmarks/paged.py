"""Paged experts beside experts that are all resident, and beside the least that decoding and running them takes.

    python -m benchmarks.paged [--layers N] [--threads N]

One token at a time goes through the experts of some layers of Qwen3-30B-A3B's shape, by the path that a served model
takes: `experts_forward`, the window, its blocks, the kernels. Weights are normally distributed, as trained ones nearly
are, so that the codec finds exponents as it does there. Routing is drawn anew for every token: nothing is used twice
but by chance, which is the worst case. "recycled" gives a page's block back when its layer has run, as the paper does;
"kept" keeps pages until their blocks are needed, which few layers profit from and a deep model does not.

The floor of a layer is the larger of decoding the active experts' bytes, which both threads do and nothing else, and of
running them where all are resident. Times are lower quartiles; all ways take turns. The second part is the paper's
Figure 6 in shape: what loading takes by the model (equations 6, 9, 10; measured bandwidths), what computing takes, and
what a step really takes, by the share alpha of experts that are in device memory, compressed; the rest is read from a
file in the system's cache.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common import Target, arguments, finish
from benchmarks.kernels.layers import SHAPES, Module
from moepack.pack.codec.exponent_fast import decode_into
from moepack.pack.codec.lossless import LosslessMatrix, directory
from moepack.pack.spec import PAGE, ExpertLayer, Matrix, Version, align
from moepack.runtime.devices.cpu import CpuDevice, CpuMemory
from moepack.runtime.experts.forward import experts_forward
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.paging.address_space import CpuAddressSpace
from moepack.runtime.paging.cpu_filler import CpuFiller
from moepack.runtime.paging.paging import Paging
from moepack.runtime.paging.window import Window
from moepack.runtime.planning.paging import window_size
from moepack.runtime.policies.paged import pass_seconds
from moepack.runtime.policies.placements import Where
from moepack.runtime.step import Step, opened
from moepack.runtime.store.files import Stored

BF16 = Version.of("bf16")
KINDS = 4  # experts that are drawn; the others are copies in memory of their own
BOUND, FLOOR = 0.72, 1.25  # of BF16's bytes beside the window; of the floor's time


class Layers:
    """Layers of generated experts, served in one way."""

    def __init__(self, described: Sequence[ExpertLayer], keeps: bool, file: Path | None, digests: list[str]) -> None:
        self.device = CpuDevice(PAGE)
        self.layers = [LayerExperts(x, (BF16,), torch.device("cpu")) for x in described]
        self.size = window_size(described, BF16)
        self.space = CpuAddressSpace([(x.matrices, x.experts) for x in described], BF16)
        self.window = Window([self.size.blocks] * 2, len(described), keeps)
        self.file = os.open(file, os.O_RDONLY) if file is not None else -1
        self.digests, self.extent = digests, 0
        forms = [(x.of.layer, x.of.forms["bf16"]) for x in self.layers]
        self.paging = Paging(
            CpuFiller(self.space, forms, BF16, self.stored, 64 << 20), self.window, len(described), self.device.mark
        )
        self.modules = [Module() for _ in described]
        self.packed_bytes = self.resident_bytes = 0
        self.step = Step()
        for position, (layer, module) in enumerate(zip(self.layers, self.modules, strict=True)):
            layer.position = position
            module._moepack = layer  # type: ignore[attr-defined]

    def stored(self, position: int, expert: int) -> Stored:
        """Where an expert's extent stands."""
        kind = expert % KINDS
        return Stored(self.file, kind * self.extent, self.extent, self.digests[kind], f"expert {expert}")

    def fill(self, extents: Sequence[np.ndarray[Any, Any]], alpha: float) -> None:
        """Let a share of every layer's experts be packed, the others stored."""
        self.extent = len(extents[0])
        block = align(max(map(len, extents)), PAGE)
        for position, layer in enumerate(self.layers):
            count = layer.of.layer.experts
            here = round(alpha * count)
            memory = CpuMemory(block * here).tensor if here else torch.empty(0, dtype=torch.uint8)
            self.packed_bytes += block * here
            for e in range(count):
                if e >= here:
                    layer.publish(e, layer.of.over(BF16, self.space.extent(position, e), Where.STORED))
                    continue
                extent = memory[e * block :][: len(extents[e % KINDS])]
                extent.numpy()[:] = extents[e % KINDS]
                packed = self.paging.filler.over(position, e, extent, f"expert {e}")
                layer.publish(e, layer.of.over(BF16, self.space.extent(position, e), Where.PACKED, packed))

    def fill_resident(self, extents: Sequence[np.ndarray[Any, Any]]) -> None:
        """Let all experts be uncompressed."""
        for layer in self.layers:
            described = layer.of.layer
            size = align(BF16.resident_size(described.matrices), PAGE)
            memory = CpuMemory(size * described.experts).tensor
            self.resident_bytes += size * described.experts
            for e in range(described.experts):
                room = memory[e * size :][:size]
                if e < KINDS:
                    for form, (coded, _), m in zip(
                        layer.of.forms["bf16"], directory(described.matrices, extents[e]), described.matrices,
                        strict=True,
                    ):  # fmt: skip
                        decode_into(coded, room.numpy()[form.low : form.low + 2 * m.weights].view(np.uint16))
                else:
                    room.copy_(memory[e % KINDS * size :][:size])
                layer.publish(e, layer.of.over(BF16, room[: BF16.resident_size(described.matrices)]))

    def token(self, x: torch.Tensor, routing: torch.Tensor, gates: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        """One token through all layers: seconds a layer, and what they gave."""
        self.step = Step(snapshots=tuple(layer.current for layer in self.layers), paging=self.paging)
        outs = []
        began = time.perf_counter()
        with opened(self.step):
            for module, index in zip(self.modules, routing, strict=True):
                outs.append(experts_forward(module, x, index, gates))
        return (time.perf_counter() - began) / len(self.layers), outs

    def close(self) -> None:
        """End its threads."""
        self.paging.close()
        if self.file >= 0:
            os.close(self.file)


def draw(matrices: tuple[Matrix, ...]) -> list[np.ndarray[Any, Any]]:
    """Extents of experts with normally distributed weights."""
    rng, out = np.random.default_rng(0), []
    for _ in range(KINDS):
        values = []
        for m in matrices:
            weights = torch.from_numpy(rng.standard_normal((m.rows, m.cols), np.float32) * np.float32(0.02))
            values.append(LosslessMatrix(weights.bfloat16().view(torch.uint16).numpy()))
        out.append(Version.of("bf16").encode(matrices, values)[0])
    whole = max(map(len, out))
    return [np.concatenate([extent, np.zeros(whole - len(extent), np.uint8)]) for extent in out]


def decoding(layers: Layers, top_k: int, threads: int, pool: ThreadPoolExecutor) -> Callable[[], float]:
    """Seconds that threads take to decode a layer's active experts into blocks that are used again and again."""
    from moepack.pack.codec import exponent_native

    layer = layers.layers[0]
    described = layer.of.layer
    size = align(BF16.resident_size(described.matrices), PAGE)
    room = CpuMemory(size * top_k).tensor
    keep, state = [], SimpleNamespace(at=0, room=room)  # whose memory they are decoded to
    for e in range(described.experts):
        packed = layer.current.handles[e].packed
        assert packed is not None
        parts = directory(described.matrices, packed.extent.numpy())
        for (coded, _), m, form in zip(parts, described.matrices, layer.of.forms["bf16"], strict=True):
            opened = exponent_native.open_coded(coded, m.weights, room[e % top_k * size :].data_ptr() + form.low)
            assert opened is not None
            keep.append(opened)

    def some(todo: list[Any]) -> None:
        for opened in todo:
            opened.decode()

    def run() -> float:
        state.at = (state.at + top_k) % described.experts
        todo = [keep[2 * ((state.at + i) % described.experts) + d] for i in range(top_k) for d in (0, 1)]
        shares = [[o for i, o in enumerate(todo) if i // 2 % threads == t] for t in range(threads)]
        began = time.perf_counter()
        list(pool.map(some, shares))
        return time.perf_counter() - began

    return run


def typically(seconds: Sequence[float]) -> float:
    """The lower quartile: other programs on a shared machine only ever add to a time."""
    return sorted(seconds)[len(seconds) // 4]


def judged(layers: int, experts: int, tokens: int, threads: int) -> tuple[list[dict[str, Any]], list[Target]]:
    """Both tables, and what they are held to."""
    hidden, inner, _, top_k = SHAPES["Qwen3-30B-A3B"]
    matrices = (Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner))
    described = [ExpertLayer(i, "experts", experts, matrices) for i in range(layers)]
    extents = draw(matrices)
    digests = [hashlib.sha256(extent.data).hexdigest() for extent in extents]
    generator = torch.Generator().manual_seed(0)
    x, gates = torch.randn(1, hidden, generator=generator).bfloat16(), torch.full((1, top_k), 1 / top_k)
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(threads) as pool, torch.inference_mode():
        file = Path(work) / "experts"
        file.write_bytes(b"".join(extent.tobytes() for extent in extents))

        def routing() -> torch.Tensor:
            picks = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(layers)]
            return torch.stack(picks).view(layers, 1, top_k)

        resident = Layers(described, True, None, digests)
        resident.fill_resident(extents)
        recycled, kept = (Layers(described, keeps, None, digests) for keeps in (False, True))
        recycled.fill(extents, 1.0)
        kept.fill(extents, 1.0)
        decode = decoding(recycled, top_k, threads, pool)
        ways = {"all resident": resident, "paged, recycled": recycled, "paged, kept": kept}
        times: dict[str, list[float]] = {name: [] for name in (*ways, "decoding alone")}
        for i in range(tokens + 4):
            chosen, outs = routing(), {}
            for name, way in ways.items():
                seconds, outs[name] = way.token(x, chosen, gates)
                times[name] += [seconds] * (i >= 4)
            time.sleep(0.02)  # the products' threads stop spinning: these ones are others
            times["decoding alone"] += [decode()] * (i >= 4)
            for name, out in outs.items():
                assert all(map(torch.equal, out, outs["all resident"])), f"{name}: other bits than all resident"
        typical = {name: typically(of) for name, of in times.items()}
        floor = max(typical["decoding alone"], typical["all resident"])
        whole = recycled.size.bytes
        for name, seconds in typical.items():
            rows.append({"way": name, "ms a layer": 1e3 * seconds, "over floor": seconds / floor})
            if name in ways:
                one = ways[name]
                rows[-1]["GB of experts"] = (one.packed_bytes + one.resident_bytes) / 1e9
                rows[-1]["GB of window"] = one.space.fresh / (2 * one.size.blocks) * one.size.bytes / 1e9
                rows[-1]["found there"] = one.window.hits / max(1, one.window.hits + one.window.misses)
        targets.append(Target("recycled: TPOT over its floor", typical["paged, recycled"] / floor, FLOOR, "lower"))
        share = recycled.packed_bytes / resident.resident_bytes
        targets.append(Target("peak bytes of experts beside the window, over BF16's", share, BOUND, "lower"))
        used = kept.space.fresh / (2 * recycled.size.blocks)
        targets.append(Target("blocks of the window that were ever taken", used, 1.0, "lower"))
        alone = typical["all resident"]
        kept.close()
        del kept, ways
        resident.close()
        del resident
        size = float(sum(recycled.size.sizes))
        recycled.close()
        packed_rate = top_k * size / typical["decoding alone"]
        del recycled, decode
        stored_rate = 0.0
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
            way = Layers(described, False, file, digests)
            way.fill(extents, alpha)
            spent: list[float] = []
            demanded = [0, 0]
            for i in range(max(4, tokens // 4) + 2):
                each, _ = way.token(x, routing(), gates)
                if i >= 2:
                    spent.append(each)
                    demanded = [n + sum(row[1 + k] for row in way.step.demanded) for k, n in enumerate(demanded)]
            each = typically(spent)
            if not alpha:
                stored_rate = top_k * size / max(1e-9, each - alone)
            brought = [n / len(spent) / layers for n in demanded]
            loading = pass_seconds([brought], [packed_rate, stored_rate], together=False)
            rows.append({"way": f"alpha {alpha}", "ms a layer": 1e3 * each, "loading ms": 1e3 * loading,
                         "computing ms": 1e3 * alone, "GB of experts": way.packed_bytes / 1e9,
                         "GB of window": whole / 1e9})  # fmt: skip
            way.close()
    return rows, targets


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hidden, inner, experts, top_k = SHAPES["Qwen3-30B-A3B"]
    layers, experts, tokens = (3, 32, 12) if args.quick else (args.layers, experts, 60)
    rows, targets = judged(layers, experts, tokens, args.threads)
    columns = ["way", "ms a layer", "over floor", "loading ms", "computing ms", "GB of experts", "GB of window",
               "found there"]  # fmt: skip
    title = f"{layers} layers of {experts} experts, {hidden} x {inner}, top {top_k}, {args.threads} threads, one token"
    finish(title, columns, rows, targets, args.json)


if __name__ == "__main__":
    main()
