"""Kill a build at random moments, resume it, compare bytes: `kill_and_resume.py MODEL TEXT DIR KILLS VERSIONS`.

Builds run in forked children of a process that has made one itself, and so has imported and compiled everything: a
kill costs a second, and hits the build's own work.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from support import forked, tree

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child has none of its parent's threads
import torch

from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
dense: [w4]
versions: [VERSIONS]
quantize: {method: gptq, group_size: 64, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def main():
    """Kill builds; raise unless each that ends, and what each leaves, is right."""
    model, text, directory, wanted = *map(Path, sys.argv[1:4]), int(sys.argv[4])
    recipe, chance = parse_recipe(RECIPE.replace("VERSIONS", sys.argv[5]), "test"), random.Random(0)
    torch.set_num_threads(1)
    build(model, directory / "before", recipe, [text])
    expected, began = tree(directory / "before"), time.monotonic()
    build(model, directory / "again", recipe, [text])  # nothing is imported or compiled any more
    whole = time.monotonic() - began
    bundle, work = directory / "at" / "bundle", directory / "at" / "work"
    kills = finished = 0
    while kills < wanted or finished == 0:
        bundle.parent.mkdir(parents=True, exist_ok=True)
        child = forked(lambda: build(model, bundle, recipe, [text], work=work))
        if kills < wanted:
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
