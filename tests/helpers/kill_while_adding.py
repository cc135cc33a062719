"""Kill the adding of a version at its steps, see what is there: `kill_while_adding.py KEPT DIR`.

KEPT holds a bundle "b" and the work directory "w" it was built in. A step is whatever Python's audit hooks tell of the
file system, in a forked child. It is killed before each step around the moment at which the bundle is replaced. Prints
how often the old bundle was there afterwards, and how often the new.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from support import forked, tree

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child has none of its parent's threads
import torch

from moepack.pipeline.add import add

STEPS = ("open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")
EXCHANGE = ("ctypes.dlsym", "renameat2")
AROUND = 5  # steps before and after the exchange


def adding(root: Path, kill: int | None, log: Path | None = None) -> bool:
    """Add w2 in a child that dies before its step number `kill`; whether it did. `log` is told of every step."""
    steps: list[str] = []

    def step(event: str, arguments: tuple[object, ...]):
        relative = event in ("os.remove", "os.rmdir") and arguments[-1] != -1  # as a folder is removed
        if event in STEPS and (relative or str(root) in str(arguments[0])):
            steps.append(event)
        elif event == EXCHANGE[0] and arguments[1] == EXCHANGE[1]:
            steps.append(EXCHANGE[1])
        else:
            return
        if len(steps) - 1 == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def work():
        sys.addaudithook(step)
        add(root / "b", root / "w", ["w2"])
        if log is not None:
            made = list(steps)
            log.write_text("\n".join(made))

    status = os.waitpid(forked(work), 0)[1]
    if status and not os.WIFSIGNALED(status):
        raise SystemExit("adding failed")
    return bool(status)


def main():
    """Kill, look, go on."""
    kept, directory = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    root, log, quantised = directory / "at", directory / "steps", directory / "quantised"
    shutil.copytree(kept, root)
    old = tree(root / "b")
    add(root / "b", root / "w", ["w2"])  # imports and compiles what is needed
    shutil.copytree(root / "w", quantised / "w")  # from here on only what follows quantising is done again
    shutil.copytree(kept / "b", quantised / "b")
    restart(quantised, root)
    adding(root, None, log)
    new, steps = tree(root / "b"), log.read_text().split("\n")
    # The first exchange is the check that there can be one.
    exchange = max(i for i, name in enumerate(steps) if name == EXCHANGE[1])
    kills = range(exchange - AROUND, min(len(steps), exchange + AROUND))
    counts = {False: 0, True: 0}
    for number, kill in enumerate(kills):
        restart(quantised, root)
        if not adding(root, kill):
            raise SystemExit(f"was not killed at step {kill} of {len(steps)}")
        found = tree(root / "b")
        if found not in (old, new):
            raise SystemExit(f"killed before step {kill} ({steps[kill]}): neither the old bundle nor the new one")
        counts[found == new] += 1
        if number % 5 == 0 or kill in (exchange, exchange + 1):
            adding(root, None)
            if tree(root / "b") != new:
                raise SystemExit(f"killed before step {kill} and run again: other bytes")
            if found != new and sorted(p.name for p in root.iterdir()) != ["b", "w"]:
                raise SystemExit(f"killed before step {kill} and run again: {sorted(root.iterdir())}")
    print(f"killed {len(kills)} times: old and new", counts[False], counts[True])


def restart(start: Path, root: Path):
    """Put everything back."""
    shutil.rmtree(root)
    shutil.copytree(start, root)


if __name__ == "__main__":
    main()
