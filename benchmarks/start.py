"""How long it takes from the start of a command to its first token, and what of that is importing.

    python -m benchmarks.start [BUNDLE] [--repeat N]

`moepack generate` of one token, in a process of its own each time that finds its bytecode, beside a process that
imports torch and the model's class from transformers and does nothing else, with and without the libraries that
moepack leaves out (runtime/patches.py). Processor time is printed beside the clock's: on a shared machine they differ.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import EXAMPLES, Target, arguments, finish
from benchmarks.serve import built

IMPORTS = "import torch, transformers.models.qwen3_moe.modeling_qwen3_moe"
COMMAND = "moepack generate, one token"
BOUND = 5.0  # seconds to the first token


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds by the clock, and of processors, that a command takes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("bundle", nargs="?", help="without it a small one is built")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        bundle = args.bundle or str(built(Path(work), EXAMPLES / "mini-qwen3-moe"))
        rows = measured(bundle, 1 if args.quick else args.repeat)
    first = next(row["s"] for row in rows if row["what"] == COMMAND)
    target = Target("seconds to the first token", first, BOUND, "lower")
    finish(f"from start to token, {os.cpu_count()} processors", ["what", "s", "processor s"], rows, [target], args.json)


def measured(bundle: str, repeat: int) -> list[dict[str, Any]]:
    """Medians of each way, in turns."""
    left_out = f"from moepack.runtime.patches import leave_out; leave_out('serve'); {IMPORTS}"
    generate = [sys.executable, "-m", "moepack", "generate", bundle, "--prompt", "The", "--max-new-tokens", "1"]
    ways = {
        "importing torch and the model's class": [sys.executable, "-c", IMPORTS],
        "the same, without what serving leaves out": [sys.executable, "-c", left_out],
        COMMAND: generate,
        "the same under hotness in a budget": [*generate, "--device-memory", "40MB"],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(1 + repeat):
        for name, command in ways.items():
            row = timed(command)
            found[name] += [row] * (turn > 0)  # the first writes bytecode, and fills the system's cache
    return [
        {"what": name, "s": statistics.median(s for s, _ in of), "processor s": statistics.median(c for _, c in of)}
        for name, of in found.items()
    ]


if __name__ == "__main__":
    main()
