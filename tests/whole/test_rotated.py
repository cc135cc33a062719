"""Rotated versions from recipe to logits: down's inputs go through signs and Hadamard's matrix, and outputs stay."""

import math
from dataclasses import replace
from types import SimpleNamespace

import independent_reader as reader
import numpy as np
import pytest
import torch
from support import build_from, cli, exported_down, layer_error, refused

import moepack
from moepack.pack.codec.rotation import rotate, signs
from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import BLOCKS, Matrix, Rotation, Version
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.quantize.expert_batch import Settings, quantise_batch
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify
from moepack.runtime.kernels.rotation import SlotRotation

RECIPE = """
versions: [bf16, w4, w3, t2d3, w2d3, w2, w1]
quantize: {{loss_tokens: 256, rotate: {rotate}}}
calibration: {{samples: 16, length: 128, batch_size: 8}}
"""
WIDTHS = ("w4", "w3", "t2d3", "w2d3", "w2", "w1")
SHAPES = ((16, 48), (32, 96), (64, 2880), (128, 1408), (256, 768))  # a block, and columns of which it is a part


@pytest.fixture(scope="module")
def made(short_model, text, made_once):
    """`plain` and `rotated`, and the work directory of the latter; read only."""

    def make(root):
        for name, block in (("plain", 0), ("rotated", 64)):
            work = root / "work" if block else None
            recipe = parse_recipe(RECIPE.format(rotate=block), name)
            build(short_model, root / name, recipe, [text], work=work, keep=bool(block))

    return made_once("whole-rotated", make)


def test_the_page_alone_suffices_for_signs():
    for cols, seed in ((64, 0), (48, 7), (768, (1 << 32) - 1)):
        assert signs(cols, seed).tolist() == [reader.sign(c, seed) for c in range(cols)]
    assert abs(float(signs(1 << 16, 3).mean())) < 0.01, "as many of one as of the other"


@pytest.mark.parametrize(("block", "cols"), SHAPES)
def test_products_stay_and_wrong_rotations_show(block, cols):
    g = torch.Generator().manual_seed(block)
    weight, x, right = torch.randn(24, cols, generator=g), torch.randn(5, cols, generator=g), Rotation(block, 7)
    made = rotate(weight, right)
    assert np.array_equal(made.numpy(), rotate(weight.numpy(), right)), "NumPy and torch have the same bits"
    assert torch.equal(torch.cat([rotate(w[None], right) for w in weight]), made), "whatever is rotated at once"
    assert torch.allclose(rotate(made, right, back=True), weight, atol=3e-6)
    want = x.double() @ weight.double().T

    def error(of):
        got = rotate(x, of).double() @ made.double().T
        return float((got - want).norm() / want.norm())

    assert error(right) < 1e-6
    with pytest.raises(ValueError, match="are not whole blocks of"):
        rotate(x[:, 1:].contiguous(), right)
    others = [replace(right, seed=8), *(replace(right, block=b) for b in BLOCKS if b != block and cols % b == 0)]
    assert all(error(other) > 0.5 for other in others)


