"""One run on a machine with a CUDA GPU, of ten minutes at the most, beside what was predicted of it.

    python -m benchmarks.gpu_day [--quick] [--minutes N] [--only STAGE ...] [--json FILE]
    python -m benchmarks.gpu_day --predict

Rates of the machine; what every kernel takes, and whether it is exact; layers by version and batch against the byte
floor, torch's grouped product and gemlite; the exponents' decoder and DFloat11's; promotions and what they cost passes;
a whole model by launches and by graph; a budget beside the driver's count; a thousand promotions, byte by byte. Each
stage is a process with a time of its own, and a crash costs the row that had begun. The file is written after every row
(default on a GPU: gpu-day.json). The last table has each value, its prediction or limit, their ratio and a verdict.

Without a GPU rows that need one are skipped by name. Others run in Triton's interpreter or on the CPU, to see that they
do. `--predict` counts the model's inputs anew, in minutes and without a GPU, and writes
benchmarks/results/gpu-predictions.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, machine, show

from . import predictions
from .model import Assumed
from .rows import Rows, Setting, write
from .run import ROOT, Stage, child

# By name: the module and function of a stage's rows, its seconds on a GPU, and whether it is interpreted without one.
STAGES: dict[str, tuple[str, str, float, bool]] = {
    "machine": ("machine", "rows", 45, False),
    "resources": ("products", "resources", 100, False),
    "exact": ("products", "exact", 90, True),
    "layers": ("products", "layers", 110, True),
    "coded": ("coded", "rows", 45, True),
    "served": ("served", "rows", 130, False),
    "whole": ("whole", "rows", 80, True),
    "large": ("large", "rows", 200, True),
}
PROBE = """
import json, torch
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    print(json.dumps({"device": "cuda", "gpu": p.name, "capability": 10 * p.major + p.minor, "cache": p.L2_cache_size}))
else:
    print(json.dumps({"device": "cpu"}))
"""


def entries(stage: str, setting: Setting) -> Rows:
    """A stage's rows by name."""
    from importlib import import_module

    module, function, _, _ = STAGES[stage]
    found: Callable[[Setting], Rows] = getattr(import_module(f"benchmarks.gpu_day.{module}"), function)
    return found(setting)


def measure(setting: Setting, only: list[str], minutes: float, out: Path | None) -> list[dict[str, Any]]:
    """Run the stages; return the rows, which are written to `out` as they come."""
    ends, rows = time.monotonic() + 60 * minutes, list[dict[str, Any]]()
    document: dict[str, Any] = {"machine": machine(), "gpu": setting.gpu or None, "rows": rows, "targets": []}
    for name in only or STAGES:
        _, _, seconds, interpreted = STAGES[name]

        def keep(row: dict[str, Any], stage: str = name) -> None:
            rows.append({"stage": stage, **row})
            document["targets"] = [
                {"name": f"{r['stage']}: {r['row']}", "value": r["value"], "target": r["prediction"], "better": "lower",
                 "met": r["verdict"] == "holds"}
                for r in rows
                if r["verdict"] in ("holds", "FAILS")
            ]  # fmt: skip
            write(out, document)
            print(f"{stage}: {row['row']}: {row['value']} {row['unit']} {row['verdict']}", file=sys.stderr, flush=True)

        left = max(0.0, ends - time.monotonic())
        Stage(
            name, list(entries(name, setting)), setting, min(seconds, left) if setting.on_gpu else left, interpreted
        ).run(keep)
    return rows


def main() -> None:
    """Parse arguments; measure, be a child, or predict."""
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="that the whole run may take")
    parser.add_argument("--only", nargs="*", choices=list(STAGES), default=[], help="stages; default: all")
    parser.add_argument("--predict", action="store_true", help="write the predictions anew, and stop")
    for hidden in ("--stage", "--setting", "--rows"):
        parser.add_argument(hidden, help="of a stage's own process")
    args = parser.parse_args()
    if args.predict:
        predictions.write()
        return
    if args.stage:
        asked = json.loads(args.setting)
        setting = Setting(**{**asked, "work": Path(asked["work"])})
        child(entries(args.stage, setting), json.loads(args.rows), setting)
        return
    probed = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as work:
        setting = Setting(quick=args.quick, work=Path(work), **json.loads(probed.stdout.strip().splitlines()[-1]))
        out = args.json or (Path("gpu-day.json") if setting.on_gpu else None)
        rows = measure(setting, args.only, args.minutes, out)
    columns = ["stage", "row", "value", "unit", "prediction", "ratio", "verdict"]
    cells = [{k: "" if v is None else v for k, v in row.items()} for row in rows]
    show(f"GPU day: {setting.gpu or 'no CUDA device'}", columns, cells)
    print("predictions:", predictions.FILE.name, json.dumps(asdict(Assumed())))
    raise SystemExit(any(row["verdict"] == "FAILS" for row in rows))


if __name__ == "__main__":
    main()
