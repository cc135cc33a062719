"""BF16 products while calibrating, where a processor has no instructions for them: torch's emulation, and float32.

    python -m benchmarks.widened [--json widened.json]

Both sides alternate in one process, which keeps torch to an instruction set without BF16 (AVX-512 where there is one,
and AVX2). Times of float32 contain all conversions (`calibrate/widened.py`).
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


def measure(tokens: int, columns: int, rows: int, turns: int) -> tuple[float, float]:
    """Median seconds of torch's product and of ours, in this process."""
    import torch

    from moepack.calibrate.widened import product

    x, weight = torch.randn(tokens, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    found: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for side, way in enumerate((torch.nn.functional.linear, product)):
            began = time.perf_counter()
            way(x, weight)
            found[side] += [time.perf_counter() - began] * (turn > 0)
    return statistics.median(found[0]), statistics.median(found[1])


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
            theirs, ours = json.loads(out)
            rows.append({"torch keeps to": level, "product": name, "torch, s": theirs, "float32, s": ours})
            rows[-1]["float32 over torch"] = ours / theirs
    targets = [
        Target(f"{r['product']}, {r['torch keeps to']}: over torch", r["float32 over torch"], 1, "lower") for r in rows
    ]
    finish("BF16 products without BF16 instructions", list(rows[0]), rows, targets, args.json)


if __name__ == "__main__":
    main()
