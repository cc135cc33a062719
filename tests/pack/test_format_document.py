"""The format document suffices: a reader written from it alone finds the same numbers."""

import json

import independent_reader as reader
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from support import ROOT

from benchmarks.hostile.small_bundle import RELEASED, VERSIONS, released_versions, write_small_bundle
from benchmarks.random_matrices import gaussian
from moepack.pack.codec.exponent import CODED, WIDE, parse
from moepack.pack.reader import open_bundle
from moepack.pack.spec import HINT, Matrix, Version, encoding_of


def agree(path, versions, dtype="BF16"):
    """See that in a small bundle of these versions the second reader finds the weights that ours does."""
    manifest = reader.read_manifest(write_small_bundle(path, versions, dtype))
    bundle = open_bundle(path)
    assert bundle.versions == versions
    for version, record in zip(versions, manifest["versions"], strict=True):
        if version.plain:
            continue
        theirs = reader.values(reader.read_extent(path, manifest, version.name, 4, 2), manifest["layers"][1], record)
        expert = bundle.expert(version.name, 4, 2)
        ours = [v for n, v in expert.numpy().items() if "bias" not in n]
        for i, (matrix, a, b) in enumerate(zip(expert.decode(), ours, theirs, strict=True)):
            assert version.released or int(matrix.codes.max()) == 2 ** version.at(i).bits - 1
            assert np.array_equal(a.astype(np.float64), np.array(b))


def test_every_affine_version_at_odd_shapes(tmp_path):
    """Partial words, groups and blocks of rows, biases; those that the demo's bundle does not have, too."""
    agree(tmp_path / "b", VERSIONS)


@pytest.mark.parametrize("name", ["w4d5", "w3d4", "w2d3", "w1d2", "t2d3"])
def test_down_has_a_bit_more(name, tmp_path):
    """Every code of `down` has its own bits, and its own midpoint."""
    agree(tmp_path / "b", tuple(Version.of(v, 128) for v in ("bf16", "w8", name)))


@pytest.mark.parametrize(("scale_bits", "symmetric"), [(8, False), (16, True), (8, True)])
@pytest.mark.parametrize("names", [("w8", "w3"), ("w2d3", "w1"), ("t3", "t2")])
def test_fields_of_a_version(names, scale_bits, symmetric, tmp_path):
    """Scales of a byte, and symmetric codes."""
    fields = {"scale_bits": scale_bits, "symmetric": symmetric}
    agree(tmp_path / "b", (Version.of("bf16"), *(Version.of(name, 128, **fields) for name in names)))
    record = reader.read_manifest(tmp_path / "b")["versions"][1]
    assert record.get("scale_bits", 16) == scale_bits and record["zero"] == (
        "none" if "t3" in names else "symmetric" if symmetric else "stored"
    )


@pytest.mark.parametrize(("name", "group"), [of for of in RELEASED if not encoding_of(of[0]).entropy_coded])
def test_every_released_version_at_odd_shapes(name, group, tmp_path):
    """Partial words, groups and blocks, biases; products rounded to float32 as the page says."""
    versions = released_versions(name, group)
    agree(tmp_path / "b", versions, next(iter(versions[0].holds)))


def test_lossless_version_is_the_checkpoint(bundle, demo_model):
    manifest = reader.read_manifest(bundle)
    theirs = reader.lossless_bits(reader.read_extent(bundle, manifest, "bf16", 2, 3), manifest["layers"][2])
    tensors = load_torch(demo_model / "model.safetensors")
    prefix = "model.layers.2.mlp.experts.3."
    gate_up = torch.cat([tensors[prefix + "gate_proj.weight"], tensors[prefix + "up_proj.weight"]])
    for bits, weight in zip(theirs, (gate_up, tensors[prefix + "down_proj.weight"]), strict=True):
        assert bits == weight.contiguous().view(torch.uint16).flatten().tolist()
    opened = open_bundle(bundle)
    ours = Version.of("bf16").decode(opened.layers[2].matrices, opened.extent("bf16", 2, 3))
    for bits, m in zip(theirs, ours, strict=True):
        assert bits == m.weight.reshape(-1).tolist()


