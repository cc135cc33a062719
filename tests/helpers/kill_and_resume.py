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
quantize: {method: gptq, group_size: 64, loss_tokens: 128}
calibration: {samples: 8, length: 128, batch_size: 8}
"""


def start(model: Path, text: Path, bundle: Path, work: Path) -> int:
    """Begin a build in a child; its process number."""
    child = os.fork()
    if child:
        return child
    try:
        build(model, bundle, parse_recipe(RECIPE, "test"), [text], work=work)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Kill `--kills` times, over as many builds as that takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "text", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    build(args.model, args.directory / "reference", parse_recipe(RECIPE, "test"), [args.text])
    expected = tree(args.directory / "reference")
    bundle, work = args.directory / "bundle", args.directory / "work"
    began = time.monotonic()
    child = start(args.model, args.text, args.directory / "whole", args.directory / "work-whole")
    if os.waitpid(child, 0)[1] or tree(args.directory / "whole") != expected:
        raise SystemExit("the uninterrupted build failed")
    whole = time.monotonic() - began
    kills = finished = 0
    while kills < args.kills or finished == 0:
        child = start(args.model, args.text, bundle, work)
        if kills < args.kills:
            time.sleep(chance.uniform(0, 0.6 * whole))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            kills += 1
            if bundle.exists() and tree(bundle) != expected:
                raise SystemExit(f"after kill {kills} the bundle is there, but not whole")
        elif status:
            raise SystemExit(f"after {kills} kills the build failed")
        if bundle.exists():
            if tree(bundle) != expected:
                raise SystemExit(f"after {kills} kills the bundle has other bytes")
            finished += 1
            shutil.rmtree(bundle)
            shutil.rmtree(work)
    print(f"{kills} kills, {finished} builds finished, all with the same bytes")


if __name__ == "__main__":
    main()
