"""A generated Qwen3-MoE of true layer shapes: as a checkpoint, as a bundle, as GGUF files, kept for later runs.

Weights are normally distributed and seeded; of a layer's experts only some are drawn, the others are copies in memory
and in files of their own, which costs nothing when they run and saves an hour of quantising.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.common import EXAMPLES

from .gguf_layout import MIXES
from .worker import PeerError, Worker

KINDS = 4


@dataclass(frozen=True, slots=True)
class Size:
    """What the model has; everything else is Qwen3-30B-A3B's."""

    layers: int = 4
    experts: int = 128
    vocabulary: int = 151_936

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"qwen3-moe-{self.layers}x{self.experts}-{self.vocabulary}"

    @property
    def weights(self) -> int:
        """Of experts, and of everything else, about."""
        return self.layers * (self.experts * 3 * 2048 * 768 + 19_000_000) + 2 * self.vocabulary * 2048


FULL, QUICK = Size(), Size(2, 16, 8192)


def save_checkpoint(path: Path, size: Size) -> None:
    """A shard a layer, and one of the rest."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=size.vocabulary, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=size.layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=size.experts, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=4096,
        tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # type: ignore[call-arg]  # fmt: skip
    config.save_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def save(tensors: dict[str, torch.Tensor]) -> None:
        file = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(tensors, path / file, {"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    for i in range(size.layers):
        at, made = f"model.layers.{i}.", {}
        for name, rows, cols in (("q", 4096, 2048), ("k", 512, 2048), ("v", 512, 2048), ("o", 2048, 4096)):
            made[f"{at}self_attn.{name}_proj.weight"] = drawn(rows, cols)
        made |= {f"{at}self_attn.{n}_norm.weight": ones(128) for n in ("q", "k")}
        made |= {f"{at}{n}_layernorm.weight": ones(2048) for n in ("input", "post_attention")}
        made[f"{at}mlp.gate.weight"] = drawn(size.experts, 2048)
        for name, rows, cols in (("gate", 768, 2048), ("up", 768, 2048), ("down", 2048, 768)):
            kinds = [drawn(rows, cols) for _ in range(min(KINDS, size.experts))]
            for e in range(size.experts):
                made[f"{at}mlp.experts.{e}.{name}_proj.weight"] = kinds[e % KINDS].clone()
        save(made)
    save(
        {
            "model.embed_tokens.weight": drawn(size.vocabulary, 2048),
            "lm_head.weight": drawn(size.vocabulary, 2048),
            "model.norm.weight": ones(2048),
        }
    )
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLES / "mini-qwen3-moe" / name, path / name)


def recipe(group_size: int) -> str:
    """What the bundle is built by: rounded to nearest, which has the same bytes as any method and takes minutes."""
    return f"""versions: [bf16, w4, w2]
quantize: {{method: rtn, group_size: {group_size}, loss_tokens: 256}}
calibration: {{samples: 4, length: 128, batch_size: 4}}
dense: [w8, w4]
"""


def _save(path: str, size: Size) -> None:
    save_checkpoint(Path(path), size)


def _build(checkpoint: str, bundle: str, text: str) -> None:
    from moepack.pipeline.build import build
    from moepack.pipeline.recipe import parse_recipe

    build(checkpoint, bundle, parse_recipe(text, "benchmark"), [EXAMPLES / "text" / "calibration.jsonl"])


def prepare(root: Path, size: Size, group_size: int, mixes: tuple[str, ...], llama: Worker | None) -> tuple[Path, Path]:
    """Make what is not there yet; returns the bundle's directory, and that of the GGUF files (`gguf_file`).

    Raises:
        PeerError: when the disk has no room.
    """
    text = recipe(group_size)
    home = root / size.name
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    bundle, checkpoint = home / f"bundle-{digest}", home / "checkpoint"
    missing = [mix for mix in mixes if llama is not None and not gguf_file(home, mix).exists()]
    if bundle.is_dir() and not missing:
        return bundle, home
    home.mkdir(parents=True, exist_ok=True)
    needed, free = 8 * size.weights, shutil.disk_usage(home).free
    if free < needed:
        raise PeerError(f"{home}: {needed / 1e9:.0f} GB are needed there while files are made, {free / 1e9:.0f} free")
    print(f"generating {size.name} in {home}", flush=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir()
    _elsewhere(_save, str(checkpoint), size)
    if not bundle.is_dir():
        for old in home.glob("bundle-*"):
            shutil.rmtree(old)
        _elsewhere(_build, str(checkpoint), str(bundle), text)
    for mix in missing:
        assert llama is not None
        llama.call("write_gguf", checkpoint=str(checkpoint), out=str(gguf_file(home, mix)), mix=mix, kinds=KINDS)
    shutil.rmtree(checkpoint)
    return bundle, home


def gguf_file(home: Path, mix: str) -> Path:
    """Where a mix is."""
    assert mix in MIXES
    return home / f"{mix.replace(' ', '-')}.gguf"


def _elsewhere(task: Callable[..., None], *arguments: object) -> None:
    """In a process that takes its memory with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(task, *arguments).result()