@pytest.mark.parametrize("apart", [False, True])
def test_fp8_codes_as_they_are_stored(apart):
    """A coded plane of several tiles, one that is too small to gain, and rows so far `apart` that tiles are wide."""
    matrices, version = (Matrix("gate_up", 200, 130, True), Matrix("down", 9, 33)), Version.of("fp8", 32)
    values = [gaussian(m, version, i) for i, m in enumerate(matrices)]
    if apart:
        small = values[0].codes[5::16]
        small[:] = small & 0x87 | (small & 3) << 3  # four rare exponents, so six bits a code
    extent, _ = version.encode(matrices, values)
    shapes = {"matrices": [{"rows": m.rows, "cols": m.cols, "bias": m.bias} for m in matrices]}
    theirs = reader.fp8_values(extent.tobytes(), shapes, version.record())
    stream = parse(extent[64 : 64 + int(extent[4:8].view("<u4")[0])], 16 * 13 * 132, fp8=True)
    assert {int(word) >> 16 for word in stream.stream[stream.tile_start[:-1]]} == {WIDE if apart else CODED}
    for ours, found in zip(version.decode(matrices, extent), theirs, strict=True):
        assert np.array_equal(ours.dequantise(version), np.array(found).astype(np.float32))


def test_dense_matrices(small):
    manifest, opened = reader.read_manifest(small), open_bundle(small)
    for number, described in enumerate(manifest["dense"]["matrices"]):
        shape = {"matrices": [described]}
        for version in manifest["dense"]["versions"]:
            extent = reader.read_dense_extent(small, manifest, version["name"], number)
            ours = opened.dense_matrix(version["name"], described["module"])
            if version["name"] == "bf16":
                theirs = [reader.bf16(bits) for bits in reader.lossless_bits(extent, shape)[0]]
                assert np.array_equal(ours.numpy()["weight"].reshape(-1), np.array(theirs, np.float32), equal_nan=True)
            else:
                theirs = reader.values(extent, shape, version)[0]
                assert np.array_equal(ours.numpy()["weight"].astype(np.float64), np.array(theirs))


def test_tables_are_what_the_document_says(bundle):
    tables = load_file(bundle / "calibration.safetensors")
    shapes = {
        "mse": (16, 5), "relative": (16, 5), "gated": (16, 5), "method": (16, 5), "tokens": (16,), "gate_sum": (16,),
        "prefill_counts": (16, 16), "decode_counts": (16, 16), "prefill_gates": (16, 16), "coactivation": (16, 16),
        "reuse": (), "mse_error": (16, 5), "relative_error": (16, 5), "gated_error": (16, 5),
    }  # fmt: skip
    assert {k.rpartition(".")[2] for k in tables} == set(shapes)
    for layer in range(4):
        for name, shape in shapes.items():
            assert tables[f"layers.{layer}.{name}"].shape == shape, name
        tokens = tables[f"layers.{layer}.tokens"]
        both = tables[f"layers.{layer}.prefill_counts"] + tables[f"layers.{layer}.decode_counts"]
        assert tokens.sum() == 16 * 128 * 2 and np.array_equal(both.sum(0), tokens)
        assert np.array_equal(np.diag(tables[f"layers.{layer}.coactivation"]), tokens)
        assert (tables[f"layers.{layer}.relative"][:, 0] == 0).all()
        for name in ("mse", "relative", "gated"):
            loss, error = tables[f"layers.{layer}.{name}"], tables[f"layers.{layer}.{name}_error"]
            assert (error[:, 0] == 0).all() and (error[:, 1:] > 0).all() and (error < loss + (loss == 0)).all()


def test_tripwire_and_config(bundle, demo_model):
    with safe_open(bundle / "model.safetensors", framework="pt") as f:
        assert f.get_slice("model.layers.0.mlp.experts.down_proj").get_shape() == [1]
        assert f.get_slice(HINT).get_shape() == [1] and f"`{HINT}`" in (ROOT / "pack" / "FORMAT.md").read_text()
    config = json.loads((bundle / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "moepack"}
    assert config == json.loads((demo_model / "config.json").read_text())
