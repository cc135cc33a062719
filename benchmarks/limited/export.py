"""How long an export takes, against the time in which the disk writes the same bytes, and the memory that it takes.

    python -m benchmarks.limited.export [BUNDLE] [--to TARGET ...] [--bits N] [--work DIRECTORY]

Without a bundle that of a generated model is exported, of four layers of Qwen3-30B-A3B's shape, which is made first
where it is not there, in files of 500 MB: as many as a whole model has of 5 GB. Each export is a process of its own, in
which a dry run has imported what an export does. The disk writes files of the same sizes one after another, from one
buffer, and syncs each. Processor time is printed beside the clock's: on a shared machine they differ. Memory is the
process' own, and with the pages of the bundle's files, which the system takes back when it wants them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Target, arguments, finish

from .cage import anonymous, forget
from .make import bundle_of, make
from .shapes import SHAPES

BOUND = 1.5  # times the bare write
TARGETS = ("compressed-tensors", "gptq", "checkpoint")
BUFFER = bytes(range(256)) * (1 << 15)
COLUMNS = ("target", "GB", "s", "processor s", "bare write s", "times", "own GB", "peak GB")


def main() -> None:
    """Parse arguments, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("bundle", nargs="?", type=Path)
    parser.add_argument("--to", nargs="+", default=TARGETS, metavar="TARGET")
    parser.add_argument("--bits", default="4")
    parser.add_argument("--work", type=Path, help="where to write (default: beside the bundle)")
    args = parser.parse_args()
    shape = SHAPES["tiny" if args.quick else "four"]
    if args.bundle is None:
        make(shape, [], 10e9)
    bundle = args.bundle or bundle_of(shape)
    with tempfile.TemporaryDirectory(dir=args.work or bundle.parent) as work:
        rows = [measured(bundle, target, args.bits, Path(work)) for target in args.to]
    targets = [Target(f"{row['target']}: times the bare write", row["times"], BOUND, "lower") for row in rows]
    finish(f"exports of {bundle.parent.name} at {args.bits} bits", COLUMNS, rows, targets, args.json)


def measured(bundle: Path, target: str, bits: str, work: Path) -> dict[str, Any]:
    """One export, and a bare write of as many bytes."""
    forget(bundle.rglob("*.safetensors"))
    call = "import sys, benchmarks.limited.export as e; e.once(*sys.argv[1:])"
    command = [sys.executable, "-c", call, str(bundle), str(work / "out"), target, bits]
    row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    sizes = [path.stat().st_size for path in (work / "out").iterdir()]
    shutil.rmtree(work / "out")
    os.sync()
    bare = written(sizes, work)
    return {"target": target, "GB": sum(sizes) / 1e9, **row, "bare write s": bare, "times": row["s"] / bare}


def written(sizes: list[int], work: Path) -> float:
    """Seconds in which files of these sizes are on disk."""
    began = time.perf_counter()
    for i, size in enumerate(sizes):
        with (work / str(i)).open("wb", buffering=0) as file:
            for at in range(0, size, len(BUFFER)):
                file.write(BUFFER[: size - at])
            os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    for i in range(len(sizes)):
        (work / str(i)).unlink()
    return seconds


def once(bundle: str, out: str, target: str, bits: str) -> None:
    """Export in this process, and print what it took."""
    from moepack.export import Wanted, export

    wanted = Wanted(bits, shard="500MB")
    export(bundle, out, target, wanted, dry_run=True)
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    with sampled() as own:
        export(bundle, out, target, wanted)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peaks = {"own GB": max(own) / 1e9, "peak GB": after.ru_maxrss * 1024 / 1e9}
    print(json.dumps({"s": seconds, "processor s": busy, **peaks}))


@contextmanager
def sampled() -> Iterator[list[int]]:
    """Bytes of this process that are in memory and belong to no file, fifty times a second."""
    found = [anonymous(os.getpid())]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.02):
            found.append(anonymous(os.getpid()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
