"""Dry runs before any weight is here: from config.json, an index, or headers on the Hub. Bytes are counted by hand."""

import json
import shutil
from dataclasses import replace

import pytest
from hub_stand_in import point, serve
from support import ROOT

from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.outline import open_outline
from moepack.pack.errors import InputError
from moepack.pack.spec import encoding_of
from moepack.pipeline.build import build
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.recipe import load_recipe, parse_recipe

CONFIGS = ROOT / "examples" / "configs"
# Layers, experts, hidden size, expert size, native version, bits of a weight in it, parameters in all (of the model
# cards, in thousand millions, without layers for multi-token prediction).
MODELS = {
    "gpt-oss-20b": (24, 32, 2880, 2880, "mxfp4", 4.25, 20.91),
    "deepseek-v4-flash": (43, 256, 4096, 2048, "mxfp4", 4.25, 284.33),
    "glm-5.3": (75, 256, 6144, 2048, "fp8", 8 + 32 / (16 * 128), 743.9),
    "kimi-k2.5": (60, 384, 7168, 2048, "int4", 4.5, 1027.0),
    "qwen3.8-flash-next": (48, 512, 2560, 640, "fp8", 8 + 32 / (16 * 128), 177.4),
    "qwen3.6-35b-a3b": (40, 256, 2048, 512, "bf16", 10.6, 35.1),
}
PAGE = 4096


def extent(rows, cols, bits, bias=False):
    """Bytes of a matrix, in groups that end with the row; the bias is BF16."""
    return rows * cols * bits / 8 + 2 * rows * bias


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_released_models_from_their_configuration(name, tmp_path):
    layers, experts, hidden, inner, native, bits, billions = MODELS[name]
    recipe = load_recipe(name)
    if name != "gpt-oss-20b":  # rounding is probed in a second, and changes no byte
        recipe = replace(recipe, quantize=replace(recipe.quantize, method="rtn", loss_tokens=64))
    e = estimate(CONFIGS / name, tmp_path / "b", recipe)
    assert (e.layers, e.experts, e.outline) == (layers, layers * experts, "config.json alone")
    bias = name.startswith("gpt-oss")
    size = extent(2 * inner, hidden, bits, bias) + extent(hidden, inner, bits, bias)
    # Extents end on a page, and each layer's file begins with a header of at most two pages.
    least, most = layers * experts * size, layers * (experts * (size + PAGE) + 2 * PAGE + 80 * experts)
    if native == "bf16":
        assert e.versions[native] == pytest.approx(least, rel=0.02), "its bytes depend on values"
    elif encoding_of(native).entropy_coded:
        assert e.versions[native] == pytest.approx(least * 6.68 / 8.02, rel=0.01)
    else:
        assert least <= e.versions[native] <= most
    weights = 3 * layers * experts * hidden * inner
    assert (weights + e.dense_bytes / 2) / 1e9 == pytest.approx(billions, rel=0.002)
    assert e.memory["layer"] > 2 * weights / layers and (e.seconds["encode"] > 0) == encoding_of(native).entropy_coded


