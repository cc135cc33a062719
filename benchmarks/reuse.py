"""Calibrating with memory that is used again, and with memory that the system clears anew: time, and what holes take.

A generated layer of a large model's shape is calibrated by its shipped recipe's batches, in a process of its own each
time, in turns with and without. Timed are a layer's batches from the third on: the first two find no freed memory. The
peak is of all but the first. Holes are how much more memory it takes to reuse it, beside what a forward takes by
arithmetic (`moepack/pipeline/bound.py`, where REUSED counts them).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.build import SHAPES, SMALL, apart, generate, words
from benchmarks.common import Target, arguments, finish, positive
from moepack.pipeline.bound import REUSED
from moepack.progress import Reporter

BATCHES = 5


@dataclass(frozen=True)
class Pass:
    """What a batch took in seconds, and the peak and a forward in bytes."""

    seconds: float
    peak: int
    forward: int


class Times(Reporter):
    """When each batch of windows was through."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self._counts = False

    def inner(self, name: str, total: int) -> None:
        """Bytes are counted as well."""
        self._counts = name == "tokens"

    def advance(self, amount: int = 1) -> None:
        """Take note of a batch."""
        if self._counts:
            self.at.append(time.monotonic())


def calibrate(checkpoint: str, work: str, text: str, name: str, length: int, reuse: bool) -> Pass:
    """Calibrate `BATCHES` batches of a shipped recipe's size."""
    from moepack.memory import peak_memory
    from moepack.pipeline import build
    from moepack.pipeline.bound import Needs, Placement, needs_of, steps
    from moepack.pipeline.recipe import load_recipe
    from moepack.runtime.devices.glibc import reusing

    recipe = load_recipe(name)
    batch = recipe.calibration.batch_size
    recipe = replace(recipe, calibration=replace(recipe.calibration, samples=BATCHES * batch, length=length))
    between = reusing if reuse else nullcontext
    needed: list[Needs] = []
    peaks: list[int] = []

    def noted(*of: Any, **more: Any) -> Needs:
        needed.append(needs_of(*of, **more))
        return needed[-1]

    @contextmanager
    def watched() -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        with between():
            yield
            peaks.append(peak_memory())

    times = Times()
    with (
        patch("moepack.pipeline.start.needs_of", noted),
        patch("moepack.pipeline.bound.available_memory", lambda: 1 << 60),  # whatever there is: both are wanted
        patch("moepack.pipeline.run.reusing", watched),
    ):
        build.calibrate(checkpoint, work, recipe, [text], reporter=times)
    took = [b - a for a, b in itertools.pairwise(times.at)][1:]
    assert len(took) == BATCHES - 2
    return Pass(statistics.median(took), peaks[0], steps(needed[0], Placement(batch))["calibrate"]["forward"])


def main() -> None:
    """Generate, calibrate in turns, print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=positive, default=3, help="of each, in turns")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in SMALL if args.quick else SHAPES:
        if shape.experts * shape.expert_size * shape.hidden > 1 << 30:  # all of DeepSeek-V3's: 22.5 GB
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, length = Path(folder) / "checkpoint", 256 if args.quick else 2048
            generate(checkpoint, 1, shape.hidden, shape.experts, shape.expert_size, shape.top_k)
            text = words(Path(folder) / "text.jsonl", 64 * length)
            made: dict[bool, list[Pass]] = {False: [], True: []}
            for n in range(args.rounds):
                for reuse, passes in made.items():
                    work = str(Path(folder) / f"{n}-{reuse}")
                    passes.append(apart(calibrate, str(checkpoint), work, text, shape.recipe, length, reuse))
        seconds, peaks = (
            {reuse: statistics.median(getattr(p, what) for p in passes) for reuse, passes in made.items()}
            for what in ("seconds", "peak")
        )
        forward, holes = made[True][0].forward, peaks[True] - peaks[False]
        rows.append(
            {
                "layer": shape.name, "a batch, cleared s": seconds[False], "a batch, reused s": seconds[True],
                "ratio": seconds[True] / seconds[False], "forward MiB": forward / 2**20,
                "holes MiB": holes / 2**20, "holes over forward": holes / forward,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    targets = [Target(f"holes over forward, {r['layer']}", r["holes over forward"], REUSED - 1, "lower") for r in rows]
    targets += [Target(f"time of a batch, {r['layer']}", r["ratio"], 1, "lower") for r in rows]
    finish("calibrating with memory that is used again", list(rows[0]), rows, targets, args.json)


if __name__ == "__main__":
    main()
