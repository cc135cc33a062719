"""Kill a build at random moments, resume it, compare bytes: `python tests/helpers/kill_and_resume.py MODEL TEXT DIR`.

    --stages    it is calibrated first, in the same process, and built then
    --add       it is there, and versions are added, one of dense matrices, and another replaced
    --ray       on a Ray cluster of two workers, which is not the build's own
    --workers   with --ray: not the build is killed but those who make its batches

Builds run in forked children of a process that has made one itself, and so has imported and compiled everything: a
kill costs a second, and hits the build's own work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from support import tree

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child has none of its parent's threads
import torch

from moepack.pipeline.add import add
from moepack.pipeline.build import build, calibrate
from moepack.pipeline.recipe import parse_recipe

RECIPE = """
dense: [w8]
quantize: {method: gptq, group_size: 64, loss_tokens: 128}
calibration: {samples: 8, length: 128, batch_size: 8}
"""
ADDED = ("w8", "w4"), {"w4": 32}
DENSE = ("w4",)


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of this process's children."""

    address: str
    process: psutil.Process

    def making(self) -> list[psutil.Process]:
        """The workers that are making a batch."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (process.cmdline() or [""])[0].startswith("ray::make_piece"):
                    found.append(process)
        return found


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start one, and end its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A token of this cluster alone; and workers that a busy machine does not starve.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0"}
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2", f"--port={port}",
        "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats",
    ]  # fmt: skip
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.2)
        yield Cluster(f"127.0.0.1:{port}", psutil.Process(started.pid))
    finally:
        below = psutil.Process(started.pid).children(recursive=True)
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(timeout=20)
        for process in (psutil.Process(p.pid) for p in below if p.is_running()):
            process.kill()


def start(args: argparse.Namespace, bundle: Path, work: Path, on: Cluster | None) -> int:
    """Begin a build in a child; its process number."""
    child = os.fork()
    if child:
        return child
    try:
        recipe = parse_recipe(RECIPE, "test")
        engine, address = ("local", None) if on is None else ("ray", on.address)
        if args.add:
            add(bundle, work, *ADDED, engine=engine, address=address, dense=DENSE)
            os._exit(0)
        if args.stages:
            calibrate(args.model, work, recipe, [args.text])
        build(args.model, bundle, recipe, [args.text], work=work, engine=engine, address=address)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill_workers(child: int, on: Cluster, chance: random.Random, most: int, every: float) -> int:
    """Kill those who make a child's batches, at random moments until it ends; how many were."""
    kills = 0
    while kills < most and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(chance.uniform(0, every))
        if making := on.making():
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(making).kill()
                kills += 1
    return kills


def main() -> None:
    """Kill `--kills` times, over as many builds as that takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("stages", "add", "ray", "workers"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = args.directory / "before"
    build(args.model, before / "bundle", parse_recipe(RECIPE, "test"), [args.text], before / "work", keep=args.add)
    reference = before / "bundle"
    if args.add:
        reference = Path(shutil.copytree(before, args.directory / "reference")) / "bundle"
        add(reference, reference.with_name("work"), *ADDED, dense=DENSE)
    with cluster() if args.ray else contextlib.nullcontext() as on:
        kill(args, tree(reference), on, random.Random(args.seed))


def restart(args: argparse.Namespace, at: Path) -> tuple[Path, Path]:
    """Put back what is there before anything is killed; where the bundle and the work directory are."""
    shutil.rmtree(at, ignore_errors=True)
    if args.add:
        shutil.copytree(args.directory / "before", at)
    return at / "bundle", at / "work"


def kill(args: argparse.Namespace, expected: dict[str, bytes], on: Cluster | None, chance: random.Random) -> None:
    """See `main`."""
    for _ in range(2 if on else 1):  # a cluster's workers import everything at first
        whole_bundle, whole_work = restart(args, args.directory / "whole")
        began = time.monotonic()
        child = start(args, whole_bundle, whole_work, on)
        if os.waitpid(child, 0)[1] or tree(whole_bundle) != expected:
            raise SystemExit("the uninterrupted build failed, or has other bytes")
        whole = time.monotonic() - began
    bundle, work = restart(args, args.directory / "at")
    old = tree(bundle) if args.add else None
    kills = finished = 0
    while kills < args.kills or finished == 0:
        child = start(args, bundle, work, on)
        if kills < args.kills:
            if args.workers and on is not None:
                kills += kill_workers(child, on, chance, args.kills - kills, whole / 2)
            else:
                time.sleep(chance.uniform(0, (0.9 if args.stages or args.add or on else 0.6) * whole))
                os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        kills += killed
        if status and not killed:
            raise SystemExit(f"after {kills} kills the build failed")
        found = tree(bundle) if bundle.exists() else None
        if found != expected and (found != old or not killed):
            raise SystemExit(f"after {kills} kills the bundle has other bytes")
        left = {*bundle.parent.iterdir(), *(work / "objects").glob("*")} - {bundle, work}
        if left and not killed:
            raise SystemExit(f"after {kills} kills there is also {left.pop()}")
        if found == expected:
            finished += 1
            restart(args, bundle.parent)
        print(f"{kills} kills, {finished} builds finished, all with the same bytes", flush=True)


if __name__ == "__main__":
    main()
