"""`export --to gptq`, read back by moepack's own reader of GPTQ checkpoints and by gptqmodel."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from support import python, refused

from moepack.calibrate.released import find_encoded, read_scheme
from moepack.export import Wanted, export
from moepack.pack.reader import open_bundle
from moepack.pack.safetensors_file import read_header

# gptqmodel changes transformers' classes: it has a process of its own.
THEIRS = """
import sys, torch
from pathlib import Path
from gptqmodel import BACKEND, GPTQModel
from moepack.pack.reader import open_bundle
bundle, versions = open_bundle(sys.argv[2]), sys.argv[3].split(",")
model = GPTQModel.load(sys.argv[1], device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.bfloat16).model
same = 0
for layer, version in zip(bundle.layers, versions, strict=True):
    for e in range(layer.experts):
        one = bundle.expert(version, layer.index, e).torch()
        gate, up = one["gate_up"].chunk(2)
        for name, own in (("gate", gate), ("up", up), ("down", one["down"])):
            linear = model.get_submodule(f"{layer.module}.{e}.{name}_proj")
            same += torch.equal(linear.dequantize_weight().T, own.to(torch.bfloat16))
with torch.no_grad():
    logits = model(torch.arange(48)[None] * 83 % 4096).logits
torch.save(logits.float(), sys.argv[4])
print(f"same {same}")
"""


@pytest.mark.parametrize(("bits", "zeros"), [(8, "symmetric"), (4, "integer")])
def test_our_own_reader_reads_our_values(bits, zeros, of_zeros, tmp_path):
    """Bit for bit before they are rounded: codes, scales and zero points are the bundle's; dense matrices as well."""
    bundle = open_bundle(of_zeros(zeros))
    made = export(bundle.path, tmp_path / "out", "gptq", Wanted(bits=str(bits), dense="w8"))
    headers, stored = (f(tmp_path / "out" / "model.safetensors") for f in (read_header, load_file))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["bits"] = 8  # moepack reads one width
    dense = find_encoded(tmp_path / "out", read_scheme(tmp_path / "out", config), _only(headers.tensors, "self_attn"))
    config["quantization_config"]["bits"] = bits
    found = find_encoded(tmp_path / "out", read_scheme(tmp_path / "out", config), _only(headers.tensors, "experts"))
    assert config["quantization_config"]["sym"] == (zeros == "symmetric")
    for d in bundle.manifest.dense:
        own = bundle.dense_matrix("w8", d.module).torch()["weight"]
        assert torch.equal(dense[f"{d.module}.weight"].decode(stored.__getitem__), own.to(torch.bfloat16))
    for layer in bundle.layers:
        for e in range(layer.experts):
            own = bundle.expert(f"w{bits}", layer.index, e).decode()[1]
            one = found[f"{layer.module}.{e}.down_proj.weight"]
            assert torch.equal(one.codes(stored.__getitem__), torch.from_numpy(own.codes))
            assert torch.equal(one.scale(stored.__getitem__), torch.from_numpy(own.scale))
            zero = one.zeros(stored.__getitem__)
            assert zero is not None
            middle = torch.full_like(zero, 128)  # in steps of 2^(bits-8), where the bundle stores none
            assert torch.equal(zero, middle if own.zero is None else torch.from_numpy(own.zero))
    assert made.versions == {f"w{bits}": 32} and made.dense == ("w8",)


def _only(tensors, part):
    return {n: t for n, t in tensors.items() if part in n}


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="gptqmodel is not installed")
def test_gptqmodel_reads_our_values(of_zeros, tmp_path):
    """Its weights are ours rounded to BF16, at a width a layer; its logits differ from `static` by BF16's rounding."""
    import moepack

    bundle = open_bundle(of_zeros("integer"))
    rows = {"versions": [["w4"] * 16, ["w3"] * 16]}
    (tmp_path / "map.json").write_text(json.dumps(rows))
    export(bundle.path, tmp_path / "out", "gptq", Wanted(map=str(tmp_path / "map.json")))
    said = python("-c", THEIRS, tmp_path / "out", bundle.path, "w4,w3", tmp_path / "logits.pt")
    assert said.splitlines()[-1] == f"same {2 * 16 * 3}"
    ours = moepack.load(bundle.path, policy=f"static:{tmp_path / 'map.json'}", dtype="bfloat16")
    with torch.no_grad():
        want = ours(torch.arange(48)[None] * 83 % 4096).logits.float()
    ours.moepack.close()
    got = torch.load(tmp_path / "logits.pt")
    assert (got - want).norm() / want.norm() < 0.02  # 0.006 to 0.010 measured; weights and sums in BF16: 2**-9 each


def test_what_gptq_does_not_hold(of_zeros, asked, tmp_path):
    answer = asked(of_zeros("fractional"), "--to", "gptq", "--bits", "2")
    refused(answer, "--to gptq: w2 is not exported: ", "zero points are not whole codes")
    assert not (tmp_path / "out").exists()
