"""Checkpoints as they were released, from build to logits: every format, on a model of a few kilobytes."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from released import same
from released_kinds import KINDS
from safetensors.torch import load_file, save_file
from served import ask
from support import damage
from torch import Tensor
from transformers import AutoModelForCausalLM

import moepack
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.released.announced import announced_version
from moepack.calibrate.stream import StreamedModel
from moepack.export import export_checkpoint
from moepack.generation import generate
from moepack.pack.encodings.released import ReleasedFloat
from moepack.pack.errors import BundleError, CodecError, InputError, TargetError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Version, encoding_of
from moepack.pipeline.build import build
from moepack.pipeline.estimate import estimate
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.shrink import shrink
from moepack.progress import Reporter
from moepack.reports.evaluate import evaluate
from moepack.reports.plan import plan
from moepack.reports.verify import verify
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.policies.registry import ENTRIES

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from moepack.server.command import Serve, opened, options_of

RECIPE = """
versions: [native, w2]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""
IDS = torch.arange(3, 43)[None]
# Without: those whose scale is for a whole row of integers.
SERVED = [kind for kind, k in KINDS.items() if k.group or not k.version.startswith("int")]
PAGED = ["deepseek mxfp4", "ct nvfp4", "fp8 blocks", "gptq"]  # one of each layout of scales
# Extents of so few weights take as many pages at w2 as at mxfp4 unless w2's groups are of 64.
LOWER = RECIPE.replace("w2]", "w3, w2]").replace("group_size: 32", "group_size: 64")
# In ample room every policy serves the best version; `importance` only if it is named, and all tokens are important.
POLICIES = ["importance:r=1,hi=" if e.name == "importance" else e.name for e in ENTRIES]
WORK: dict[str, Any] = {"kv_tokens": 64, "prefill_tokens": 64, "all_logits": False}
AMPLE = 8_000_000  # bytes
Make = Callable[[str], Path]


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
    with pytest.raises(TargetError, match="again: exists and is not empty"):
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


@pytest.mark.parametrize("kind", ["deepseek mxfp4", "fp8 blocks", "gptq"])
def test_dry_runs_count_what_a_build_makes(kind: str, plain: Path, text: Path, tmp_path: Path) -> None:
    """With the weights and from config.json alone: the bytes of the native version's files.

    Where these depend on its codes, the codes are read and encoded; without them a sample tells about how many.
    """
    released(plain, tmp_path / "checkpoint", kind)
    recipe = parse_recipe(RECIPE, "native")
    build(tmp_path / "checkpoint", tmp_path / "bundle", recipe, [text])
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "config.json").write_bytes((tmp_path / "checkpoint" / "config.json").read_bytes())
    native = open_bundle(tmp_path / "bundle").versions[0].name
    made = sum(f.stat().st_size for f in (tmp_path / "bundle" / "experts" / native).iterdir())
    whole = estimate(tmp_path / "checkpoint", tmp_path / "b", recipe, [text])
    bare = estimate(tmp_path / "only", tmp_path / "b", recipe)
    assert whole.versions[native] == made and bare.outline == "config.json alone"
    assert bare.versions[native] == (pytest.approx(made, rel=0.1) if encoding_of(native).entropy_coded else made)
    assert whole.checkpoint_bytes == sum(
        t.nbytes for t in load_file(tmp_path / "checkpoint/model.safetensors").values()
    )


