"""Checkpoints as they were released, from build to logits: every format, on a model of a few kilobytes."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from native_checkpoints import IDS, exported, logits, released, small
from released import found
from released_kinds import E8M0, KINDS, block_fp8
from safetensors.torch import load_file, save_file
from support import NATIVE, Notes, build_from, load_for_logits, spy, tree
from transformers import AutoModelForCausalLM

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.native import RowPlaces
from moepack.calibrate.released.announced import announced_version
from moepack.calibrate.stream import StreamedModel
from moepack.export import export_checkpoint
from moepack.export.files.filled import FilledFile
from moepack.pack.errors import InputError, TargetError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Version, encoding_of
from moepack.pipeline.add import add
from moepack.pipeline.build import build
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.shrink import shrink
from moepack.reports.evaluate import evaluate
from moepack.reports.verify import verify
from moepack.runtime.dense.packed import PackedLinear
from moepack.runtime.planning.options import LoadOptions

SERVED = list(KINDS)

DENSE = {  # experts' format -> attention's, its version and group size
    "deepseek mxfp4": (lambda r, n, c: block_fp8(r, n, c, 128, "scale", E8M0), "fp8", 128),
    "fp8 blocks": (KINDS["fp8 blocks"].make, "fp8", 32),
    "ct nvfp4": (KINDS["ct nvfp4"].make, "nvfp4", 16),
}


@pytest.fixture(scope="module")
def plain(demo_model, tmp_path_factory):
    return small(demo_model, tmp_path_factory.mktemp("plain"), hidden_size=128, head_dim=64)


def reference(values, plain, folder):
    """What transformers computes in float32 with these values."""
    folder.mkdir()
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
    return logits


@pytest.mark.numeric
@pytest.mark.parametrize("kind", SERVED)
def test_from_checkpoint_to_logits(kind, plain, text, tmp_path):
    """The bundle's codes are the checkpoint's, w2 is made from their values, and it computes what they compute."""
    values = released(plain, tmp_path / "checkpoint", kind)
    build_from(NATIVE, tmp_path / "checkpoint", tmp_path / "bundle", [text])
    bundle = open_bundle(tmp_path / "bundle")
    native = bundle.versions[0]
    assert native == StreamedModel(open_checkpoint(tmp_path / "checkpoint")).native and native.released
    assert verify(tmp_path / "bundle", tmp_path / "checkpoint") == []
    for expert in range(4):
        names = [f"model.layers.1.mlp.experts.{expert}.{m}_proj.weight" for m in ("gate", "up", "down")]
        gate, up, down = (values[n].numpy() for n in names)
        decoded = bundle.expert(native.name, 1, expert).decode()
        for ours, want in zip(map(native.dequantise, decoded), (np.concatenate([gate, up]), down), strict=True):
            assert np.allclose(ours, want, rtol=2**-23, atol=0), "an outer scale may be multiplied in another order"
    want = reference(values, plain, tmp_path / "exact")
    got = logits(tmp_path / "bundle", policy=f"static:{native.name}", dtype=torch.float32)
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert float((logits(tmp_path / "bundle", policy="static:w2") - want).norm() / want.norm()) > 0.01
    check_export(tmp_path)


def check_export(folder):
    """Every tensor that the checkpoint had comes back, byte for byte, from the bundle alone."""
    assert exported(folder / "bundle", folder / "checkpoint", folder / "again") == set()
    assert StreamedModel(open_checkpoint(folder / "again")).native == open_bundle(folder / "bundle").versions[0]
    with pytest.raises(TargetError, match="again: is not empty"):
        export_checkpoint(folder / "bundle", folder / "again")


@pytest.mark.parametrize("kind", SERVED)
def test_the_configuration_alone_tells_the_version(kind, plain, tmp_path):
    """But for the dtype of GPTQ's and AWQ's scales, and formats that only tensors tell apart."""
    released(plain, tmp_path / "checkpoint", kind)
    native = StreamedModel(open_checkpoint(tmp_path / "checkpoint")).native
    told = announced_version(kind, json.loads((tmp_path / "checkpoint" / "config.json").read_text()))
    assert told.name.removesuffix("fp16") == native.name.removesuffix("fp16")
    assert (told.group_size, told.zero) == (native.group_size, native.zero)


def test_versions_beside_a_released_one(plain, text, tmp_path):
    """Added versions are those of one build; what takes more bits than the checkpoint, or holds it too, is refused."""
    released(plain, tmp_path / "checkpoint", "deepseek mxfp4")
    at = {"checkpoint": tmp_path / "checkpoint", "output": tmp_path / "b"}
    build_from(NATIVE, *at.values(), [text], work=tmp_path / "w", keep=True)
    before = tree(tmp_path / "b")
    for name, said in {
        "mxfp4": "is made where", "native": "is made where", "nvfp4": "is made where", "bf16": "saves no bits",
        "w8": "saves no bits over the checkpoint's own mxfp4",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=f"{name}:? {said}"):
            add(tmp_path / "b", tmp_path / "w", [name])
    assert tree(tmp_path / "b") == before
    add(tmp_path / "b", tmp_path / "w", ["w3", "w1"], {"w3": 64})
    bundle = open_bundle(tmp_path / "b")
    assert [f"{v.name} {v.group_size}" for v in bundle.versions] == ["mxfp4 32", "w3 64", "w2 32", "w1 32"]
    assert verify(tmp_path / "b", tmp_path / "checkpoint") == []
    again = parse_recipe(str(bundle.manifest.provenance["recipe"]), "of the bundle")
    build(tmp_path / "checkpoint", tmp_path / "c", again, [text])
    assert tree(tmp_path / "c") == tree(tmp_path / "b")
    check_divergence(tmp_path, text)
    check_whole_or_absent(tmp_path)


def check_whole_or_absent(folder):
    """An export is at its name when it is complete, and removes what a killed one left beside it."""
    room = folder / "room"
    room.mkdir()

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, FilledFile, "close", lambda file: seen.extend(p.name for p in room.iterdir()))
        export_checkpoint(folder / "b", room / "c")
    assert seen == [".c.exporting"]
    assert [p.name for p in room.iterdir()] == ["c"]
    with pytest.raises(InputError, match="has no version here that holds its checkpoint"):
        export_checkpoint(folder / "small", room / "d")
    (room / "empty").mkdir()
    with contextlib.chdir(room / "empty"):
        export_checkpoint(folder / "b", ".")
    assert tree(room / "empty") == tree(room / "c")


def check_divergence(folder, text):
    """It is from the released version, and needs one."""
    options = {"length": 64, "samples": 2, "kl": True}
    same, low = (
        evaluate(folder / "b", [str(text)], LoadOptions(policy=f"static:{name}"), **options) for name in ("mxfp4", "w2")
    )
    assert same.kl == 0 and low.kl is not None and low.kl > 0
    shrink(folder / "b", folder / "small", ["w2"])
    with pytest.raises(InputError, match="small: has no lossless version to compare with: here are w2"):
        evaluate(folder / "small", [str(text)], **options)


@pytest.mark.parametrize("kind", ["deepseek mxfp4", "fp8 blocks", "gptq"])
def test_dry_runs_count_what_a_build_makes(kind, plain, text, tmp_path):
    """With the weights and from config.json alone: the bytes of the native version's files.

    Where these depend on its codes, the codes are read and encoded; without them a sample tells about how many.
    """
    released(plain, tmp_path / "checkpoint", kind)
    recipe = parse_recipe(NATIVE, "native")
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


@pytest.mark.numeric
@pytest.mark.parametrize("kind", DENSE)
def test_dense_matrices_stay_as_released(kind, plain, text, tmp_path):
    """At their own size on the device, computing what transformers does, and narrower where a recipe asks for it."""
    make, name, group = DENSE[kind]
    less = "w3" if name == "nvfp4" else "w4"
    values = released(plain, tmp_path / "checkpoint", kind, make)
    recipes = {n: parse_recipe(NATIVE + more, n) for n, more in (("bundle", ""), ("both", f"dense: [{less}]"))}
    for path, recipe in recipes.items():
        expected = estimate(tmp_path / "checkpoint", tmp_path / path, recipe, [text]).dense_versions
        build(tmp_path / "checkpoint", tmp_path / path, recipe, [text])
        assert verify(tmp_path / path, tmp_path / "checkpoint") == []
        made = open_bundle(tmp_path / path)
        assert expected == {v.name: made.dense_bytes(v.name) for v in made.dense_versions}
    bundle, both = open_bundle(tmp_path / "bundle"), open_bundle(tmp_path / "both")
    assert [(v.name, v.group_size) for v in bundle.dense_versions] == [(name, group)]
    assert [v.name for v in both.dense_versions] == [name, less]
    assert len(bundle.manifest.dense) == 8 and "lm_head.weight" in bundle.dense()
    want, exact = reference(values, plain, tmp_path / "exact"), f"static:{bundle.versions[0].name}"
    weights, sizes = sum(m.matrix.weights for m in bundle.manifest.dense), []
    for path, options in ((bundle.path, {}), (bundle.path, {"device_memory": "64MiB"}), (both.path, {"dense": less})):
        model = load_for_logits(path, policy=exact, dtype=torch.float32, **options)
        sizes.append(sum(m.packed.nbytes for m in model.modules() if isinstance(m, PackedLinear)))
        with torch.inference_mode():
            error = float((model(IDS).logits - want).norm() / want.norm())
        model.moepack.close()
        assert error > 0.01 if options.get("dense") else error < 1e-5
    for version, size in zip((*bundle.dense_versions, *both.dense_versions), sizes, strict=True):
        assert version.bits / 16 < size / (2 * weights) < version.bits / 16 + 0.1, "of BF16's bytes"
    served = LoadOptions(policy=exact, dense=less, dtype="float32")
    least, most = (
        evaluate(both.path, [str(text)], how, 64, 1, kl=True).kl for how in (replace(served, dense=None), served)
    )
    assert least is not None and most is not None and abs(least) < 1e-6 < most, "against what was released"
    check_export(tmp_path)


def test_dense_versions_are_of_the_matrices_that_are_encoded(plain, text, tmp_path):
    """Others stay in BF16, as a build says. Versions can be added where inputs were kept; verify sees another code."""
    checkpoint, name = tmp_path / "checkpoint", "model.layers.1.self_attn.k_proj.weight"
    released(plain, checkpoint, "fp8 blocks", KINDS["fp8 blocks"].make)
    stored = load_file(checkpoint / "model.safetensors")
    stored = {n: t for n, t in stored.items() if not n.startswith(name)} | {
        name: load_file(plain / "model.safetensors")[name]
    }
    save_file(stored, checkpoint / "model.safetensors", {"format": "pt"})
    reporter = Notes()

    def made(path, more=""):
        recipe, work = parse_recipe(NATIVE + more, path), tmp_path / f"{path}.work"
        build(checkpoint, tmp_path / path, recipe, [text], work=work, keep=True, reporter=reporter)
        return tmp_path / path

    bare = made("bare")
    assert not any("stay in BF16" in line for line in reporter.notes), "nothing but codes was asked for"
    one, two = made("one", "dense: [w4]"), made("two", "dense: [w4, w2]")
    kept = [line for line in reporter.notes if "stay in BF16" in line]
    assert len(kept) == 2 and kept[0].startswith("2 matrices outside the experts, as model.layers.1.self_attn.k_proj,")
    assert len(open_bundle(one).manifest.dense) == 7 and name in open_bundle(one).dense()
    with pytest.raises(InputError, match="was calibrated without dense"):
        add(bare, tmp_path / "bare.work", [], dense=["w2"])
    add(one, tmp_path / "one.work", [], dense=["w2"])
    files = {n: data for n, data in tree(two).items() if n.startswith("dense/") or n == "calibration.safetensors"}
    assert files == {n: tree(one)[n] for n in files} and len(files) == 3 * 2 + 1
    stored["model.layers.0.self_attn.q_proj.weight"].view(torch.uint8)[5, 7] ^= 1
    save_file(stored, checkpoint / "model.safetensors", {"format": "pt"})
    (problem,) = verify(one, checkpoint)
    assert problem.kind == "bits" and "layers.0.self_attn.q_proj, version fp8" in problem.location


@pytest.mark.parametrize(("version", "rows", "fits"), [("nvfp4", 24, False), ("nvfp4", 32, True), ("fp8row", 24, True)])
def test_blocks_of_rows_with_different_scales_fit_no_version(version, rows, fits):
    """A matrix of two weights: an outer scale stands once for 16 rows, a scale of FP8 rows for each."""
    kind = KINDS["modelopt nvfp4" if version == "nvfp4" else "modelopt fp8"]
    tensors = {f"{m}.{n}": t for m in "ab" for n, t in kind.make(np.random.default_rng(0), rows, 64)[0].items()}
    sources = tuple(sorted(found(kind.quantization, tensors).items()))
    places = RowPlaces(sources, (torch.arange(rows), torch.arange(rows, 2 * rows)), (2 * rows,))
    assert places.fits(Version.of(version)) == fits
