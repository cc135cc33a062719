"""A layer built by an earlier revision of this repository, and by what is here: time and peak memory, in turns.

    python -m benchmarks.before a685724     a layer of Qwen3-30B-A3B's shape, its shipped recipe: 1,048,576 tokens

The earlier one is installed from this repository's history, without what it needs besides: it runs on the libraries
that are here. Both build the same generated layer by the recipe of that name that each of them ships, on the same text,
each in a process of its own, and end once some experts are made, as one takes what another does. The whole layer's time
is what calibrating took, and for all experts what one of these took. Neither is given a bound on memory: not every
revision has one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.build import generate, words
from benchmarks.common import Target, arguments, finish, positive

ROOT = Path(__file__).resolve().parent.parent
# Runs with either revision: their modules have other names, what is called of them has not.
_BUILD = """
import contextlib, json, sys, time
from dataclasses import replace
from pathlib import Path
from moepack.memory import peak_memory
try:
    from moepack.pipeline.build import build
    from moepack.pipeline.recipe import load_recipe
except ImportError:
    from moepack.pipeline import build
    from moepack.recipe import load_recipe
sys.path.append(sys.argv.pop())
from benchmarks.build import Enough, Some

checkpoint, bundle, text, windows, most = *sys.argv[1:4], *map(int, sys.argv[4:])
recipe, some, work = load_recipe("qwen3-30b-a3b"), Some(most), Path(bundle + ".work")
recipe = replace(recipe, calibration=replace(recipe.calibration, samples=windows))
began = time.monotonic()
with contextlib.suppress(Enough):
    build(checkpoint, bundle, recipe, [text], work, reporter=some)
ended = time.monotonic()
print(json.dumps({
    "calibrate s": some.began - began, "experts made": some.made(work), "quantise s": ended - some.began,
    "peak MiB": peak_memory() / 2**20,
}))
"""


def install(revision: str, folder: Path) -> Path:
    """Install a revision of this repository, and nothing that it needs, into a folder; returns where it is."""
    archive = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, stdout=subprocess.PIPE)
    if archive.returncode:  # git has said why
        raise SystemExit(f"{ROOT}: has no revision {revision}: it takes a clone with its history")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder / "source", filter="data")
    options = ["-q", "--no-deps", "--target", str(folder / "lib")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder / "source")], check=True)
    return folder / "lib"


def build(lib: Path | None, folder: Path, text: str, windows: int, most: int) -> dict[str, Any]:
    """Build the checkpoint in a folder, by the package in `lib` or by the one that is here."""
    environment = dict(os.environ) if lib is None else os.environ | {"PYTHONPATH": str(lib)}
    with tempfile.TemporaryDirectory(dir=folder) as work:
        values = (folder / "checkpoint", Path(work) / "bundle", text, windows, most, ROOT)
        command = [sys.executable, "-c", _BUILD, *map(str, values)]
        run = subprocess.run(command, env=environment, cwd=work, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    """Install, build in turns, print."""
    parser = arguments(__doc__)
    parser.add_argument("revision", help="the earlier one, as git names it")
    parser.add_argument("--rounds", type=positive, default=1, help="builds of each")
    args = parser.parse_args()
    # Quick: a 16th of the hidden size and an eighth of the experts'.
    hidden, size, experts, windows, most = (128, 96, 128, 8, 40) if args.quick else (2048, 768, 128, 512, 40)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        show = [sys.executable, "-c", "import moepack; print(moepack.__file__)"]
        found = subprocess.run(show, cwd=work, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
        if Path(found).resolve().parent.parent != ROOT:
            raise SystemExit(f"{sys.executable}: has the moepack of {found}, not the one of {ROOT}: install this one")
        lib = install(args.revision, folder)
        generate(folder / "checkpoint", 1, hidden, experts, size, 8)
        text = words(folder / "text.jsonl", windows * 2048)
        for _ in range(args.rounds):
            for name, where in ((args.revision, lib), ("here", None)):
                made = build(where, folder, text, windows, most)
                layer = made["calibrate s"] + made["quantise s"] * experts / made["experts made"]
                rows.append({"revision": name, **made, "of": experts, "layer min": layer / 60})
                print(rows[-1], flush=True)
    before, here = (
        statistics.median(r["layer min"] for r in rows if r["revision"] == name) for name in (args.revision, "here")
    )
    targets = [Target(f"time of a layer over that of {args.revision}", here / before, 0.7, "lower")]
    finish("a layer of Qwen3-30B-A3B's shape, then and now", list(rows[0]), rows, targets, args.json)


if __name__ == "__main__":
    main()
