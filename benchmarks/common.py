"""What the benchmarks share: the machine's description, the table, the targets, the JSON file, the command line."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # a row of results by column, or a result's other facts: what JSON holds

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True)
class Target:
    """Something a benchmark is held to; it stands in the output even when it is missed."""

    name: str
    value: float
    target: float
    better: str  # "higher" or "lower"

    @property
    def met(self) -> bool:
        """Whether the value reaches the target."""
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def machine() -> Row:
    """The machine and the libraries, as far as results depend on them."""
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    except OSError:
        pass
    libraries = {}
    for name in ("moepack", "torch", "transformers", "numpy", "gptqmodel", "hqq", "zipnn"):
        try:
            libraries[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    import torch

    return {
        "cpu": model,
        "simd": [f for f in ("avx2", "avx512f", "avx512vbmi", "avx512_bf16") if f in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "libraries": libraries,
    }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, rows and targets there")
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes: to see that it works")
    return parser


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    """And those of a benchmark that builds one model: what, from which texts."""
    parser = arguments(description)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe")
    parser.add_argument("--calibration", action="append", help="text to calibrate on")
    parser.add_argument("--data", action="append", help="text to serve or to evaluate on, in this order")
    return parser


def texts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What to calibrate on, and what to serve: the examples' where none is named."""
    folder = EXAMPLES / "text"
    return args.calibration or [str(folder / "calibration.jsonl")], args.data or [str(folder / "evaluation.jsonl")]


def build(checkpoint: Path, bundle: Path, recipe: str, calibration: Sequence[str] = ()) -> Path:
    """Build a bundle by the text of a recipe, calibrated on the example's text where none is named; return its path."""
    from moepack.pipeline import build as pipeline
    from moepack.pipeline.recipe import parse_recipe
    from moepack.shared.progress import progress

    with progress() as reporter:
        data = list(calibration) or [str(EXAMPLES / "text" / "calibration.jsonl")]
        pipeline.build(checkpoint, bundle, parse_recipe(recipe, "benchmark"), data, reporter=reporter)
    return bundle


def built(args: argparse.Namespace, bundle: Path, versions: str, samples: int) -> Path:
    """A bundle of the model at these versions, calibrated on so many windows of 256 tokens."""
    calibration = f"calibration: {{samples: {samples}, length: 256, batch_size: 16}}"
    recipe = f"versions: [{versions}]\nquantize: {{method: gptq}}\n{calibration}"
    return build(args.checkpoint, bundle, recipe, args.calibration or ())


def least_budget(load: Callable[[int], object]) -> int:
    """The smallest budget that would do for what `load` loads, as a refusal names it."""
    from moepack.runtime.planning.exceeded import TooSmallError

    try:
        load(1)
    except TooSmallError as error:
        return error.least
    raise AssertionError("a budget of one byte was not refused")


def in_turns(
    sides: Mapping[str, Callable[[int], Callable[[], object]]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of each side in every round but the first, all taking turns, so that a disturbance disturbs all.

    A side is given the number of a round, and returns what the clock runs over.
    """
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, prepared in sides.items():
            work = prepared(number)
            began = clock()
            work()
            if number:
                spent[name].append(clock() - began)
    return spent


def show(title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
    """Print a table; without `columns` of everything that a row has and that fits a cell."""
    from rich.console import Console
    from rich.table import Table

    plain = (key for row in rows for key, value in row.items() if not isinstance(value, dict | list))
    columns = columns or list(dict.fromkeys(plain))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_cell(row.get(c, "")) for c in columns))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def finish(
    title: str,
    rows: Sequence[Row],
    targets: Sequence[Target],
    out: Path | None,
    more: Row | None = None,
    columns: Sequence[str] = (),
) -> None:
    """Print the table and the targets; write the JSON file where one is wanted, with `more` in it."""
    from rich.console import Console

    facts = machine()
    show(title, rows, columns)
    console = Console(width=None if sys.stdout.isatty() else 140)
    simd = f", {'/'.join(facts['simd'])}" if facts["simd"] else ""
    console.print(f"{facts['cpu']}{simd}, {facts['cores']} cores, {facts['memory_gib']} GiB, GPU: {facts['gpu']}")
    console.print(", ".join(f"{k} {v}" for k, v in facts["libraries"].items()), highlight=False)
    for t in targets:
        word = "[green]met[/green]" if t.met else "[red]missed[/red]"
        sign = ">=" if t.better == "higher" else "<="
        console.print(f"{word}  {t.name}: {t.value:.4g} ({sign} {t.target:g})", highlight=False)
    if out is not None:
        listed = [{**asdict(t), "met": t.met} for t in targets]
        whole = {"machine": facts, "rows": list(rows), "targets": listed, **(more or {})}
        out.write_text(json.dumps(whole, indent=1) + "\n")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def lower_quartile(times: Sequence[float]) -> float:
    """Of at least one: on a machine that others use too, medians of short runs are times of waiting for it."""
    return sorted(times)[len(times) // 4]
