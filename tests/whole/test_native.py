"""Checkpoints as they were released, from build to logits: every format, on a model of a few kilobytes."""

from __future__ import annotations

import contextlib
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
from support import spy, tree
from torch import Tensor
from transformers import AutoModelForCausalLM

import moepack
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.released.announced import announced_version
from moepack.calibrate.stream import StreamedModel
from moepack.export import export_checkpoint
from moepack.export.filled import FilledFile
from moepack.pack.encodings.released import Fp8
from moepack.pack.errors import InputError, TargetError
from moepack.pack.reader import open_bundle
from moepack.pipeline.add import add
from moepack.pipeline.build import build
from moepack.pipeline.estimate import estimate
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.shrink import shrink
from moepack.progress import Reporter
from moepack.reports.evaluate import evaluate
from moepack.reports.verify import verify
from moepack.runtime.planning.options import LoadOptions

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
    check_export(tmp_path, kind)


def check_export(folder: Path, kind: str) -> None:
    """Every tensor that the checkpoint had comes back, byte for byte, from the bundle alone."""
    before = load_file(folder / "checkpoint" / "model.safetensors")
    (folder / "checkpoint").rename(folder / "elsewhere")
    made = export_checkpoint(folder / "bundle", folder / "again")
    after = load_file(folder / "again" / "model.safetensors")
    assert made.left_out == () and set(after) == set(before)
    assert all(same(after[name], tensor) for name, tensor in before.items())
    config = json.loads((folder / "again" / "config.json").read_text())
    assert config["quantization_config"] == KINDS[kind].quantization
    assert StreamedModel(open_checkpoint(folder / "again")).native == open_bundle(folder / "bundle").versions[0]
    with pytest.raises(TargetError, match="again: is not empty"):
        export_checkpoint(folder / "bundle", folder / "again")


@pytest.mark.parametrize("kind", SERVED)
def test_the_configuration_alone_tells_the_version(kind: str, plain: Path, tmp_path: Path) -> None:
    """But for the dtype of GPTQ's and AWQ's scales, and formats that only tensors tell apart."""
    released(plain, tmp_path / "checkpoint", kind)
    native = StreamedModel(open_checkpoint(tmp_path / "checkpoint")).native
    told = announced_version(kind, json.loads((tmp_path / "checkpoint" / "config.json").read_text()))
    assert (told.name.removesuffix("fp16"), told.group_size) == (native.name.removesuffix("fp16"), native.group_size)


def test_a_build_names_versions_that_are_never_chosen(plain: Path, text: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    class Kept(Reporter):
        def note(self, text: str) -> None:
            lines.append(text)

    released(plain, tmp_path / "checkpoint", "deepseek mxfp4")
    recipe = parse_recipe(RECIPE.replace("w2", "w4, w2"), "native")
    build(tmp_path / "checkpoint", tmp_path / "bundle", recipe, [text], reporter=Kept())
    (line,) = [line for line in lines if line.startswith("w4 ")]
    assert "is never chosen: mxfp4, which is more precise, takes" in line, "both fill two pages"


def test_versions_beside_a_released_one(plain: Path, text: Path, tmp_path: Path) -> None:
    """Added versions are those of one build; what takes more bits than the checkpoint, or holds it too, is refused."""
    released(plain, tmp_path / "checkpoint", "deepseek mxfp4")
    at = {"checkpoint": tmp_path / "checkpoint", "output": tmp_path / "b"}
    build(*at.values(), parse_recipe(RECIPE, "native"), [text], work=tmp_path / "w", keep=True)
    before = tree(tmp_path / "b")
    for name, said in {
        "mxfp4": "is made where", "native": "is made where", "nvfp4": "is made where", "bf16": "takes more bits",
        "w8": "takes more bits than the checkpoint's own mxfp4",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=f"{name}:? {said}"):
            add(tmp_path / "b", tmp_path / "w", [name])
    assert tree(tmp_path / "b") == before
    add(tmp_path / "b", tmp_path / "w", ["w3", "w4"], {"w4": 64})
    bundle = open_bundle(tmp_path / "b")
    assert [f"{v.name} {v.group_size}" for v in bundle.versions] == ["mxfp4 32", "w4 64", "w3 32", "w2 32"]
    assert verify(tmp_path / "b", tmp_path / "checkpoint") == []
    again = parse_recipe(str(bundle.manifest.provenance["recipe"]), "of the bundle")
    build(tmp_path / "checkpoint", tmp_path / "c", again, [text])
    assert tree(tmp_path / "c") == tree(tmp_path / "b")
    check_divergence(tmp_path, text)
    check_whole_or_absent(tmp_path)


def check_whole_or_absent(folder: Path) -> None:
    """An export is at its name when it is complete, and removes what a killed one left beside it."""
    room = folder / "room"
    room.mkdir()

    (room / ".c.partial-0").mkdir()  # as one that was killed leaves it
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, FilledFile, "close", lambda file: seen.extend(p.name for p in room.iterdir()))
        export_checkpoint(folder / "b", room / "c")
    assert len(seen) == 1 and seen[0].startswith(".c.partial-") and seen != [".c.partial-0"]
    assert [p.name for p in room.iterdir()] == ["c"]
    with pytest.raises(TargetError, match="lies in the bundle"):
        export_checkpoint(folder / "b", folder / "b" / "c")
    with pytest.raises(InputError, match="has no released version here"):
        export_checkpoint(folder / "small", room / "d")
    (room / "empty").mkdir()
    with contextlib.chdir(room / "empty"):
        export_checkpoint(folder / "b", ".")
    assert tree(room / "empty") == tree(room / "c")


