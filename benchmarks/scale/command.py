"""A build on a Ray cluster: two workers against one, what goes through the driver, and what 235 B and 671 B would take.

    python -m benchmarks.scale                does a second worker help?
    python -m benchmarks.scale --pieces       seconds of a batch at large models' shapes, and clusters by simulation

The first builds a generated checkpoint of 8 layers (2 with `--quick`) by GPTQ on clusters of one
and of two workers of one core each, each in a process of its own; Ray's start and the workers' imports, the same for
every build, are not counted. The second
measures one batch of each shape on one core, with the recipe's tokens, and a BF16 product as large as an expert's, in
seconds of the processor, so that a busy machine tells the same. What is simulated with them, and so assumed, stands in
simulation.py. There: nodes of 64 such cores, 25 Gb/s links, a filesystem of 2 GB/s, 75 GB for tokens.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.build import generate
from benchmarks.common import EXAMPLES, Target, arguments, finish

from .simulation import Cluster, Job, simulate

_RECIPE = "quantize: {{method: gptq, loss_tokens: 512}}\ncalibration: {{samples: {}, length: 256, batch_size: 8}}"
# Name, shipped recipe, layers with experts, hidden, expert size, experts, top-k, parameters that a token uses.
MODELS = (
    ("Qwen3-235B-A22B", "qwen3-235b-a22b", 94, 4096, 1536, 128, 8, 22e9),
    ("DeepSeek-V3, 671B", "deepseek-v3", 58, 7168, 2048, 256, 8, 37e9),
)
NODES = (1, 8, 32)
CORES, DISK, NETWORK, STORE = 64, 2e9, 25e9 / 8, 75e9


def on_ray(checkpoint: str, bundle: str, recipe: str, workers: int) -> dict[str, Any]:
    """Build on so many workers of one core; seconds, and bytes that went through this process."""
    from moepack.cluster import connect
    from moepack.pipeline import build as pipeline
    from moepack.pipeline.executors.on_ray import OnRay
    from moepack.pipeline.recipe import parse_recipe

    ray, _ = connect(None, num_cpus=workers)

    def warm() -> int:
        """Import what a batch needs, in a worker."""
        import transformers

        import moepack.calibrate.gather
        import moepack.quantize.expert_batch

        assert transformers and moepack.calibrate.gather and moepack.quantize.expert_batch
        time.sleep(1)  # so that every worker gets one
        return os.getpid()

    task = ray.remote(num_cpus=1)(warm)
    assert len(set(ray.get([task.remote() for _ in range(workers)]))) == workers
    executor = OnRay(None)
    vars(pipeline)["open_executor"] = lambda engine, address: executor
    began = time.monotonic()
    pipeline.build(
        checkpoint, bundle, parse_recipe(recipe, "benchmark"), [EXAMPLES / "text" / "calibration.jsonl"], engine="ray"
    )
    seconds = time.monotonic() - began
    ray.shutdown()
    traffic = executor.traffic
    return {"seconds": seconds, "tokens": traffic.tokens, "other": traffic.orders + traffic.answers + traffic.results}


def apart(function: Any, *values: Any) -> Any:
    """What a function returns in a fresh process with one of torch's threads."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *values).result()


def workers(quick: bool, out: Path | None) -> None:
    """One worker and two."""
    layers, hidden, experts, size, samples = (2, 256, 8, 64, 2) if quick else (8, 512, 32, 512, 32)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        generate(checkpoint, layers, hidden, experts, size)
        weights = 2 * layers * experts * 3 * hidden * size
        for count in (1, 2):
            bundle = Path(folder) / f"bundle-{count}"
            made = apart(on_ray, str(checkpoint), str(bundle), _RECIPE.format(samples), count)
            digest = bytes_of(bundle)
            rows.append({"workers": count, "seconds": made["seconds"], "tokens MB": made["tokens"] / 1e6,
                         "other kB": made["other"] / 1e3, "weights MB": weights / 1e6, "sha256": digest})  # fmt: skip
    one, two = rows
    beside = two["other kB"] * 1e3 / weights
    targets = [
        Target("seconds, two workers over one", two["seconds"] / one["seconds"], 0.65, "lower"),
        Target("bytes through the driver beside tokens, over bytes of weights", beside, 0.01, "lower"),
        Target("bundles that differ", float(one["sha256"] != two["sha256"]), 0, "lower"),
    ]  # fmt: skip
    finish(f"a build of {layers} layers on Ray", list(rows[0]), rows, targets, out)


def bytes_of(bundle: Path) -> str:
    """The digest in a bundle's manifest, which is over all of its files."""
    import json

    return str(json.loads((bundle / "manifest.json").read_text())["sha256"])[:12]


