"""Makes what is not there yet of a generated model, under the user's cache: the bundle, GGUF files, its skew.

Everything is written into a directory beside the model's and moves when it is whole; what a killed run left is removed
by the next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.common import Row
from benchmarks.peers import environments
from benchmarks.peers.worker import ROOT, PeerError

from .passes import SESSION
from .shapes import NAMES, Shape, text, word
from .weights import Weights, chosen

CACHES = (0.125, 0.25, 0.5)  # shares of a layer's experts that a cache of the last used holds
BUSIEST = 0.1
# lines of a file of prompts, and words of one
PROMPTS = 64
PROMPT = 512
# of a text whose skew is measured, and of those the first, which fill caches
TOKENS = 640
WARM = 64


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
    python = environments.environment(environments.LLAMA, environments.cache()) if missing else None
    if not bundle_of(shape).exists():
        from .bundle import write_bundle

        write_bundle(shape, bundle_of(shape))
    for mix in missing:
        print(f"writing {gguf_of(shape, mix).name}", flush=True)
        with _aside(where) as aside:
            command = [str(python), "-m", "benchmarks.limited.theirs", str(len(os.sched_getaffinity(0)))]
            command += ["write", shape.name, mix, str(aside / "gguf")]
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
            if done.returncode:
                raise PeerError(f"{gguf_of(shape, mix).name} cannot be written: status {done.returncode}")
            (aside / "gguf").rename(gguf_of(shape, mix))
    if not (where / "skew.json").exists():
        (where / "skew.json").write_text(json.dumps(skew(shape), indent=1) + "\n")
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


def skew(shape: Shape) -> Row:
    """How uneven a session's routing is, over layers' means: by each text, and over all of them one after another.

    Of embeddings alone: layers add little to them.
    """
    weights = Weights(shape)
    texts = [text(topic, TOKENS, SESSION) for topic in range(len(NAMES))]
    embedded = [weights.embedding(np.array(ids)) for ids in texts]
    layers = range(0, shape.layers, max(1, shape.layers // 8))
    routed = [[chosen(weights, layer, e)[0] for e in embedded] for layer in layers]
    out: Row = {"layers": list(layers)}
    for at, name in enumerate((*NAMES, "all")):
        mine = [np.concatenate(r) if name == "all" else r[at] for r in routed]
        out[f"busiest {BUSIEST:.0%}, {name}"] = float(np.mean([busiest(r, shape.experts) for r in mine]))
    for share in CACHES:
        hits = [lru_hits(np.concatenate(r), round(share * shape.experts)) for r in routed]
        out[f"LRU of {share:.1%} hits"] = float(np.mean(hits))
    return out


def busiest(experts: npt.NDArray[np.int64], count: int) -> float:
    """The share of tokens that the busiest tenth of `count` experts takes, of a routing [tokens, top_k]."""
    counts = np.sort(np.bincount(experts.ravel(), minlength=count))[::-1]
    return float(counts[: round(BUSIEST * count)].sum() / counts.sum())


def lru_hits(experts: npt.NDArray[np.int64], size: int) -> float:
    """How often an expert is among the `size` last used, of a routing [tokens, top_k], its first tokens left out."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for row in experts.tolist():
        hits.append([e in held for e in row])
        for e in row:
            held[e] = None
            held.move_to_end(e)
        while len(held) > size:
            held.popitem(last=False)
    return float(np.mean(hits[WARM:]))


if __name__ == "__main__":  # the skew of a shape that is not made
    from .shapes import SHAPES

    print(json.dumps(skew(SHAPES[sys.argv[1]]), indent=1))