def check_divergence(folder: Path, text: Path) -> None:
    """It is from the released version, and needs one."""
    options: dict[str, Any] = {"length": 64, "samples": 2, "kl": True}
    same, low = (
        evaluate(folder / "b", [str(text)], LoadOptions(policy=f"static:{name}"), **options) for name in ("mxfp4", "w2")
    )
    assert same.kl == 0 and low.kl is not None and low.kl > 0
    shrink(folder / "b", folder / "small", ["w2"])
    with pytest.raises(InputError, match="small: has no version that holds the checkpoint's weights"):
        evaluate(folder / "small", [str(text)], **options)


@pytest.mark.parametrize("kind", ["deepseek mxfp4", "fp8 blocks", "gptq"])
def test_dry_runs_count_what_a_build_makes(kind: str, plain: Path, text: Path, tmp_path: Path) -> None:
    """With the weights and from config.json alone: the bytes of the native version's files."""
    released(plain, tmp_path / "checkpoint", kind)
    recipe = parse_recipe(RECIPE, "native")
    build(tmp_path / "checkpoint", tmp_path / "bundle", recipe, [text])
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "config.json").write_bytes((tmp_path / "checkpoint" / "config.json").read_bytes())
    native = open_bundle(tmp_path / "bundle").versions[0].name
    made = sum(f.stat().st_size for f in (tmp_path / "bundle" / "experts" / native).iterdir())
    whole = estimate(tmp_path / "checkpoint", tmp_path / "b", recipe, [text])
    bare = estimate(tmp_path / "only", tmp_path / "b", recipe)
    assert whole.versions[native] == bare.versions[native] == made and bare.outline == "config.json alone"
    assert whole.checkpoint_bytes == sum(
        t.nbytes for t in load_file(tmp_path / "checkpoint/model.safetensors").values()
    )


def test_a_dry_run_encodes_released_codes(plain: Path, text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Where a version's bytes depend on its codes, they are read and encoded: here to what the shapes say."""
    released(plain, tmp_path / "checkpoint", "fp8 blocks")
    recipe = parse_recipe(RECIPE, "native")
    plainly = estimate(tmp_path / "checkpoint", tmp_path / "b", recipe, [text])
    monkeypatch.setattr(Fp8, "entropy_coded", True)
    monkeypatch.setattr(Fp8, "stored_sizes", lambda version, matrices: None)
    assert estimate(tmp_path / "checkpoint", tmp_path / "b", recipe, [text]).versions == plainly.versions