@pytest.mark.parametrize(("block", "cols"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_rotate_the_slots_of_rotated_experts(block, cols, dtype):
    """C with the reference's bits on every instruction set and on threads; torch's product of a GPU nearly so."""
    native = pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
    versions = [Version.of("w4", 64), Version.of("w2", 64, Rotation(block, 7)), Version.of("w1", 64, Rotation(block))]
    layer = native.LayerForms((Matrix("gate_up", 2 * cols, 16), Matrix("down", 16, cols)), versions)
    table = np.array([0, 64 | 1, 128 | 2], np.uint64)
    index = torch.tensor([1, 0, 3, 2, 1] * 40)  # 3: past the last expert
    x = torch.randn(len(index), cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = x.clone()
    for expert, version in ((1, versions[1]), (2, versions[2])):
        want[index == expert] = rotate(x[index == expert].float(), version.rotation).to(dtype)
    try:
        for level in range(len(native.levels())):
            native.use_level(level)
            for threads in (1, 3):
                got = x.clone()
                native.rotate(layer, table, got, index, threads)
                assert torch.equal(got, want), (level, threads)
    finally:
        native.use_level()
    with pytest.raises(ValueError, match="do not fit"):
        native.rotate(layer, table, x[:, :-1], index)
    words = torch.from_numpy(table.view(np.int64))
    on_gpu = SlotRotation(versions, cols, torch.device("cpu")).run(x, index, words, [0, 1, 2])
    there = index < 3
    near = 2**-7 if dtype == torch.bfloat16 else 1e-6  # two roundings to BF16
    assert float((on_gpu[there].float() - want[there].float()).norm() / want[there].float().norm()) < near
    assert torch.equal(on_gpu[index == 0], x[index == 0])
    only = SlotRotation(versions[1:2], cols, torch.device("cpu")).run(x, index * 0, words[:1], [0])
    assert float((only.float() - rotate(x.float(), versions[1].rotation)).norm() / x.float().norm()) < near


def test_a_bundle_of_them(made):
    """Built, verified, measured: less loss at every width. The manifest says how, and the second reader reads it."""
    assert verify(made / "rotated") == []
    plain, rotated = (open_bundle(made / name) for name in ("plain", "rotated"))
    assert {v.name: v.rotation for v in rotated.versions} == {"bf16": None} | dict.fromkeys(WIDTHS, Rotation(64, 0))
    assert rotated.versions[1] != plain.versions[1]
    assert rotated.manifest.version("w4").record()["rotation"] == {"block": 64, "seed": 0}
    loss = {name: [b.calibration().mean_loss(w)[0] for w in WIDTHS] for name, b in (("a", plain), ("b", rotated))}
    gain = [b / a for a, b in zip(loss["a"], loss["b"], strict=True)]
    assert max(gain) < 0.99 and max(gain[4:]) < 0.95, loss
    facts = inspect(made / "rotated")
    assert facts["versions"]["w2"]["rotated"] == 64 and facts["versions"]["bf16"]["rotated"] == 0
    said = " ".join(cli("inspect", made / "rotated")[1].split())
    assert "down of w4, w3, t2d3, w2d3, w2, w1 multiplies rotated inputs" in said
    manifest = reader.read_manifest(made / "rotated")
    for position, version in ((0, "w4"), (1, "w2d3"), (1, "t2d3")):
        layer = manifest["layers"][position]
        described = next(v for v in manifest["versions"] if v["name"] == version)
        extent = reader.read_extent(made / "rotated", manifest, version, layer["index"], 5)
        theirs = reader.values(extent, layer, described)
        ours = rotated.expert(version, layer["index"], 5).numpy()
        for a, b in zip(ours.values(), theirs, strict=True):
            assert np.allclose(a, np.array(b), rtol=0, atol=2e-7 * np.abs(a).max())
        exact = rotated.expert("bf16", layer["index"], 5).numpy()
        for name, a in ours.items():
            assert np.linalg.norm(a - exact[name]) < 0.7 * np.linalg.norm(exact[name])


def served(bundle, policy, dtype, tokens=40):
    """Logits, and the model."""
    model = moepack.load(bundle, policy=policy, dtype=dtype)
    with torch.no_grad():
        logits = model(torch.arange(tokens)[None]).logits.float()
    return logits, model


@pytest.mark.parametrize(
    ("kernels", "dtype", "near"),
    [("native", "float32", 1e-5), ("native", "bfloat16", 0.02), ("triton", "float32", 1e-5)],
)
def test_layers_that_mix_rotated_and_plain_experts(made, tmp_path, dtype, near, kernels, monkeypatch):
    """Kernels against weights turned back: with few tokens, as in decoding, and with many."""
    if kernels == "triton":
        pytest.importorskip("gpu_stand_in").kernels(monkeypatch)
    layers = open_bundle(made / "rotated").layers
    names = ("bf16", *WIDTHS)
    chosen = [[names[(e + i) % len(names)] for e in range(layer.experts)] for i, layer in enumerate(layers)]
    (tmp_path / "map.json").write_text(f'{{"versions": {str(chosen).replace(chr(39), chr(34))}}}')
    first = 40 if kernels == "native" else 1  # the interpreter takes seconds for a token
    _, model = served(made / "rotated", f"static:{tmp_path / 'map.json'}", dtype, first)
    module = model.model.layers[layers[0].index].mlp.experts
    assert module._moepack.of.backend == kernels
    g = torch.Generator().manual_seed(0)
    for tokens in (1, 5, 300) if kernels == "native" else (1, 17):
        assert layer_error(module, tokens, dtype, g) < near, tokens


def test_served_logits_have_less_error(made):
    exact = served(made / "plain", "static:bf16", "float32")[0]
    error = {
        name: [float((served(made / name, f"static:{w}", "float32")[0] - exact).norm()) for w in ("w4", "w2")]
        for name in ("plain", "rotated")
    }
    assert math.prod(error["rotated"]) < math.prod(error["plain"]), error


def test_exports_turn_it_back_or_refuse(made, tmp_path):
    for target in ("compressed-tensors", "gptq", "gguf"):
        said = cli("export", made / "rotated", "-o", tmp_path / target, "--to", target, "--bits", "4")
        refused(said, "w4 is not exported: its down multiplies rotated inputs", "take --to checkpoint")
        assert not (tmp_path / target).exists()
    opened = open_bundle(made / "rotated")
    index = opened.layers[1].index
    down = opened.expert("w4", index, 3).torch()["down"].bfloat16()
    assert torch.equal(exported_down(made / "rotated", tmp_path / "plain", index, 3), down)


def test_recipes_that_ask_for_what_does_not_fit(short_model, text, tmp_path):
    with pytest.raises(InputError, match=r"quantize.rotate: 48 is not one of 0, 16, 32, 64, 128, 256"):
        parse_recipe("quantize: {rotate: 48}", "r")
    with pytest.raises(InputError, match="rotate: 128 does not divide the 64 columns of down in layer 0: 64 does"):
        build_from(RECIPE.format(rotate=128), short_model, tmp_path / "b", [text])
    assert not (tmp_path / "b").exists()


def test_versions_of_one_batch_share_their_rotation():
    settings = Settings("gptq", (Version.of("w4", 64), Version.of("w2", 64, Rotation(64))))
    with pytest.raises(ValueError, match="too many values"):
        next(quantise_batch(SimpleNamespace(), settings))
