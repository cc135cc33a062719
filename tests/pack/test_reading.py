"""The public reading interface: it gives what was packed, and nothing that is damaged."""

import hashlib
import json

import numpy as np
import pytest
import torch
from broken_rules.extents import EXTENTS
from broken_rules.names import CONFIG, DENSE, W4
from hostile_edits import problems_of

from benchmarks.hostile.small_bundle import DENSE as DENSE_MATRICES
from benchmarks.hostile.small_bundle import DENSE_VERSIONS, LAYERS, MATRICES, VERSIONS, lossless, with_codes
from moepack.calibrate.experts import bits_of
from moepack.pack.codec.bits import bf16_to_float32
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle


def test_experts_are_the_values_that_were_packed(small):
    bundle = open_bundle(small)
    for layer in LAYERS:
        for e in range(3):
            seed = 100 * layer.index + e
            got = bundle.expert("bf16", layer.index, e)
            for m, want in zip(MATRICES, lossless(seed), strict=True):
                weight, bias = got.torch()[m.name], got.torch()[f"{m.name}.bias"]
                assert np.array_equal(bits_of(weight), want.weight)
                assert want.bias is not None
                as_float = bf16_to_float32(want.bias)
                assert np.array_equal(got.numpy()[f"{m.name}.bias"], as_float)
                assert bias.float().tolist() == as_float.tolist()
            for version in VERSIONS[1:]:
                values = bundle.expert(version.name, layer.index, e)
                for m, packed in zip(MATRICES, with_codes(version, seed), strict=True):
                    want = packed.dequantise(version)
                    assert np.array_equal(values.numpy()[m.name], want) and want.shape == (m.rows, m.cols)
                    assert np.array_equal(values.torch()[m.name].numpy(), want)
    for wrong, message in ((("w9", 1, 0), "no version"), (("w4", 0, 0), "layer 0"), (("w4", 1, 3), "expert 3")):
        with pytest.raises(InputError, match=message):
            bundle.expert(*wrong)


def test_what_is_damaged_is_not_given(victim):
    EXTENTS["bf16: another mode"][0](victim)
    with pytest.raises(BundleError, match=r"layer 1, expert 1, version bf16"):
        open_bundle(victim.path).expert("bf16", 1, 1).numpy()
    victim.restore()
    victim.write(W4, (victim.path / W4).read_bytes()[:-1] + b"\x01")
    with pytest.raises(BundleError, match="expert 2, version w4: its bytes do not match"):
        open_bundle(victim.path).expert("w4", 1, 2)
    victim.restore()
    EXTENTS["a byte of a dense matrix that is not signed"][0](victim)
    with pytest.raises(BundleError, match=r"model\.layers\.1\.self_attn\.o_proj, version w8: its bytes do not match"):
        open_bundle(victim.path).dense_matrix("w8", "model.layers.1.self_attn.o_proj")
    open_bundle(victim.path).dense_matrix("w8", "model.layers.1.self_attn.q_proj")


def test_dense_matrices_are_the_values_that_were_packed(small):
    bundle = open_bundle(small)
    assert bundle.manifest.dense == DENSE_MATRICES and bundle.dense_versions == DENSE_VERSIONS
    for number, described in enumerate(DENSE_MATRICES):
        shape = (described.matrix,)
        for version in DENSE_VERSIONS:
            got = bundle.dense_matrix(version.name, described.module)
            if version.plain:
                want = lossless(1000 + number, shape)[0]
                assert np.array_equal(bits_of(got.torch()["weight"]), want.weight)
            else:
                packed = with_codes(version, 1000 + number, shape)[0]
                assert np.array_equal(got.numpy()["weight"], packed.dequantise(version))
                assert got.torch()["weight"].dtype == torch.float32
            assert got.numpy().keys() == ({"weight", "bias"} if described.matrix.bias else {"weight"})
    for wrong, message in ((("w3", "lm_head"), "here are bf16, w8, w4"), (("w8", "lm"), "is not a dense matrix")):
        with pytest.raises(InputError, match=message):
            bundle.dense_matrix(*wrong)


def test_dense_tensors(victim):
    dense = open_bundle(victim.path).dense()
    assert dict(dense) == {"a.weight": (4, 2), "b": ()}
    assert dense.numpy("b") == 1.5 and dense.torch("b").item() == 1.5
    assert dense.dtype("a.weight") == "BF16" and dense.torch("a.weight").dtype == torch.bfloat16
    assert bits_of(dense.torch("a.weight")).reshape(-1).tolist() == list(range(8))
    assert np.array_equal(dense.numpy("a.weight"), dense.torch("a.weight").float().numpy())
    data = (victim.path / DENSE).read_bytes()
    victim.write(DENSE, data[:-1] + b"\x01")
    with pytest.raises(BundleError, match="its bytes do not match"):
        open_bundle(victim.path).dense().numpy("b")
    open_bundle(victim.path).dense(check_digests=False).numpy("b")


def test_dense_tensors_in_several_files(victim):
    from moepack.pack.safetensors_file import make_header

    whole = open_bundle(victim.path).dense().numpy("a.weight")
    first = make_header({"model.layers.1.mlp.experts.down_proj": ("BF16", (1,))}, {}) + bytes(2)
    second = make_header({"a.weight": ("BF16", (4, 2))}, {}) + np.arange(8, dtype=np.uint16).tobytes()
    names = {"model.layers.1.mlp.experts.down_proj": "model-1.safetensors", "a.weight": "model-2.safetensors"}

    def split(index):
        files = {
            "model-1.safetensors": first, "model-2.safetensors": second,
            "model.safetensors.index.json": index if isinstance(index, bytes) else json.dumps(index).encode(),
        }  # fmt: skip
        for name, data in files.items():
            victim.write(name, data)
        entries = {n: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files.items()}
        victim.sign(lambda d: (d["files"].pop(DENSE, None), d["files"].update(entries)))
        return problems_of(victim.path)

    assert split({"metadata": {}, "weight_map": names}) == []
    assert np.array_equal(open_bundle(victim.path).dense().numpy("a.weight"), whole)
    tripwire, weight = names
    assert split({"weight_map": {tripwire: "model-1.safetensors"}}) == []  # a file not in the index is not dense
    for index in (
        {"weight_map": {**names, "c": "model-2.safetensors"}}, {"weight_map": {**names, weight: CONFIG}},
        {"weight_map": {**names, weight: "../model-2.safetensors"}},
        {"weight_map": []}, {"weight_map": {**names, weight: 3}}, [],
    ):  # fmt: skip
        assert [p.kind for p in split(index)] == ["tables"], index
    assert [p.kind for p in split(b'{"weight_map": {}, "weight_map": {}}')] == ["json"]
