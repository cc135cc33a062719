"""Host time of moepack's own code in a decode step on a GPU, with Qwen3-30B-A3B's 48 layers of 128 experts.

    python -m benchmarks.kernels.decode_host [--steps 200]

Needs no GPU: tensors lie in the host's memory and launches do nothing, so rows count Python alone, without torch's and
Triton's launchers. `graph` replays a captured step (decode_graph.py): what remains is to open and close the step,
to compare addresses, and to copy tensors. In `server` rows the step is one token of each of the server's sequences, and
a table of where they lie is written, too. `eager` runs routers' and experts' code of every layer. In `moving` rows a
version changes before every step. The middle of the steps; the target is the graph's.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import Target, arguments, finish
from benchmarks.kernels.gpu import module_like
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime import decode_graph
from moepack.runtime.devices import graphs, torch_cuda
from moepack.runtime.devices.handle_tables import DeviceTables
from moepack.runtime.experts.forward import experts_forward
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.kernels import affine_triton, routing_triton, switch_triton
from moepack.runtime.policies.contract import Needs
from moepack.runtime.residency.routing_statistics import RoutingStatistics
from moepack.runtime.step.context import NO_PROMPT, Step, opened
from moepack.server.batching.packed_cache import PackedKvCache, RowInput
from moepack.server.batching.row_table import RowTable

LAYERS = 48
EXPERTS = 128
TOP_K = 8
HIDDEN = 2048
INNER = 768
MATRICES = (Matrix("gate_up", 2 * INNER, HIDDEN), Matrix("down", HIDDEN, INNER))
VERSIONS = tuple(Version.of(name, 64) for name in ("w4", "w2"))
SEQUENCES = 16  # of the server
TARGET = 1.0  # milliseconds


class _Nothing:
    """Stands where a kernel is launched, and where a graph is replayed."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **named: None

    def replay(self) -> None:
        """Do nothing."""


class _Done:
    def done(self) -> bool:
        """The device has always ended."""
        return True


def _done() -> Any:
    return _Done()


class _Cache:
    """A static cache's addresses."""

    def __init__(self) -> None:
        self.layers = [_CacheLayer() for _ in range(LAYERS)]


class _CacheLayer:
    is_initialized = True

    def __init__(self) -> None:
        self.keys = torch.zeros(8)
        self.values = torch.zeros(8)
        self.cumulative_length = torch.tensor(0)


def _pass(input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
    """Stands for a model."""
    return {"logits": input_ids.float()[..., None]}


def _rows() -> PackedKvCache:
    """The server's cache with sequences that have room for all steps."""
    made = PackedKvCache([None] * LAYERS, None, 1, table=RowTable(LAYERS, torch.device("cpu")))
    for row in (made.add(1) for _ in range(SEQUENCES)):
        row.length = 1
        for held in row.layers:
            held.keys = torch.zeros(1, 1, 4096, 1)
            held.values = torch.zeros(1, 1, 4096, 1)
            held.end = 1
    return made


class Serving:
    """What a decode step passes through, from the wrapped forward to the counters' way to the policy."""

    def __init__(self, several: bool) -> None:
        device = torch.device("cpu")
        self.modules = [module_like() for _ in range(LAYERS)]
        self.room = [torch.zeros(v.resident_size(MATRICES) + 64, dtype=torch.uint8) for v in VERSIONS]
        self.room = [t[-t.data_ptr() % 64 :] for t in self.room]
        self.layers = [
            LayerExperts(ExpertLayer(i, "experts", EXPERTS, MATRICES), VERSIONS, device) for i in range(LAYERS)
        ]
        self.epoch = 0
        self.key = object()
        self.cache = _rows() if several else _Cache()
        for position, (layer, module) in enumerate(zip(self.layers, self.modules, strict=True)):
            layer.of.backend = "triton"
            layer.of.native = None
            layer.of.launched = (0, 1)
            layer.model = self.key
            layer.position = position
            module._moepack = layer
            for e in range(EXPERTS):
                layer.publish(e, layer.of.over(VERSIONS[e % 2], self.room[e % 2]))
        self.statistics = RoutingStatistics([EXPERTS] * LAYERS, 2, Needs(), device)
        self.tables = DeviceTables([EXPERTS] * LAYERS, device, _done)
        self.x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        self.index = torch.arange(TOP_K)[None]
        self.gates = torch.ones(1, TOP_K)
        ids = torch.zeros(1, SEQUENCES if several else 1, dtype=torch.int64)
        self.given = {"input_ids": ids, "cache": self.cache, "use_cache": True}

    def promote(self) -> None:
        """Give one expert its other version."""
        layer = self.layers[self.epoch % LAYERS]
        expert = self.epoch % EXPERTS
        old = layer.current.handles[expert].version
        number = int(old is not None and old.name == VERSIONS[0].name)
        layer.publish(expert, layer.of.over(VERSIONS[number], self.room[number]))
        self.epoch += 1

    def step(self, captured: decode_graph.DecodeGraphs | None) -> None:
        """Run one step, by a graph or layer by layer."""
        table = self.tables.take(self.epoch, tuple(layer.current for layer in self.layers))
        counters = self.statistics.counters(NO_PROMPT, None)
        step = Step(self.key, table.snapshots, counters, table=table)
        rows = self.cache
        with contextlib.ExitStack() as stack:
            if isinstance(rows, PackedKvCache):
                stack.enter_context(rows.passing([RowInput(row, 1) for row in rows.rows]))
            stack.enter_context(opened(step))
            if captured is None or captured.run(_pass, (), self.given, step, self.given, False) is None:
                self.forward()
        self.tables.give(table)
        self.statistics.ended(step)
        self.statistics.deliver(lambda event: None, lambda: [0] * LAYERS)

    def forward(self) -> None:
        """Run every layer's experts."""
        for module in self.modules:
            experts_forward(module, self.x, self.index, self.gates)


def measure(steps: int) -> list[dict[str, Any]]:
    """Milliseconds of a step, by way and by whether versions change."""
    rows = []
    with (
        patch.object(affine_triton, "many", _Nothing()),
        patch.object(affine_triton, "arrange", _Nothing()),
        patch.object(routing_triton, "_rank", _Nothing()),
        patch.object(routing_triton, "_place", _Nothing()),
        patch.object(switch_triton, "_switch", _Nothing()),
        patch.object(switch_triton, "_sum", _Nothing()),
        patch.object(routing_triton, "_routing", _Nothing()),
        patch.object(torch_cuda, "is_gpu", lambda device: True),
        patch.object(graphs, "capture", lambda run, device, beside: (run(), _Nothing())[1]),
        torch.no_grad(),
    ):
        for way in ("graph", "server", "eager"):
            serving = Serving(way == "server")
            captured = None if way == "eager" else decode_graph.DecodeGraphs(serving.layers)
            for moving in (False, True):
                seconds = []
                for _ in range(steps):
                    if moving:
                        serving.promote()
                    began = time.perf_counter()
                    serving.step(captured)
                    seconds.append(time.perf_counter() - began)
                if captured is not None and not any(captured._made.values()):
                    raise SystemExit(f"{way}: no graph was captured")
                name = f"{way}, moving" if moving else way
                rows.append({"step": name, "milliseconds": round(1e3 * statistics.median(seconds), 3)})
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rows = measure(20 if args.quick else args.steps)
    targets = [Target(f"ms of host code, {r['step']}", r["milliseconds"], TARGET, "lower") for r in rows[:2]]
    finish("a decode step's host code, 48 x 128 experts", ["step", "milliseconds"], rows, targets, args.json)


if __name__ == "__main__":
    main()
