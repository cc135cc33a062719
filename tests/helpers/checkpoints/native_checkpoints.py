"""Tiny checkpoints in a released format, and what bundles of them compute."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiny_models
import torch
from released import same
from released_kinds import KINDS, Made
from safetensors.torch import load_file, save_file
from support import edit_config, load_for_logits
from torch import Tensor

from moepack.export import export_checkpoint

IDS = torch.arange(3, 43)[None]
Make = Callable[[np.random.Generator, int, int], Made]  # a random weight's tensors and value


def small(tokenizer: Path, path: Path, **more) -> Path:
    """Save a Qwen3-MoE of two layers of four experts in BF16."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 4096}
    return tiny_models.save_tiny("qwen3_moe", path, tokenizer, **sizes, **more)


def logits(bundle: Path, **options) -> Tensor:
    """The logits of IDS, in float32, of a bundle loaded with these options."""
    model = load_for_logits(bundle, **options)
    with model.moepack, torch.inference_mode():
        return model(IDS).logits.float()


def exported(bundle: Path, checkpoint: Path, out: Path) -> set[str]:
    """Export a bundle without its checkpoint at hand; the tensors that do not come back. All others have their bytes
    and their file."""
    hidden = checkpoint.rename(checkpoint.with_name("elsewhere"))
    report = export_checkpoint(bundle, out)
    before, after = stored(hidden), stored(out)
    assert all(after[n][0] == before[n][0] and same(after[n][1], before[n][1]) for n in after)
    assert report.left_out == tuple(sorted(before.keys() - after.keys()))
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (hidden, out))
    assert was == now
    hidden.rename(checkpoint)
    return set(report.left_out)


def stored(checkpoint: Path) -> dict[str, tuple[str, Tensor]]:
    """Every tensor of a checkpoint, with its file's name."""
    return {name: (file.name, t) for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}


def released(plain: Path, path: Path, kind: str, dense: Make | None = None) -> dict[str, Tensor]:
    """Save the model with its experts in a format, and with `dense` attention too; return all values in float32."""
    own, stored, values = KINDS[kind], dict[str, Tensor](), dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(load_file(plain / "model.safetensors").items()):
        make = own.make if ".experts." in name else dense if "_proj." in name else None
        if make is not None:
            made, value = make(np.random.default_rng(seed), *tensor.shape)
            stored |= {f"{name.removesuffix('.weight')}.{n}": t for n, t in made.items()}
            values[name] = torch.from_numpy(np.ascontiguousarray(value)).float()
        else:
            stored[name], values[name] = tensor, tensor.float()
    path.mkdir()
    (path / "config.json").write_bytes((plain / "config.json").read_bytes())
    edit_config(path, **own.config, quantization_config=own.quantization)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    for file in plain.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    return values
