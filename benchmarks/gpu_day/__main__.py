"""One run on a machine with a CUDA GPU, of half an hour at the most: rates, times, and what must hold.

    python -m benchmarks.gpu_day [--quick] [--only STAGE ...] [--match ROW ...] [--minutes N] [--work DIR]
                                 [--json FILE]

Rates of the machine; a model of 30 B in budgets, by launches and by graph, and in the server's passes; layers by
version and batch against the byte floor and torch's grouped product; the exponents' decoder; promotions; a thousand of
them, byte by byte. Whether kernels are exact is for `pytest tests/runtime/kernels`, which takes the GPU there is.

Each stage is a process with a time of its own. When the time is over, the process is killed: the row that had begun is
"cut", the others are skipped, and rows measured before stay. A crash costs the row that had begun. `--match` runs only
rows with one of these texts in their names. `--work` keeps the generated bundles, so that several shorter runs can
share them. FILE is written after every row (default: gpu-day.json in DIR, or on a GPU in the current directory); rows
that it has from this machine stay until they are measured anew. The last table has each value, its limit if it has one,
and a verdict.

Without a GPU rows that need one are skipped by name. Others run in Triton's interpreter or on the CPU, to see that they
do.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import Row, Target, arguments, machine, show

from .rows import Rows, Setting, write
from .run import ROOT, Stage, child

FILE = "gpu-day.json"
# By name: the module and function of a stage's rows, its seconds on a GPU, and whether it is interpreted without one.
STAGES: dict[str, tuple[str, str, float, bool]] = {
    "machine": ("machine", "rows", 75, False),
    "large": ("large", "rows", 450, True),
    "layers": ("layers", "rows", 150, True),
    "coded": ("coded", "rows", 60, False),
    "served": ("served", "rows", 240, False),
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


def chosen(setting: Setting, only: list[str], match: list[str]) -> dict[str, list[str]]:
    """Return the rows to measure, by stage: those whose names have one of the texts `match` in them, or all."""
    out = {}
    for stage in only or STAGES:
        names = [name for name in entries(stage, setting) if not match or any(text in name for text in match)]
        if names:
            out[stage] = names
    return out


def begun(out: Path | None, setting: Setting) -> Row:
    """Return the document to write: what FILE has, or without one a document without rows.

    Raises ValueError for a file of another machine or size of run, whose rows would be lost or mixed with these.
    """
    of = {"machine": machine(), "gpu": setting.gpu or None, "quick": setting.quick}
    if out is None or not out.exists():
        return {**of, "rows": [], "targets": []}
    document: Row = json.loads(out.read_text())
    for key, value in of.items():
        if document.get(key) != value:
            raise ValueError(f"{out}: its {key} is not that of this run: name another file with --json")
    return document


def measure(
    setting: Setting,
    rows: dict[str, list[str]],
    minutes: float,
    out: Path | None,
    document: Row,
) -> list[Row]:
    """Run stages and return their rows, each of which is written to `out` as soon as it is known.

    Args:
        setting: where they run.
        rows: names of rows by stage.
        minutes: that all of them may take; the shares of STAGES bound a GPU's stages alone.
        out: a JSON file, or None.
        document: what `begun` has found there.
    """
    ends = time.monotonic() + 60 * minutes
    found = list[Row]()
    for stage, names in rows.items():
        _, _, share, interpreted = STAGES[stage]

        def keep(row: Row, stage: str = stage) -> None:
            found.append({"stage": stage, **row})
            _put(document, found[-1])
            write(out, document)
            print(f"{stage}: {row['row']}: {row['value']} {row['unit']} {row['verdict']}", file=sys.stderr, flush=True)

        left = max(0.0, ends - time.monotonic())
        Stage(stage, names, setting, min(share, left) if setting.on_gpu else left, interpreted).run(keep)
    return found


def _put(document: Row, row: Row) -> None:
    """Put a row into the document. One without a value does not replace an earlier one that has a value."""
    kept: list[Row] = document["rows"]
    same = [i for i, r in enumerate(kept) if (r["stage"], r["row"]) == (row["stage"], row["row"])]
    if not same:
        kept.append(row)
    elif row["value"] is not None or kept[same[0]]["value"] is None:
        kept[same[0]] = row
    held = [r for r in kept if r["verdict"] in ("holds", "FAILS")]
    targets = [Target(f"{r['stage']}: {r['row']}", r["value"], r["limit"], "lower") for r in held]
    document["targets"] = [{**asdict(t), "met": t.met} for t in targets]


def probed() -> Row:
    """Return what PROBE says of the device. A process of its own makes the context, which takes device memory."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(STAGES), default=[], help="stages; default: all")
    parser.add_argument("--match", nargs="+", metavar="ROW", default=[], help="only rows with this in their names")
    parser.add_argument("--minutes", type=float, default=30.0, help="that the whole run may take")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep generated bundles there; default: nowhere")
    for hidden in ("--stage", "--setting", "--rows"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        asked = json.loads(args.setting)
        setting = Setting(**{**asked, "work": Path(asked["work"])})
        child(entries(args.stage, setting), json.loads(args.rows), setting)
        return
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        setting = Setting(quick=args.quick, work=work.absolute(), **probed())
        folder = args.work or (Path() if setting.on_gpu else None)
        out = args.json or (folder / FILE if folder is not None else None)
        names = chosen(setting, args.only, args.match)
        if not names:
            parser.error(f"--match: no row has {' or '.join(args.match)} in its name: --only names stages")
        try:
            document = begun(out, setting)
        except ValueError as error:
            parser.error(str(error))
        rows = measure(setting, names, args.minutes, out, document)
    cells = [{k: "" if v is None else v for k, v in row.items()} for row in rows]
    show(f"GPU day: {setting.gpu or 'no CUDA device'}", cells)
    raise SystemExit(any(row["verdict"] == "FAILS" for row in rows))


if __name__ == "__main__":
    main()
