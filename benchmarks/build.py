"""A build's memory and time. Each build runs in a process of its own.

    python -m benchmarks.build              does memory grow with depth?
    python -m benchmarks.build --bounded    a layer of large models' shapes, the shipped recipes' tokens: peak and time
    python -m benchmarks.build --estimates  three sizes: what the dry run says of time, memory and disk, and what it was

The first builds two generated checkpoints with equal layers, 4 and 24 of them, rounded to nearest (a quantiser's own
memory does not depend on depth). The second gives each build the shipped recipe's tokens, versions and method in a
`--memory`, on text of random words. It ends once some experts are made, as a batch takes what another does: all of
Mixtral's would take hours, and so would calibrating all of DeepSeek-V3's layer, 22.5 GB, on its recipe's 2,097,152
tokens. So it stands there twice: with four of its 256 experts, where an eighth of these tokens are sent to one expert
each, so that an expert sees as many as one of 256 does; and with all of them, on a 32nd of the tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.common import EXAMPLES, Target, arguments, finish
from moepack.progress import Reporter

if TYPE_CHECKING:
    from moepack.pipeline.dryrun.estimate import Estimate

T = TypeVar("T")

_ROUNDED = "quantize: {method: rtn, loss_tokens: 256}\ncalibration: {samples: 32, length: 256}"
_QUICK = _ROUNDED.replace("samples: 32", "samples: 8")


def generate(path: Path, layers: int, hidden: int, experts: int, expert_size: int, top_k: int = 4) -> int:
    """Save a random Qwen3-MoE checkpoint, a GiB at a time; returns the bytes of one layer."""
    import torch
    from safetensors.torch import save_file
    from torch import Tensor
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=expert_size,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8,
        num_experts=experts, num_experts_per_tok=top_k, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # type: ignore[call-arg]  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    layer: int = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    path.mkdir(parents=True)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(path)
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []

    def write() -> None:
        save_file(shard, path / f"model-{len(shards):05d}.safetensors", {"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, shape in _tensors(model):
        shard[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
        if sum(t.nbytes for t in shard.values()) >= 1 << 30:
            write()
    if shard:
        write()
    index = {name: f"model-{i:05d}.safetensors" for i, names in enumerate(shards) for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((EXAMPLES / "mini-qwen3-moe" / name).read_bytes())
    return layer


def _tensors(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a Qwen3-MoE model's checkpoint, in which every expert has tensors of its own."""
    for name, p in model.named_parameters():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            yield name, tuple(p.shape)
            continue
        module, _, kind = name.rpartition(".")
        experts, rows, cols = p.shape
        for e in range(experts):
            for part in ("gate", "up") if kind == "gate_up_proj" else ("down",):
                yield f"{module}.{e}.{part}_proj.weight", (rows // 2 if part != "down" else rows, cols)


def _build(checkpoint: str, bundle: str, text: str, recipe: str) -> tuple[int, float]:
    """Build, and say this process's peak memory in bytes and the seconds, what it imports among them."""
    from moepack.memory import peak_memory
    from moepack.pipeline.build import build
    from moepack.pipeline.recipe import parse_recipe

    began = time.monotonic()
    build(checkpoint, bundle, parse_recipe(recipe, "benchmark"), [text])
    return peak_memory(), time.monotonic() - began


class Enough(Exception):
    """As many experts are made as were wanted."""


class Some(Reporter):
    """Ends a build once some experts are made; knows when the first was begun, and how many a batch has."""

    def __init__(self, most: int) -> None:
        self.began, self._made, self._batches, self._most, self._counts = 0.0, 0, 0, most, False

    def inner(self, name: str, total: int) -> None:
        """Take note of when a layer's experts are begun."""
        self._counts = name == "experts"
        if self._counts:
            self.began = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        """Count experts, and end the build once there are enough.

        Raises:
            Enough: then.
        """
        self._made += amount * self._counts
        self._batches += self._counts and amount > 0
        if self._made >= self._most:
            raise Enough

    def made(self, work: Path) -> int:
        """Experts of the batches in a work directory: those that were being made beside the last one are among them."""
        return len(list((work / "objects").glob("*.safetensors"))) * self._made // self._batches


@dataclass(frozen=True)
class Bounded:
    """A build in a bound: its peak memory in bytes, and seconds until the layer's experts were begun, and on them."""

    peak: int
    calibrate: float
    quantise: float
    experts: int


def _build_bounded(
    checkpoint: str, bundle: str, text: str, name: str, windows: int, length: int, memory: int, most: int
) -> Bounded:
    """Build in so many bytes by a shipped recipe, with so many windows, until `most` experts are made."""
    from moepack.memory import peak_memory
    from moepack.pipeline.build import build
    from moepack.pipeline.recipe import load_recipe

    recipe, reporter, work = load_recipe(name), Some(most), Path(f"{bundle}.work")
    recipe = replace(recipe, calibration=replace(recipe.calibration, samples=windows, length=length))
    began = time.monotonic()
    with contextlib.suppress(Enough):
        build(checkpoint, bundle, recipe, [text], work, memory=memory, reporter=reporter)
    ended = time.monotonic()
    return Bounded(peak_memory(), reporter.began - began, ended - reporter.began, reporter.made(work))


def words(path: Path, tokens: int) -> str:
    """Write documents of random words, of so many tokens and more."""
    rng = random.Random(0)
    known = (EXAMPLES / "text" / "calibration.jsonl").read_text().split()
    with path.open("w") as file:
        for _ in range(-(-tokens // 500)):
            file.write(json.dumps({"text": " ".join(rng.choices(known, k=500))}) + "\n")
    return str(path)


def _estimate(checkpoint: str, bundle: str, text: str, recipe: str) -> Estimate:
    """What the dry run says of the same build."""
    from moepack.pipeline.dryrun.estimate import estimate
    from moepack.pipeline.recipe import parse_recipe

    return estimate(checkpoint, bundle, parse_recipe(recipe, "benchmark"), [text])


def apart(task: Callable[..., T], *values: Any) -> T:
    """What `task` returns in a fresh process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(task, *values).result()


def run(task: Callable[..., T], checkpoint: Path, bundle: Path, recipe: str) -> T:
    """What `task` returns, given these and the examples' text, in a fresh process of its own."""
    return apart(task, str(checkpoint), str(bundle), str(EXAMPLES / "text" / "calibration.jsonl"), recipe)


@dataclass(frozen=True)
class Shape:
    """A layer to be generated, the recipe for it and its windows, the memory that the build is given, and how many
    experts are to be made."""

    name: str
    recipe: str
    hidden: int
    experts: int
    expert_size: int
    top_k: int
    bound: int
    made: int
    windows: int


SHAPES = (
    Shape("Qwen3-30B-A3B", "qwen3-30b-a3b", 2048, 128, 768, 8, 9 << 30, 40, 512),
    Shape("Mixtral-8x7B", "mixtral-8x7b", 4096, 8, 14336, 2, 18 << 30, 1, 128),
    Shape("DeepSeek-V3, 4 of 256 experts", "deepseek-v3", 7168, 4, 2048, 1, 5 << 30, 2, 128),
    Shape("DeepSeek-V3, all experts", "deepseek-v3", 7168, 256, 2048, 8, 9 << 30, 2, 32),
)
# The same by a 16th of the hidden size and an eighth of the experts', in what the process itself takes and little more.
SMALL = (
    Shape("Qwen3-30B-A3B, small", "qwen3-30b-a3b", 128, 128, 96, 8, 2200 << 20, 32, 8),
    Shape("Mixtral-8x7B, small", "mixtral-8x7b", 256, 8, 1792, 2, 2200 << 20, 2, 8),
    Shape("DeepSeek-V3, small", "deepseek-v3", 448, 4, 256, 1, 2200 << 20, 2, 8),
)


def bounded(shapes: Sequence[Shape], length: int, out: Path | None) -> None:
    """One layer of each shape, in a bound, on windows of `length` tokens."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        tokens = shape.windows * length
        with tempfile.TemporaryDirectory() as work:
            checkpoint, bundle = Path(work) / "checkpoint", Path(work) / "bundle"
            layer = generate(checkpoint, 1, shape.hidden, shape.experts, shape.expert_size, shape.top_k)
            text = words(Path(work) / "text.jsonl", tokens)
            made = apart(
                _build_bounded, str(checkpoint), str(bundle), text, shape.recipe, shape.windows, length, shape.bound,
                shape.made,
            )  # fmt: skip
        rows.append(
            {
                "layer": shape.name, "tokens": tokens, "layer MiB": layer / 2**20, "peak MiB": made.peak / 2**20,
                "bound MiB": shape.bound / 2**20, "calibrate s": made.calibrate, "experts made": made.experts,
                "of": shape.experts, "quantise s": made.quantise,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    targets = [Target(f"peak over bound, {r['layer']}", r["peak MiB"] / r["bound MiB"], 1, "lower") for r in rows]
    finish("builds in a bound, by the shipped recipes", list(rows[0]), rows, targets, out)


class _Disk:
    """The most bytes that lay in a folder, a file of several names counted once, looked at 200 times a second."""

    def __init__(self, folder: Path) -> None:
        self.most, self._folder, self._stop = 0, folder, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Disk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            sizes = {}
            for folder, _, names in os.walk(self._folder):
                for name in names:
                    with contextlib.suppress(OSError):  # it has gone since it was listed
                        found = (Path(folder) / name).lstat()
                        sizes[found.st_ino] = found.st_size
            self.most = max(self.most, sum(sizes.values()))


def estimates(sizes: Sequence[int], method: str, out: Path | None) -> None:
    """What the dry run says beside what the build takes, for layers of these hidden sizes."""
    recipe = f"quantize: {{method: {method}}}\ncalibration: {{samples: 32, length: 512, batch_size: 8}}"
    rows: list[dict[str, Any]] = []
    for hidden in sizes:
        with tempfile.TemporaryDirectory() as work:
            checkpoint, made = Path(work) / "checkpoint", Path(work) / "made"
            generate(checkpoint, 3, hidden, 16, hidden // 2)
            made.mkdir()
            said = run(_estimate, checkpoint, made / "bundle", recipe)
            with _Disk(made) as disk:
                peak, seconds = run(_build, checkpoint, made / "bundle", recipe)
        bundle = sum(said.versions.values()) + sum(said.dense_versions.values()) + said.dense_bytes
        rows.append(
            {
                "hidden": hidden,
                "seconds": seconds, "said, s": sum(said.seconds.values()),
                "peak MiB": peak / 2**20, "said, MiB": sum(said.memory.values()) / 2**20,
                "disk MiB": disk.most / 2**20, "said, disk": (bundle + said.work_bytes) / 2**20,
            }
        )  # fmt: skip
    targets = []
    for name, took, foretold in (
        ("time", "seconds", "said, s"), ("memory", "peak MiB", "said, MiB"), ("disk", "disk MiB", "said, disk"),
    ):  # fmt: skip
        for r in rows:
            off = max(r[took] / r[foretold], r[foretold] / r[took])
            targets.append(Target(f"{name}, hidden {r['hidden']}, estimate off by a factor of", off, 1.25, "lower"))
    finish(f"the dry run and the build, by {method}", list(rows[0]), rows, targets, out)


def main() -> None:
    """Generate, build, print."""
    parser = arguments(__doc__)
    parser.add_argument("--bounded", action="store_true", help="one layer of large models' shapes")
    parser.add_argument("--estimates", action="store_true", help="what the dry run says, at three sizes")
    parser.add_argument("--method", default="gptq", help="of --estimates: the quantiser")
    parser.add_argument("--shape", default="", help="of --bounded: only shapes with this in their name")
    args = parser.parse_args()
    if args.bounded:
        shapes = [shape for shape in (SMALL if args.quick else SHAPES) if args.shape in shape.name]
        bounded(shapes, 256 if args.quick else 2048, args.json)
        return
    if args.estimates:
        estimates((64, 128, 256) if args.quick else (256, 512, 1024), args.method, args.json)
        return
    hidden, experts, size = (256, 16, 128) if args.quick else (512, 32, 512)
    rows: list[dict[str, Any]] = []
    for layers in (4, 24):
        with tempfile.TemporaryDirectory() as work:
            checkpoint = Path(work) / "checkpoint"
            layer = generate(checkpoint, layers, hidden, experts, size)
            total = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
            peak, seconds = run(_build, checkpoint, Path(work) / "bundle", _QUICK if args.quick else _ROUNDED)
        sizes = {"checkpoint MiB": total, "layer MiB": layer, "peak MiB": peak}
        rows.append({"layers": layers, **{k: v / 2**20 for k, v in sizes.items()}, "seconds": seconds})
    growth = rows[1]["peak MiB"] / rows[0]["peak MiB"]
    targets = [Target("peak memory, 24 layers over 4", growth, 1.15, "lower")]
    finish("memory of a build and depth", list(rows[0]), rows, targets, args.json)


if __name__ == "__main__":
    main()
