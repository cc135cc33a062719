"""Tables of what is known and predicted of GPUs, from results/gpu-predictions.json: nothing in them was measured."""

from __future__ import annotations

from typing import Any

from .common import results, table

SHOWN = ("RTX 3090", "RTX 4090", "RTX 5090", "H100")
BITS = {"bf16": 16.0, "w8": 8.19, "w4": 4.1875, "w3": 3.1875, "w2": 2.375, "w1": 1.25, "nvfp4": 4.5}
TODAY = "today"
FUSED = "matrices in 8 bits, 15 nodes a layer"
ROWS = {"Qwen3-30B-A3B": ("w4", "w2"), "gpt-oss-120b": ("mxfp4", "w1"), "Qwen3.8-Flash-Next": ("nvfp4", "w2", "w1")}


def _kept() -> tuple[dict[str, Any], dict[str, Any]]:
    kept = results("gpu-predictions")
    return kept["inputs"], kept["predictions"]


def gpu_kernels() -> str:
    """Of one token's kernels: registers and shared memory of gate and up, instructions a weight, what bytes allow."""
    inputs, _ = _kept()
    rows = []
    for form, bits in BITS.items():  # 128 thread-instructions a cycle and SM; 8 bits a byte
        gated, plain = (inputs["kernels"][f"{form} {kind} decode"] for kind in ("gated", "plain"))
        cells = []
        for name in SHOWN:
            gpu = inputs["gpus"][name]
            of = str(gpu["capability"])
            allowed = 128 * gpu["sms"] * gpu["clock"] * bits / 8 / gpu["bandwidth"]
            cells.append(f"{gated[of]['instructions']:.1f}, {plain[of]['instructions']:.1f} ({allowed:.1f})")
        taken = gated["90"]
        rows.append([form, str(taken["registers"]), f"{taken['shared'] / 1024:.0f}", *cells])
    return table(["version", "registers, sm_90", "KiB, sm_90", *SHOWN], rows)


def _steps(way: str, kinds: tuple[str, ...]) -> str:
    _, predicted = _kept()
    rows = []
    for name, labels in ROWS.items():
        for label in labels:
            found = [predicted[gpu]["steps"][f"{name} {way}"][label] for gpu in SHOWN]
            cells = [
                "/".join(f"{r['tokens/s'][k]:.0f}" for k in kinds)
                if r["fits"]
                else f"misses: {r['tokens/s, misses copied']:.0f}"
                for r in found
            ]
            rows.append([f"{name}, {label}", f"{found[0]['GB']:.0f}", *cells])
    return table(["model, experts at", "GB", *SHOWN], rows)


def gpu_steps() -> str:
    """Predicted tokens a second of one sequence, of the runtime as it is."""
    return _steps(TODAY, ("eager", "graph", "byte floor"))


def gpu_steps_fused() -> str:
    """The same of one with dense matrices in 8 bits and 15 nodes a layer."""
    return _steps(FUSED, ("graph", "byte floor"))


def gpu_counted() -> str:
    """What a decoding step does."""
    inputs, _ = _kept()
    rows = [
        [
            name,
            f"{s['operations']:,}",
            str(s["launches of Triton"]),
            f"{s['operations of experts, a layer']}",
            str(s["synchronisations"]),
            f"{s['bytes of matrices'] / 1e9:.2f}",
        ]
        for name, s in inputs["steps"].items()
    ]
    heads = ["model", "operations", "launches of ours", "operations of a layer's experts", "waits", "GB beside experts"]
    return table(heads, rows)


def gpu_assumed() -> str:
    """The weightiest of what is neither published nor counted."""
    a = _kept()[0]["assumed"]
    heads = ["bandwidth reached", "PCIe reached", "a graph's node", "a launch by the host", "a load's way", "one warp"]
    cells = [
        f"{a['stream']:g}",
        f"{a['link']:g}",
        f"{a['node'] * 1e6:g} us",
        f"{a['host'] * 1e6:g} us",
        f"{a['latency'] * 1e6:g} us",
        f"{a['warp']:g} instructions a cycle",
    ]
    return table(heads, [cells])
