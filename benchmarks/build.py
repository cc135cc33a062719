"""Does a build's memory grow with the model's depth? Two generated checkpoints with equal layers, 4 and 24 of them.

    python -m benchmarks.build

Each is built in a process of its own, rounded to nearest (a quantiser's own memory does not depend on depth); the table
shows each process's peak resident memory beside what one layer takes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Target, arguments, finish

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_BUILD = """
import sys
from moepack.pipeline import build
from moepack.memory import peak_memory
from moepack.recipe import parse_recipe
recipe = parse_recipe("quantize: {method: rtn, loss_tokens: 256}\\ncalibration: {samples: 32, length: 256}", "b")
build(sys.argv[1], sys.argv[2], recipe, [sys.argv[3]])
print(peak_memory())
"""


def generate(path: Path, layers: int, hidden: int, experts: int, expert_size: int) -> int:
    """Save a random Qwen3-MoE checkpoint, a shard a layer or so; returns the bytes of one layer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=expert_size,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8,
        num_experts=experts, num_experts_per_tok=4, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02)
    layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    model.save_pretrained(path, max_shard_size=layer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((EXAMPLES / "mini-qwen3-moe" / name).read_bytes())
    return layer


def main() -> None:
    """Generate, build, print."""
    args = arguments(__doc__).parse_args()
    hidden, experts, size = (256, 16, 128) if args.quick else (512, 32, 512)
    rows: list[dict[str, Any]] = []
    for layers in (4, 24):
        with tempfile.TemporaryDirectory() as work:
            checkpoint = Path(work) / "checkpoint"
            layer = generate(checkpoint, layers, hidden, experts, size)
            total = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
            text = str(EXAMPLES / "text" / "calibration.jsonl")
            command = [sys.executable, "-c", _BUILD, str(checkpoint), f"{work}/bundle", text]
            began = time.monotonic()
            out = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds = time.monotonic() - began
        sizes = {"checkpoint MiB": total, "layer MiB": layer, "peak MiB": int(out.stdout.split()[-1])}
        rows.append({"layers": layers, **{k: v / 2**20 for k, v in sizes.items()}, "seconds": seconds})
    growth = rows[1]["peak MiB"] / rows[0]["peak MiB"]
    targets = [Target("peak memory, 24 layers over 4", growth, 1.15, "lower")]
    finish("memory of a build and depth", list(rows[0]), rows, targets, args.json)


if __name__ == "__main__":
    main()
