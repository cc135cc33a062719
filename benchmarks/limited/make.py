"""Makes what is not there yet of a generated model, under the user's cache: the bundle, GGUF files, prompts.

Everything is written into a directory beside the model's and moves when it is whole; what a killed run left is removed
by the next.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers import environments
from benchmarks.peers.worker import ROOT, PeerError

from .shapes import NAMES, SESSION, Shape, text, word

# lines of a file of prompts, and words of one
PROMPTS = 64
PROMPT = 512


def home(shape: Shape) -> Path:
    """Where a model is kept."""
    return environments.cache().parent / "limited" / shape.name


def bundle_of(shape: Shape) -> Path:
    """Where its bundle is."""
    return home(shape) / "bundle"


def gguf_of(shape: Shape, mix: str) -> Path:
    """Where its GGUF file of a mix is."""
    return home(shape) / f"{mix}.gguf"


def make(shape: Shape, mixes: Sequence[str], most: float) -> None:
    """Make what is missing.

    Args:
        shape: of the model.
        mixes: of GGUF files; none without llama.cpp.
        most: bytes that all files of the model may take.

    Raises:
        PeerError: when there is no room, or llama.cpp cannot be had.
    """
    where = home(shape)
    where.mkdir(parents=True, exist_ok=True)
    missing = [mix for mix in mixes if not gguf_of(shape, mix).exists()]
    needs = [shape.bundle_bytes] * (not bundle_of(shape).exists()) + [shape.gguf_bytes(mix) for mix in missing]
    _check_room(where, sum(needs), most)
    python = environments.environment(environments.LLAMA) if missing else None
    if not bundle_of(shape).exists():
        from .bundle import write_bundle

        write_bundle(shape, bundle_of(shape))
    for mix in missing:
        print(f"writing {gguf_of(shape, mix).name}", flush=True)
        with _aside(where) as aside:
            command = [str(python), "-m", "benchmarks.limited.theirs", str(len(os.sched_getaffinity(0)))]
            command += [shape.name, mix, str(aside / "gguf")]
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
            if done.returncode:
                raise PeerError(f"{gguf_of(shape, mix).name} cannot be written: status {done.returncode}")
            (aside / "gguf").rename(gguf_of(shape, mix))
    for topic, name in enumerate(NAMES):  # prompts for a server: `python -m benchmarks.serve --data`
        lines = [" ".join(map(word, text(topic, PROMPT, SESSION + i))) for i in range(PROMPTS)]
        (where / f"{name}.txt").write_text("\n".join(lines) + "\n")


def _check_room(where: Path, needed: float, most: float) -> None:
    free = shutil.disk_usage(where).free
    held = sum(p.stat().st_size for p in where.rglob("*") if p.is_file())
    if needed + held > most:
        raise PeerError(f"{where}: would take {(needed + held) / 1e9:.1f} GB, and {most / 1e9:.0f} are allowed: --disk")
    if needed > free - 1e9:
        raise PeerError(f"{where}: {needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} are free")


@contextmanager
def _aside(where: Path) -> Iterator[Path]:
    aside = where / "making.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