def test_an_index_says_the_checkpoints_bytes(tmp_path):
    (tmp_path / "m").mkdir()
    shutil.copy(CONFIGS / "gpt-oss-20b" / "config.json", tmp_path / "m")
    index = {"metadata": {"total_size": 13_761_264_768}, "weight_map": {"a": "model-00001-of-00003.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    recipe = parse_recipe("versions: [native]\ncalibration: {samples: 2, length: 64}", "t")
    e = estimate(tmp_path / "m", tmp_path / "b", recipe)
    assert e.checkpoint_bytes == 13_761_264_768 and "index" in e.outline
    assert e.seconds["read"] == pytest.approx(13_761_264_768 / 2e9) and e.seconds["quantise"] == 0
    with pytest.raises(InputError, match=r"model-00001-of-00003.*missing.*dry-run needs config.json alone"):
        build(tmp_path / "m", tmp_path / "b", recipe)
    (tmp_path / "m" / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match="not an index"):
        estimate(tmp_path / "m", tmp_path / "b", recipe)


def test_shapes_agree_with_the_weights(demo_model, text, tmp_path):
    """Of one model, with its weights and without: the same exact bytes, activations and tasks."""
    (tmp_path / "only").mkdir()
    shutil.copy(demo_model / "config.json", tmp_path / "only")
    recipe = parse_recipe(
        "{versions: [native, w4, w2], dense: [w8], quantize: {method: rtn, loss_tokens: 64}, "
        "calibration: {samples: 4, length: 64, batch_size: 2}}", "t",
    )  # fmt: skip
    whole = estimate(demo_model, tmp_path / "b", recipe, [text])
    bare = estimate(tmp_path / "only", tmp_path / "b", recipe)
    assert whole.outline == "" and bare.outline == "config.json alone"
    for name in ("w4", "w2"):
        assert bare.versions[name] == whole.versions[name]
    assert bare.versions["bf16"] == pytest.approx(whole.versions["bf16"], rel=0.15)  # pages of 4 KiB in experts of 28
    assert bare.dense_versions["w8"] == whole.dense_versions["w8"]
    assert (bare.dense_bytes, bare.checkpoint_bytes) == (whole.dense_bytes, whole.checkpoint_bytes)
    for use in ("activations", "layer"):
        assert bare.memory.get(use) == whole.memory.get(use)
    assert (bare.experts, bare.layers, bare.batch_size) == (whole.experts, whole.layers, whole.batch_size)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve() as (hub, address):
        point(monkeypatch, address, tmp_path / "cache")
        yield hub


def test_headers_on_the_hub_are_enough(hub, demo_model, text, tmp_path):
    """No weight is downloaded: of the file of weights, at most the first 100 kB."""
    weights = {p.name: p.read_bytes() for p in demo_model.iterdir() if p.is_file()}
    hub.files["someone/mini"] = dict(weights)
    recipe = parse_recipe("{quantize: {method: rtn}, calibration: {samples: 4, length: 64, batch_size: 2}}", "t")
    whole = estimate(demo_model, tmp_path / "b", recipe, [text])
    e = estimate("someone/mini", tmp_path / "b", recipe)
    assert e.outline == "the headers of its files" and e.checkpoint_bytes == whole.checkpoint_bytes
    assert e.versions["w2"] == whole.versions["w2"] and e.dense_bytes == whole.dense_bytes
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    broken = hub.files["someone/mini"]["model.safetensors"]
    hub.files["someone/mini"]["model.safetensors"] = broken[:8] + b"[" + broken[9:]
    with pytest.raises(InputError, match="headers of its weights cannot be read"):
        estimate("someone/mini", tmp_path / "b", recipe)
    hub.files["someone/mini"] = {"config.json": hub.files["someone/mini"]["config.json"]}
    assert estimate("someone/mini", tmp_path / "b", recipe).outline == "config.json alone"
    hub.files["someone/cached"] = weights
    open_checkpoint("someone/cached")
    assert estimate("someone/cached", tmp_path / "b", recipe, [text]).outline == "", "weights in the cache are measured"


def pack(bits, group, **more):
    weights = {"num_bits": bits, "type": "int", "group_size": group, "strategy": "group", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, **more}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "says bits 3"),
        ({"quant_method": "fp8", "weight_block_size": [128, 48]}, r"weight_block_size \[128, 48\], or none keeps them"),
        (pack(4, 48), "format pack-quantized, or none keeps them"),
        ({**pack(4, 32), "config_groups": {b: pack(b, 32)["config_groups"]["group_0"] for b in (4, 8)}},
         "config.json alone does not tell"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "does not tell .* quant_algo MIXED_PRECISION"),
    ], ids=str,
)  # fmt: skip
def test_a_quantisation_without_a_version_is_refused(quantization, message, tmp_path):
    config = json.loads((CONFIGS / "gpt-oss-20b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(InputError, match=message):
        open_outline(tmp_path)
