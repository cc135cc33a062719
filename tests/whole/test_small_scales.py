"""Scales of a byte from recipe to logits: an eighth of a bit less a weight, and about as much error."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import build_from, cli

import moepack
from moepack.export import Wanted, export
from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Matrix, Version
from moepack.pipeline.recipe import parse_recipe
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import quantise_all
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify
from moepack.runtime.experts.forward import reference_forward
from moepack.runtime.experts.handles import LayerCall

RECIPE = """
versions: [bf16, w4, w3d4, w2, w1]
dense: [w4]
quantize: {{loss_tokens: 256, scale_bits: {bits}}}
calibration: {{samples: 16, length: 128, batch_size: 8}}
"""
SMALL = ("w4", "w3d4", "w2", "w1")


@pytest.fixture(scope="module")
def made(short_model, text, made_once):
    """`16` and `8`; read only."""

    def make(root):
        for bits in (16, 8):
            build_from(RECIPE.format(bits=bits), short_model, root / str(bits), [text])

    return made_once("whole-scales", make)


def test_a_bundle_of_them(made):
    """Fewer bytes; losses within a tenth; dense matrices keep BF16 scales."""
    assert verify(made / "8") == []
    wide, small = (open_bundle(made / bits) for bits in ("16", "8"))
    assert small.versions[0] == wide.versions[0]
    assert {v.scale_bits for v in small.versions[1:]} == {8} and {v.scale_bits for v in small.dense_versions} == {16}
    assert small.dense_versions == wide.dense_versions
    for name in SMALL:
        group, layer = small.manifest.version(name).group_size, small.layers[0]
        weights = sum(m.weights for m in layer.matrices)
        outer = sum(32 * m.rows // 16 for m in layer.matrices) / weights
        less = wide.bits_per_weight(name) - small.bits_per_weight(name)
        scales = sum(8 * m.rows * -(-m.cols // group) for m in layer.matrices) / weights
        assert less == pytest.approx(scales - outer) and less > 0.03
        loss = [b.calibration().mean_loss(name)[0] for b in (wide, small)]
        assert 0.9 < loss[1] / loss[0] < 1.1, name
    assert inspect(made / "8")["versions"]["w2"]["scale_bits"] == 8
    assert "scales of w4, w3d4, w2, w1 have a byte" in " ".join(cli("inspect", made / "8")[1].split())


def layer_error(module, tokens, dtype, g):
    """The relative error of a served layer's experts for random inputs, against plain torch in float32."""
    layer = module._moepack.of.layer
    x = torch.randn(tokens, layer.matrices[0].cols, generator=g).to(getattr(torch, dtype))
    index = torch.stack([torch.randperm(layer.experts, generator=g)[:2] for _ in range(tokens)])
    gates = torch.rand(tokens, 2, generator=g)
    with torch.no_grad():
        got = module(x, index, gates).float()
        want = reference_forward(LayerCall(module, module._moepack.current, x.float(), index, gates))
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("kernels", "dtype"), [("native", "float32"), ("native", "bfloat16"), ("triton", "float32")])
def test_served_logits_are_those_of_its_weights(made, dtype, kernels, monkeypatch):
    """Against a layer whose experts are the dequantised weights in torch."""
    if kernels == "triton":
        pytest.importorskip("gpu_stand_in").kernels(monkeypatch)
    g = torch.Generator().manual_seed(0)
    for name in SMALL:
        model = moepack.load(made / "8", policy=f"static:{name}", dtype=dtype)
        module = model.model.layers[open_bundle(made / "8").layers[0].index].mlp.experts
        assert module._moepack.of.backend == kernels
        for tokens in (1, 70) if kernels == "native" else (3,):
            assert layer_error(module, tokens, dtype, g) < (0.02 if dtype == "bfloat16" else 1e-5), (name, tokens)


def test_exports_have_the_same_weights(made, tmp_path):
    """A byte's scale is a BF16 number, so checkpoints need no rounding for it."""
    opened = open_bundle(made / "8")
    index = opened.layers[1].index
    down = opened.expert("w4", index, 3).torch()["down"].bfloat16()
    export(made / "8", tmp_path / "plain", wanted=Wanted(bits="4"))
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(tensors[f"model.layers.{index}.mlp.experts.3.down_proj.weight"], down)


def test_other_formats_have_the_same_weights(short_model, text, tmp_path):
    """With the middle code for a zero point llama.cpp's Q4_0 is as exact as with BF16 scales."""
    import gguf

    recipe = "versions: [bf16, w4]\nquantize: {loss_tokens: 64, scale_bits: 8, zeros: symmetric, method: rtn}\n"
    recipe += "calibration: {samples: 4, length: 64, batch_size: 4}"
    build_from(recipe, short_model, tmp_path / "b", [text])
    assert cli("export", tmp_path / "b", "-o", tmp_path / "gguf", "--to", "gguf", "--bits", "4")[0] == 0
    tensors = {t.name: t for f in (tmp_path / "gguf").glob("*.gguf") for t in gguf.GGUFReader(f).tensors}
    opened = open_bundle(tmp_path / "b")
    index = opened.layers[1].index
    made = tensors[f"blk.{index}.ffn_down_exps.weight"]
    assert made.tensor_type.name == "Q4_0"
    want = opened.expert("w4", index, 3).numpy()["down"]
    assert np.array_equal(gguf.dequantize(made.data, made.tensor_type)[3], want)


@pytest.mark.parametrize("method", ["gptq", "rtn", "hqq", "gptqmodel"])
def test_rows_and_groups_next_to_nothing(method):
    """Scales too small for a byte beside others of 16 rows become larger; zeros stay zeros where codes have some."""
    weight = torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(0))
    weight[0, 3] *= 1e-6
    weight[0, :, 64:128] = 0
    weight[1, 16:32] = 0
    weight[1, 33, :64] *= 1e-3
    versions = [Version.of(name, 64, scale_bits=8) for name in ("w4", "w2", "w1")]
    wide = [Version.of(name, 64) for name in ("w4", "w2", "w1")]
    moments, m = torch.eye(256).repeat(2, 1, 1), Matrix("m", 40, 256)
    made, other = (quantise_all(method, weight, moments, some) for some in (versions, wide))
    for v, w in zip(versions, wide, strict=True):
        values = dequantise(made[v], v)
        error, least = ((x - weight).square().sum() for x in (values, dequantise(other[w], w)))
        assert error < 1.05 * least, v.name
        assert float(values[0, 3].abs().max()) < 0.01 and float(values[0, :, 64:128].abs().max()) < 0.01
        assert not values[1, 16:32].bfloat16().any() or v.name == "w1"
        for e in range(2):
            extent, _ = v.encode((m,), [made[v].matrix(e)])
            assert not list(v.check((m,), extent))
            assert np.array_equal(v.dequantise(v.decode((m,), extent)[0]), values[e].numpy())


def test_recipes_that_ask_for_others():
    with pytest.raises(InputError, match=r"quantize.scale_bits: 4 is not one of 16, 8"):
        parse_recipe("quantize: {scale_bits: 4}", "r")
