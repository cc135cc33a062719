"""Makes what is not there yet of a generated model, under the user's cache: moepack's bundle, llama.cpp's file.

Both come from one checkpoint with random BF16 weights, which is removed: the bundle has experts and other matrices in
BF16 and in `w4`, the file has all matrices in Q4_0.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import EXAMPLES, build
from benchmarks.peers import environments
from benchmarks.peers.sides import PEER
from benchmarks.peers.worker import ROOT, PeerError, Worker
from moepack.pack.errors import InputError

from .shapes import COMMON, Shape

RECIPE = """
versions: [w4]
dense: [w4]
quantize: {method: rtn, group_size: 64, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""


def home(shape: Shape) -> Path:
    """Where a model is kept: by what it is made from."""
    made_from = json.dumps([shape.family, COMMON | shape.facts, RECIPE], sort_keys=True)
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:12]
    return environments.cache().parent / "contexts" / f"{shape.family}-{digest}"


def bundle_of(shape: Shape) -> Path:
    """Where its bundle is."""
    return home(shape) / "bundle"


def gguf_of(shape: Shape) -> Path:
    """Where its GGUF file is."""
    return home(shape) / "Q4_0.gguf"


def make(shape: Shape, llama: Worker | None) -> None:
    """Make both files from one checkpoint, unless they are there; `llama` is llama.cpp's process, if it can be had.

    Raises:
        PeerError: when the build or llama.cpp's converter fails.
    """
    wanted: dict[Path, Callable[[Path, Path], None]] = {bundle_of(shape): _bundle}
    if llama is not None:
        wanted[gguf_of(shape)] = lambda checkpoint, out: _gguf(llama, checkpoint, out)
    if all(out.exists() for out in wanted):
        return
    where = home(shape)
    print(f"making {where.name}", flush=True)
    aside = where / "making.partial"
    shutil.rmtree(where, ignore_errors=True)
    try:
        _checkpoint(shape, aside / "checkpoint")
        for out, write in wanted.items():
            write(aside / "checkpoint", aside / out.name)
            (aside / out.name).rename(out)
    except (InputError, OSError) as error:
        raise PeerError(f"{where.name}: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _checkpoint(shape: Shape, out: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.family, **(COMMON | shape.facts))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLES / "mini-qwen3-moe" / name, out)


def _bundle(checkpoint: Path, out: Path) -> None:
    build(checkpoint, out, RECIPE)


def _gguf(llama: Worker, checkpoint: Path, out: Path) -> None:
    whole = out.with_suffix(".bf16")
    source = environments.source(PEER)
    command = [sys.executable, "-m", "benchmarks.contexts.convert", str(source), str(checkpoint), str(whole)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"llama.cpp's converter: {environments.reason(done.stderr)}")
    llama.call("quantise_file", source=str(whole), out=str(out), encoding="Q4_0")
    whole.unlink()