@pytest.fixture(scope="module")
def native(plain: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The bundle of a kind, and beside it the checkpoint."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("native")
        released(plain, folder / "checkpoint", kind)
        build(folder / "checkpoint", folder / "bundle", parse_recipe(LOWER, "native"), [text])
        return folder / "bundle"

    return make


def best(bundle: Path) -> str:
    return open_bundle(bundle).versions[0].name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", PAGED)
def test_paging_gives_the_bits_of_resident_experts(kind: str, native: Make, dtype: torch.dtype) -> None:
    """Of prompts, of tokens, of padded batches: from the store alone, and from memory in part."""
    bundle, asked = native(kind), {"dtype": dtype, **WORK}
    exact = moepack.load(bundle, policy=f"static:{best(bundle)}", dtype=dtype)
    with pytest.raises(TooSmallError, match=rf"at {best(bundle)}@stored: the least") as refused:
        moepack.load(bundle, policy="paged", device_memory=1000, **asked)
    for options, more in (("paged", 0), ("paged:alpha=0.5", 100_000), ("paged:alpha=0.3,ahead=no", 100_000)):
        model = moepack.load(bundle, policy=options, device_memory=refused.value.least + more, **asked)
        with model.moepack as serving, torch.inference_mode():
            placed = {name for row in serving.versions for name in row}
            assert placed > {f"{best(bundle)}@stored"} if more else placed == {f"{best(bundle)}@stored"}
            assert {name.partition("@")[0] for name in placed} == {best(bundle)}
            for ids in (IDS, IDS[:, :1], IDS.view(2, 20)):
                mask = torch.ones_like(ids)
                mask[0, : ids.shape[1] // 3] = 0
                got, want = (m(ids, attention_mask=mask, logits_to_keep=1).logits for m in (model, exact))
                assert torch.equal(got, want)
            made = [m.generate(IDS[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (model, exact)]
            assert torch.equal(*made) and serving.counters()["forward_waits"] > 0
            assert serving.resident_bytes_peak <= refused.value.least + more
    exact.moepack.close()


def test_of_a_coded_version_paging_knows_restore_alone(
    native: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extents that are inverted at rest come back on their way to a page: from device memory, and from the store."""
    want, kind, damaged = logits(native("deepseek mxfp4"), policy="static"), type(Version.of("mxfp4")), False

    def encode(*args: Any) -> Any:
        extent, payload = ReleasedFloat.encode(*args)
        return ~extent, payload

    def restore(self: Version, matrices: Any, extent: Any, out: Any, threads: Any = None, before: Any = None) -> None:
        if damaged:
            raise CodecError("tile 3: bad codes")
        np.invert(extent, out=out[: len(extent)])

    for name, value in (("encode", encode), ("restore", restore), ("entropy_coded", True)):
        monkeypatch.setattr(kind, name, value)
    checkpoint = native("deepseek mxfp4").with_name("checkpoint")
    build(checkpoint, tmp_path / "bundle", parse_recipe(LOWER, "native"), [text])
    options = "paged:alpha=0.5,resident=0.25,ahead=no"
    model = moepack.load(tmp_path / "bundle", policy=options, device_memory=AMPLE, **WORK)
    with model.moepack as serving, torch.inference_mode():
        assert {n for row in serving.versions for n in row} == {"mxfp4", "mxfp4@packed", "mxfp4@stored"}
        assert torch.equal(model(IDS).logits.float(), want)
        serving.manager.paging.window._keeps, damaged = False, True
        with pytest.raises(BundleError, match=r"layer \d, expert \d, version mxfp4: tile 3: bad codes"):
            for _ in range(2):  # the first pass gives its pages back
                model(IDS)
        damaged = False
        assert torch.equal(model(IDS).logits.float(), want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["deepseek mxfp4", "fp8 blocks"])
def test_every_policy_by_every_way(kind: str, policy: str, native: Make, evaluation: Path) -> None:
    bundle, prompt = native(kind), "The town"
    asked = {"policy": policy + best(bundle) * policy.endswith("="), "device_memory": AMPLE}
    want = logits(bundle, policy=f"static:{best(bundle)}")
    assert torch.equal(logits(bundle, **asked, **WORK), want)
    planned = plan(bundle, LoadOptions(**asked, **WORK))
    at_first = "w3" if policy == "lru" else best(bundle)  # before a pass asks
    assert planned.feasible and {name.partition("@")[0] for row in planned.table for name in row} <= {
        at_first,
        "absent",
    }
    options = LoadOptions(dtype="float32", batch=1, **asked, **WORK)
    scored = evaluate(bundle, [str(evaluation)], options, length=64, samples=2, kl=True)
    assert scored.kl == 0 and scored.top1_agreement == 1 and scored.resident_bytes_peak <= AMPLE
    told = [generate(bundle, prompt, o, max_new_tokens=5) for o in (options, LoadOptions(dtype="float32"))]
    command = Serve(str(bundle), LoadOptions(dtype="float32", kv_tokens=64, **asked), step_tokens=32)
    with opened(command, options_of(command)) as server:
        answer = ask(server, {"model": bundle.name, "prompt": prompt, "max_tokens": 5, "temperature": 0})
    assert answer["choices"][0]["text"] == told[0] == told[1]


def test_lower_versions_are_compared_with_the_checkpoints_own(native: Make, evaluation: Path, tmp_path: Path) -> None:
    bundle = native("gptq")
    found = evaluate(bundle, [str(evaluation)], LoadOptions(policy="static:w2"), length=64, samples=2, kl=True)
    assert found.kl is not None and found.kl > 0.005
    shrink(bundle, tmp_path / "w2", versions=["w2"])
    with pytest.raises(InputError, match=r"w2: has no lossless version to compare with: here are w2$"):
        evaluate(tmp_path / "w2", [str(evaluation)], length=64, samples=2, kl=True)
    with pytest.raises(InputError, match=r"w2: has no lossless version to page: here are w2$"):
        moepack.load(tmp_path / "w2", policy="paged", device_memory=AMPLE)


def test_a_version_that_saves_no_bits_is_refused(native: Make, text: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE.replace("w2]", "w4]"), "native")
    with pytest.raises(InputError, match="versions: w4 saves no bits over the checkpoint's own mxfp4: leave it out"):
        build(native("deepseek mxfp4").with_name("checkpoint"), tmp_path / "bundle", recipe, [text])


def test_damage_is_named_and_not_served(native: Make, tmp_path: Path) -> None:
    """A stored extent is digested each time that it is read to its page."""
    bundle = Path(shutil.copytree(native("ct nvfp4"), tmp_path / "bundle"))
    with pytest.raises(TooSmallError) as refused:
        moepack.load(bundle, policy="paged", device_memory=1000, **WORK)
    model, want = moepack.load(bundle, policy="paged", device_memory=refused.value.least, **WORK), logits(bundle)
    with model.moepack, torch.inference_mode():
        damage(bundle, "nvfp4", 1, range(4))
        with pytest.raises(BundleError, match=r"layer 1, expert \d, version nvfp4: its bytes do not match"):
            model(IDS, logits_to_keep=1)
        damage(bundle, "nvfp4", 1, range(4))
        assert torch.equal(model(IDS, logits_to_keep=1).logits.float(), want[:, -1:])