def batch_seconds(hidden: int, size: int, experts: int, top_k: int, tokens: int) -> dict[str, float]:
    """A batch by GPTQ at every width, and BF16 products, on one core: seconds, and operations a second."""
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.calibrate.products import widened
    from moepack.pack.spec import LOSSLESS, ExpertLayer, Matrix, Version
    from moepack.pipeline.tasks.experts import ExpertBatchTask, make_expert_batch
    from moepack.quantize.expert_batch import Settings, expert_batches

    class Gated:
        has_gate = True

        @staticmethod
        def _apply_gate(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

    layer = ExpertLayer(0, "experts", experts, (Matrix("gate_up", 2 * size, hidden), Matrix("down", hidden, size)))
    affine = tuple(Version.of(w, 64) for w in ("w4", "w3", "w2", "w1"))
    settings = Settings("gptq", affine)
    batch = expert_batches(layer, settings)[0]
    few, g = len(batch), torch.Generator().manual_seed(0)
    weights = [
        torch.randn(few, *shape, generator=g).mul(0.02).bfloat16() for shape in ((2 * size, hidden), (hidden, size))
    ]
    share = tokens * top_k // experts  # tokens of an expert; others of the layer beside them
    total = min(tokens, few * share + 8192)
    inputs = torch.randn(total, hidden, generator=g).bfloat16()
    chosen = torch.full((total, few), experts, dtype=torch.int32)
    for e in range(few):
        chosen[e * share : (e + 1) * share, e] = e
    observed = Observation(inputs, chosen, torch.full((total, few), 1 / top_k), 2048)
    own = ExpertWeights(layer, (weights[0], weights[1]), (None, None), False)
    task = ExpertBatchTask("", 0, batch, (Version.of(LOSSLESS, 64), *affine), settings, "cpu")
    began = time.process_time()
    made = make_expert_batch(task, Gated, own, observed, torch.device("cpu"))
    seconds = time.process_time() - began
    x, rate = inputs[: min(1024, total)], 0.0
    for _ in range(3):
        began = time.process_time()
        with widened(x.device, x.dtype):  # as calibrating does
            torch.nn.functional.linear(x, weights[0][0])
        rate = max(rate, 2 * len(x) * 2 * size * hidden / (time.process_time() - began))
    out = sum(len(extent) for extents in made.extents.values() for extent in extents)
    return {"batch": few, "seconds": seconds, "rate": rate, "made": out}


def pieces(quick: bool, out: Path | None) -> None:
    """Batches at large shapes, with the tokens that the shipped recipes bring, and what a build would take."""
    from moepack.pipeline.recipe import load_recipe

    rows: list[dict[str, Any]] = []
    more: dict[str, Any] = {"nodes": {"cores": CORES, "disk": DISK, "network": NETWORK, "store": STORE}, "pieces": {}}
    for name, recipe, layers, hidden, size, experts, top_k, active in MODELS:
        how = load_recipe(recipe).calibration
        tokens = how.samples * how.length
        if quick:
            hidden, size, tokens = hidden // 16, size // 16, tokens // 256
        piece = apart(batch_seconds, hidden, size, experts, top_k, tokens)
        batches = -(-experts // int(piece["batch"]))
        job = Job(
            layers, batches, 2 * active / layers * tokens / piece["rate"], piece["seconds"],
            tokens * (2.0 * hidden + 8 * top_k), piece["batch"] * 6.0 * hidden * size, piece["made"],
        )  # fmt: skip
        more["pieces"][name] = {**piece, "tokens": tokens, "calibrate": job.calibrate}
        for nodes in NODES:
            result = simulate(job, Cluster(nodes, CORES, DISK, NETWORK, STORE))
            floors = {f"{k} h": v / 3600 for k, v in result.floors.items()}
            rows.append({"model": name, "nodes": nodes, "hours": result.seconds / 3600,
                         "calibrated h": result.calibrated / 3600, **floors, "bound": result.bound})  # fmt: skip
        print(f"{name}: a batch of {piece['batch']} takes {piece['seconds']:.1f} s, "
              f"a BF16 product {piece['rate'] / 1e9:.0f} GFLOP/s")  # fmt: skip
    finish("builds on clusters, simulated with measured pieces", list(rows[0]), rows, [], out, more)


def main() -> None:
    """Build or simulate, print."""
    parser = arguments(__doc__)
    parser.add_argument("--pieces", action="store_true", help="batches at large shapes, and clusters by simulation")
    args = parser.parse_args()
    (pieces if args.pieces else workers)(args.quick, args.json)
