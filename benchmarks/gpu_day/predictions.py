"""What is predicted of a GPU before any is there: written once (`python -m benchmarks.gpu_day --predict`), then kept.

The file holds the inputs that took minutes to count, and what model.py makes of them. A run on a GPU is to falsify it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from moepack.pack.spec import Version
from moepack.runtime.store.pinned import PIECE

from . import model
from .devices import GPUS, Gpu
from .model import LAYER, Assumed

FILE = Path(__file__).resolve().parent.parent / "results" / "gpu-predictions.json"
GROUPS = {"bf16": 0, "w8": 128, "w4": 128, "w3": 128, "w2": 64, "w1": 64, "nvfp4": 16, "mxfp4": 32}  # as recipes have
VERSIONS = {name: Version.of(name, group) for name, group in GROUPS.items()}
BATCHES = (1, 4, 16, 512, 2048)
SERVED = {
    "Qwen3-30B-A3B": ("bf16", "w8", "w4", "w3", "w2", "w1"),
    "gpt-oss-120b": ("mxfp4", "w2", "w1"),
    "Qwen3.8-Flash-Next": ("nvfp4", "w4", "w3", "w2", "w1"),
}
FUSED = 15  # nodes of a decoder layer that 200 tokens a second allow, and what a fused pass would have
SLOTS = (1, 2, 8)  # copies under way
CODED = 10.7  # bits of a weight in BF16, coded
DECODED = 32 * 3 * 2048 * 768  # weights that the decoder is timed on
# Of a generated model's texts (limited/weights.py): the share of experts that a cache of the last used holds, and hits.
HITS = ((0.0, 0.0), (0.125, 0.43), (0.25, 0.70), (0.5, 0.93), (1.0, 1.0))
ROOM = 0.9  # of the GPU's memory, for weights
WAYS = {"today": (16.0, None), "matrices in 8 bits, 15 nodes a layer": (8.19, FUSED)}


def predicted(inputs: dict[str, Any]) -> dict[str, Any]:
    """By GPU: times of layers by version and batch, of the decoder, of steps by model, and of transfers."""
    a = Assumed(**inputs["assumed"])
    kernels = inputs["kernels"]
    nodes = inputs["steps"]["Qwen3-30B-A3B"]["operations of experts, a layer"]
    out: dict[str, Any] = {}
    for gpu in GPUS.values():
        seconds, bound = model.decoder(gpu, a, kernels, DECODED, CODED)
        out[gpu.name] = {
            "layers": {
                f"{name} {n}": row
                for name, v in VERSIONS.items()
                for n in BATCHES
                if (row := _layer(gpu, a, kernels, v, n, nodes)) is not None
            },
            "decoder": {"us": seconds * 1e6, "bound by": bound, "GB/s": 2 * DECODED / seconds / 1e9},
            "steps": {
                f"{m} {way}": _steps(gpu, a, kernels, inputs["steps"][m], m, *how)
                for m in SERVED
                for way, how in WAYS.items()
            },
            "promotions": {
                str(n): 1 / model.promotion(gpu, a, VERSIONS["w4"].resident_size(LAYER.matrices), n) for n in SLOTS
            },
            "rates": {
                "host to device GB/s": gpu.link * a.link / 1e9,
                "device copy GB/s": gpu.bandwidth * a.stream / 1e9,
                "launch us": a.host * 1e6,
                "launch while registering, p99 us": a.register * PIECE * 1e6,
            },
        }
    return out


def _layer(gpu: Gpu, a: Assumed, kernels: dict[str, Any], v: Version, tokens: int, nodes: int) -> dict[str, Any] | None:
    found = model.products(gpu, a, kernels, LAYER, v, tokens)
    if found is None:
        return None
    first, second = found.limits
    return {
        "us": (nodes * a.node + found.seconds) * 1e6,
        "products us": found.seconds * 1e6,
        "bound by": [first.bound_by, second.bound_by],
        "byte floor us": found.read / gpu.bandwidth * 1e6,
    }


def _steps(
    gpu: Gpu, a: Assumed, kernels: dict[str, Any], counted: dict[str, Any], name: str, bits: float, fused: int | None
) -> dict[str, Any]:
    """By version: bytes, and tokens a second with all experts resident, whether or not they fit."""
    counted = dict(counted)
    if fused is not None:
        counted["operations"] = fused * counted["layers"] + 20
    out = {}
    shape = model.shape_of(counted)
    for label in SERVED[name]:
        version = VERSIONS[label]
        found = model.step(gpu, a, kernels, counted, version, bits)
        if found is None:
            continue
        experts = counted["layers"] * counted["experts"] * version.resident_size(shape.matrices)
        taken = experts + counted["bytes of matrices"] * bits / 16
        rates = found.rates if fused is None else {k: found.rates[k] for k in ("graph", "byte floor")}
        out[label] = {"GB": taken / 1e9, "fits": taken < ROOM * gpu.memory, "tokens/s": rates}
        if not out[label]["fits"]:
            share = (ROOM * gpu.memory - (taken - experts)) / experts
            found_there = hits(share)
            waits = model.offloaded(found, a, gpu, counted, version, found_there)
            kind = "eager" if fused is None else "graph"
            out[label] |= {"hits": found_there, "tokens/s, misses copied": waits[kind]}
    return out


def hits(share: float) -> float:
    """How often a token finds an expert in a cache of this share of them."""
    share = min(max(share, 0.0), 1.0)
    for (a, low), (b, high) in pairwise(HITS):
        if share <= b:
            return low + (high - low) * (share - a) / (b - a)
    return 1.0


def made() -> dict[str, Any]:
    """Count all inputs anew, which takes minutes, and predict."""
    import transformers
    import triton

    from benchmarks.resources import digest

    from . import issue, steps

    inputs = {
        "of": {"kernels": digest(), "triton": triton.__version__, "transformers": transformers.__version__},
        "assumed": asdict(Assumed()),
        "gpus": {name: asdict(gpu) for name, gpu in GPUS.items()},
        "kernels": issue.counted(),
        "steps": {name: steps.counted(name) for name in steps.CONFIGS},
    }
    inputs = rounded(inputs)
    return {"inputs": inputs, "predictions": rounded(predicted(inputs))}


def write() -> None:
    """Write the file."""
    aside = FILE.with_suffix(".partial")
    aside.write_text(json.dumps(made(), indent=1) + "\n")
    aside.rename(FILE)


def rounded(value: Any) -> Any:
    """Numbers to five figures, so that a file's lines do not change with the last bits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def kept() -> dict[str, Any]:
    """The committed file."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found
