"""Kill a build at random moments, resume it, compare bytes: `python tests/helpers/kill_and_resume.py MODEL TEXT DIR`.

Builds run in forked children of a process that has made one itself, and so has imported and compiled everything: a
kill costs a second, and hits the build's own work.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import time
import traceback
from pathlib import Path

from support import tree

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child has none of its parent's threads
import torch

from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
dense: [w8]
versions: [bf16, w4, w2]
quantize: {method: gptq, group_size: 64, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def start(args: argparse.Namespace, bundle: Path, work: Path) -> int:
    """Begin a build in a child; its process number."""
    child = os.fork()
    if child:
        return child
    try:
        build(args.model, bundle, parse_recipe(RECIPE, "test"), [args.text], work=work)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Kill `--kills` times, over as many builds as that takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    build(args.model, args.directory / "before", parse_recipe(RECIPE, "test"), [args.text])
    kill(args, tree(args.directory / "before"), time.monotonic() - began, random.Random(args.seed))


def kill(args: argparse.Namespace, expected: dict[str, bytes], whole: float, chance: random.Random) -> None:
    """Kill builds of about `whole` seconds; raise unless each that ends, and what each leaves, is right."""
    bundle, work = args.directory / "at" / "bundle", args.directory / "at" / "work"
    kills = finished = 0
    while kills < args.kills or finished == 0:
        bundle.parent.mkdir(parents=True, exist_ok=True)
        child = start(args, bundle, work)
        if kills < args.kills:
            time.sleep(chance.uniform(0, 0.6 * whole))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        kills += killed
        if status and not killed:
            raise SystemExit(f"after {kills} kills the build failed")
        found = tree(bundle) if bundle.exists() else None
        if found != expected and (found is not None or not killed):
            raise SystemExit(f"after {kills} kills the bundle has other bytes")
        left = {*bundle.parent.iterdir(), *(work / "objects").glob("*")} - {bundle, work}
        if left and not killed:
            raise SystemExit(f"after {kills} kills there is also {left.pop()}")
        if found == expected:
            finished += 1
            shutil.rmtree(bundle.parent)
        print(f"{kills} kills, {finished} builds finished, all with the same bytes", flush=True)


if __name__ == "__main__":
    main()
