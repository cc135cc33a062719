"""Checkpoints as they were released, from build to logits: every format, on a model of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from released import same
from released_kinds import KINDS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import moepack
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.stream import StreamedModel
from moepack.export import export_checkpoint
from moepack.pack.errors import TargetError
from moepack.pack.reader import open_bundle
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.verify import verify

RECIPE = """
versions: [native, w2]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""
IDS = torch.arange(3, 43)[None]
# Without: those whose scale is for a whole row of integers.
SERVED = [kind for kind, k in KINDS.items() if k.group or not k.version.startswith("int")]


@pytest.fixture(scope="module")
def plain(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"num_experts": 4, "moe_intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 4096}
    path = tiny_models.save_tiny("qwen3_moe", tmp_path_factory.mktemp("plain"), **small)
    tiny_models.copy_tokenizer(demo_model, path)
    return path


def released(plain: Path, path: Path, kind: str) -> dict[str, Tensor]:
    """Save the model with its experts in a format; return every tensor's values, exact in float32."""
    own, stored, values = KINDS[kind], dict[str, Tensor](), dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(load_file(plain / "model.safetensors").items()):
        if ".experts." in name:
            made, value = own.make(np.random.default_rng(seed), *tensor.shape)
            stored |= {f"{name.removesuffix('.weight')}.{n}": t for n, t in made.items()}
            values[name] = torch.from_numpy(np.ascontiguousarray(value)).float()
        else:
            stored[name], values[name] = tensor, tensor.float()
    config = json.loads((plain / "config.json").read_text())
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, **own.config, "quantization_config": own.quantization}))
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    for file in plain.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    return values


def logits(bundle: Path, **options: Any) -> Tensor:
    model = moepack.load(bundle, **options)
    try:
        with torch.inference_mode():
            return model(IDS).logits.float()
    finally:
        model.moepack.close()


@pytest.mark.numeric
@pytest.mark.parametrize("kind", SERVED)
def test_from_checkpoint_to_logits(kind: str, plain: Path, text: Path, tmp_path: Path) -> None:
    """The bundle's codes are the checkpoint's, w2 is made from their values, and it computes what they compute."""
    values = released(plain, tmp_path / "checkpoint", kind)
    build(tmp_path / "checkpoint", tmp_path / "bundle", parse_recipe(RECIPE, "native"), [text])
    bundle = open_bundle(tmp_path / "bundle")
    native = bundle.versions[0]
    assert native == StreamedModel(open_checkpoint(tmp_path / "checkpoint")).native and native.released
    assert bundle.manifest.format_version == 4 and verify(tmp_path / "bundle", tmp_path / "checkpoint") == []
    for expert in range(4):
        names = [f"model.layers.1.mlp.experts.{expert}.{m}_proj.weight" for m in ("gate", "up", "down")]
        gate, up, down = (values[n].numpy() for n in names)
        decoded = bundle.expert(native.name, 1, expert).decode()
        for ours, want in zip(map(native.dequantise, decoded), (np.concatenate([gate, up]), down), strict=True):
            assert np.allclose(ours, want, rtol=2**-23, atol=0), "an outer scale may be multiplied in another order"
    exact = tmp_path / "exact"
    exact.mkdir()
    (exact / "config.json").write_bytes((plain / "config.json").read_bytes())
    save_file(values, exact / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)(IDS).logits
    got = logits(tmp_path / "bundle", policy=f"static:{native.name}", dtype=torch.float32)
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert float((logits(tmp_path / "bundle", policy="static:w2") - want).norm() / want.norm()) > 0.01


@pytest.mark.parametrize("kind", SERVED)
def test_the_checkpoint_comes_back(kind: str, plain: Path, text: Path, tmp_path: Path) -> None:
    """Every tensor that the checkpoint had, byte for byte, from the bundle alone."""
    released(plain, tmp_path / "checkpoint", kind)
    build(tmp_path / "checkpoint", tmp_path / "bundle", parse_recipe(RECIPE, "native"), [text])
    before = load_file(tmp_path / "checkpoint" / "model.safetensors")
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    made = export_checkpoint(tmp_path / "bundle", tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert made.left_out == () and set(after) == set(before)
    assert all(same(after[name], tensor) for name, tensor in before.items())
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"] == KINDS[kind].quantization
    assert StreamedModel(open_checkpoint(tmp_path / "again")).native == open_bundle(tmp_path / "bundle").versions[0]
    with pytest.raises(TargetError, match="again: exists and is not empty"):
        export_checkpoint(tmp_path / "bundle", tmp_path / "again")
