"""A build's memory and time. Each build runs in a process of its own.

    python -m benchmarks.build              does memory grow with depth?
    python -m benchmarks.build --true-size  two layers of Qwen3-30B-A3B's shape: memory by part, time for 48 layers

The first builds two generated checkpoints with equal layers, 4 and 24 of them, rounded to nearest (a quantiser's own
memory does not depend on depth). The second makes every width of 256 experts (2048, 768) by GPTQ, and compares peak
memory with what must be there and with the dry run's estimate; it takes tens of minutes on two cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.common import Target, arguments, finish
from moepack.reports.inspect import inspect

if TYPE_CHECKING:
    from moepack.pipeline.estimate import Estimate

T = TypeVar("T")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_ROUNDED = "quantize: {method: rtn, loss_tokens: 256}\ncalibration: {samples: 32, length: 256}"
_QUICK = _ROUNDED.replace("samples: 32", "samples: 8")
_SAMPLES, _LENGTH = 32, 512
# A quarter of the tokens otherwise asked before an expert's method is trusted: real calibrations have ten times more.
_FULL = f"quantize: {{min_tokens: 512}}\ncalibration: {{samples: {_SAMPLES}, length: {_LENGTH}, batch_size: 8}}"


def generate(path: Path, layers: int, hidden: int, experts: int, expert_size: int, top_k: int = 4) -> int:
    """Save a random Qwen3-MoE checkpoint, a shard a layer or so; returns the bytes of one layer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=expert_size,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8,
        num_experts=experts, num_experts_per_tok=top_k, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # type: ignore[call-arg]  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02)
    layer: int = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    model.save_pretrained(path, max_shard_size=layer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((EXAMPLES / "mini-qwen3-moe" / name).read_bytes())
    return layer


def _build(checkpoint: str, bundle: str, text: str, recipe: str) -> int:
    """Build, and say this process's peak memory in bytes."""
    from moepack.memory import peak_memory
    from moepack.pipeline.build import build
    from moepack.pipeline.recipe import parse_recipe

    build(checkpoint, bundle, parse_recipe(recipe, "benchmark"), [text])
    return peak_memory()


def _estimate(checkpoint: str, bundle: str, text: str, recipe: str) -> Estimate:
    """What the dry run says of the same build."""
    from moepack.pipeline.estimate import estimate
    from moepack.pipeline.recipe import parse_recipe

    return estimate(checkpoint, bundle, parse_recipe(recipe, "benchmark"), [text])


def run(task: Callable[[str, str, str, str], T], checkpoint: Path, bundle: Path, recipe: str) -> tuple[T, float]:
    """What `task` returns in a fresh process of its own, and its seconds."""
    text = str(EXAMPLES / "text" / "calibration.jsonl")
    began = time.monotonic()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        result = process.submit(task, str(checkpoint), str(bundle), text, recipe).result()
    return result, time.monotonic() - began


def true_size(out: Path | None) -> None:
    """Two layers of Qwen3-30B-A3B's shape."""
    hidden, experts, size = 2048, 128, 768
    with tempfile.TemporaryDirectory() as work:
        checkpoint = Path(work) / "checkpoint"
        layer = generate(checkpoint, 2, hidden, experts, size, top_k=8)
        expected, _ = run(_estimate, checkpoint, Path(work) / "bundle", _FULL)
        peak, seconds = run(_build, checkpoint, Path(work) / "bundle", _FULL)
        inspected = inspect(Path(work) / "bundle")
    tokens = _SAMPLES * _LENGTH
    parts = {
        "one layer in BF16": layer,
        "its second moments": 4 * experts * (hidden**2 + size**2),
        "activations of the calibration set": 2 * tokens * hidden * 2,
    }
    floor, estimated = sum(parts.values()), sum(expected.memory.values())
    guessed = sum(expected.seconds.values())
    rows = [{"what": name, "MiB": value / 2**20} for name, value in parts.items()]
    rows += [{"what": "all three", "MiB": floor / 2**20}, {"what": "peak of the build", "MiB": peak / 2**20}]
    rows += [{"what": f"estimated: {name}", "MiB": value / 2**20} for name, value in expected.memory.items()]
    rows += [{"what": "estimated peak", "MiB": estimated / 2**20}]
    rows += [{"what": "time of the build", "seconds": seconds}, {"what": "estimated time", "seconds": guessed}]
    rows += [{"what": "projected time of 48 such layers", "seconds": seconds * 24}]
    exact = all(inspected["versions"][v]["bytes"] == b for v, b in expected.versions.items())
    targets = [
        Target("peak memory over layer, moments and activations", peak / floor, 1.3, "lower"),
        Target("versions whose bytes the dry run did not foretell", float(not exact), 0, "lower"),
        Target("peak memory, estimate off by a factor of", max(peak / estimated, estimated / peak), 2, "lower"),
        Target("time, estimate off by a factor of", max(seconds / guessed, guessed / seconds), 2, "lower"),
    ]
    finish("two layers of Qwen3-30B-A3B's shape, every width", ["what", "MiB", "seconds"], rows, targets, out)


def main() -> None:
    """Generate, build, print."""
    parser = arguments(__doc__)
    parser.add_argument("--true-size", action="store_true", help="two layers of Qwen3-30B-A3B's shape")
    args = parser.parse_args()
    if args.true_size:
        true_size(args.json)
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
