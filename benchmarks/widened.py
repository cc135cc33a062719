"""BF16 products where a processor has no instructions for them: torch's emulation, and float32.

    python -m benchmarks.widened [--json widened.json]

All sides alternate in one process, which keeps torch to an instruction set without BF16 (AVX-512 where there is one,
and AVX2). Times of float32 contain all conversions: as calibrating does (`calibrate/widened.py`), and in the smaller
parts of serving (`runtime/kernels/by_torch.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Target, arguments, finish

SHAPES = {
    "an expert of Qwen3-30B-A3B, 1,024 tokens": (1024, 2048, 1536),
    "an expert of Mixtral, 1,024 tokens": (1024, 4096, 14336),
    "q of Qwen3-235B-A22B, 2,048 tokens": (2048, 4096, 8192),
}
SMALL = {"small": (256, 256, 512)}
LEVELS = {"AVX-512": ("AVX512_CORE", "default", "avx512f"), "AVX2": ("AVX2", "avx2", "avx2")}


def measure(tokens: int, columns: int, rows: int, turns: int) -> list[float]:
    """Median seconds of torch's product and of ours, calibrating and serving, in this process."""
    import torch

    from moepack.calibrate.widened import product
    from moepack.runtime.kernels import by_torch

    torch.cpu._is_avx512_bf16_supported = lambda: False  # torch is kept from them, and does not say so

    x, weight = torch.randn(tokens, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    ways = (torch.nn.functional.linear, product, by_torch.linear)
    found: list[list[float]] = [[] for _ in ways]
    for turn in range(turns + 1):
        for side, way in enumerate(ways):
            began = time.perf_counter()
            way(x, weight)
            found[side] += [time.perf_counter() - began] * (turn > 0)
    return [statistics.median(times) for times in found]


def main() -> None:
    """Parse arguments, measure in a process a level, print."""
    parser = arguments(__doc__)
    parser.add_argument("--measure", type=json.loads, help="of a child: tokens, columns, rows and turns")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    rows: list[dict[str, Any]] = []
    flags = Path("/proc/cpuinfo").read_text().split()
    for level, (onednn, aten, flag) in LEVELS.items():
        if flag not in flags:
            continue
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}
        for name, shape in (SMALL if args.quick else SHAPES).items():
            command = [sys.executable, "-m", "benchmarks.widened", "--measure", json.dumps([*shape, 3])]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            theirs, ours, served = json.loads(out)
            rows.append({"torch keeps to": level, "product": name, "torch, s": theirs, "float32, s": ours})
            rows[-1] |= {"float32 over torch": ours / theirs, "served over torch": served / theirs}
    targets = [
        Target(f"{r['product']}, {r['torch keeps to']}: {name}", r[name], 1, "lower")
        for r in rows
        for name in ("float32 over torch", "served over torch")
    ]
    finish("BF16 products without BF16 instructions", list(rows[0]), rows, targets, args.json)


if __name__ == "__main__":
    main()
