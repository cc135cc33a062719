"""`export --to compressed-tensors`, read back by the format's own library and by transformers."""

import json
from importlib.util import find_spec

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from support import NATIVE, Notes, build_from, refused

import moepack
from moepack.export import Wanted, export
from moepack.pack.reader import open_bundle

# Importing the library takes seconds, which no process should spend that only collects tests.
pytestmark = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")


def experts(bundle, of):
    """Names and exact weights of a Qwen3-MoE's experts; `of` names the version of one."""
    for layer in bundle.layers:
        for e in range(layer.experts):
            one = bundle.expert(of(layer.index, e), layer.index, e).torch()
            gate, up = one["gate_up"].chunk(2)
            for name, own in (("gate", gate), ("up", up), ("down", one["down"])):
                yield f"{layer.module}.{e}.{name}_proj", own


def decompressed(path):
    """What the library makes of a module, found as it finds modules: by the targets of the config's groups."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils.match import is_match

    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    schemes = [QuantizationScheme(**g) for g in config["config_groups"].values()]

    def weight(module):
        linear = torch.nn.Linear(1, 1)
        (scheme,) = [s for s in schemes if is_match(module, linear, s.targets, config["ignore"])]
        own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == module}
        return BaseCompressor.get_value_from_registry(config["format"]).decompress(own, scheme)["weight"]

    return weight


@pytest.mark.parametrize(("bits", "zeros"), [(8, "integer"), (4, "integer"), (3, "symmetric"), (2, "integer")])
def test_the_library_reads_our_values(zeros, bits, of_zeros, tmp_path):
    """Bit for bit with FP32 scales, rounded to BF16 with BF16 ones; dense matrices as well; nothing else changes."""
    bundle = open_bundle(of_zeros(zeros))
    for scales in ("fp32", "bf16"):
        out = tmp_path / scales
        wanted = Wanted(bits=str(bits), dense="w8", scales=scales)
        made = export(bundle.path, out, "compressed-tensors", wanted)
        weight = decompressed(out)
        dense = [(d.module, bundle.dense_matrix("w8", d.module).torch()["weight"]) for d in bundle.manifest.dense]
        for module, own in (*experts(bundle, lambda _, e: f"w{bits}"), *dense):
            assert torch.equal(weight(module), own if scales == "fp32" else own.to(torch.bfloat16)), module
        assert made.exact == (scales == "fp32") and made.dense == ("w8",)
        stored = load_file(out / "model.safetensors")
        assert any(n.endswith("zero_point") for n in stored) == (zeros == "integer")
    others = bundle.dense()
    assert all(torch.equal(stored[n], others.torch(n)) for n in others)


def test_one_width_a_layer(of_zeros, tmp_path):
    """`--fit` takes the widths that fit; each layer is its own group."""
    bundle = open_bundle(of_zeros("integer"))
    sizes = [export(bundle.path, tmp_path / b, "compressed-tensors", Wanted(bits=b), True).bytes for b in ("4", "3")]
    most = sum(sizes) // 2 + 1000
    made = export(bundle.path, tmp_path / "fit", "compressed-tensors", Wanted(fit=str(most)))
    assert most - 4000 < made.bytes <= most and made.versions == {"w4": 16, "w3": 16}
    config = json.loads((tmp_path / "fit" / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert {f"w{g['weights']['num_bits']}" for g in groups} == made.versions.keys()
    weight = decompressed(tmp_path / "fit")
    tables = bundle.calibration()
    chosen = {}
    for x in bundle.layers:
        target = f"re:.*layers\\.({x.index})\\.mlp\\.experts\\.\\d+\\..*"
        (bits,) = [g["weights"]["num_bits"] for g in groups if target in g["targets"]]
        chosen[x.index] = f"w{bits}"
    for module, own in experts(bundle, lambda layer, e: chosen[layer]):
        assert torch.equal(weight(module), own.to(torch.bfloat16)), module
    lost = sum(x.relative[:, tables.versions.index(chosen[x.index])].sum() for x in tables.layers)
    assert made.loss == pytest.approx(lost / 32)


def test_transformers_loads_it(of_zeros, tmp_path):
    """Its logits are those of `static:w3`, but for the order of sums (float32); symmetric codes alone."""
    from transformers import AutoModelForCausalLM

    bundle, notes = of_zeros("symmetric"), Notes()
    export(bundle, tmp_path / "out", "compressed-tensors", Wanted(bits="3", scales="fp32"), reporter=notes)
    ids = torch.randint(0, 4096, (2, 48), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = moepack.load(bundle, policy="static:w3", dtype="float32")
    with torch.no_grad():
        got, want = theirs(ids).logits, ours(ids).logits
    ours.moepack.close()
    assert (got - want).norm() / want.norm() < 1e-5 and notes.notes == []
    export(of_zeros("integer"), tmp_path / "zeros", "compressed-tensors", Wanted(bits="4"), True, notes)
    assert len(notes.notes) == 1 and "symmetric" in notes.notes[0]


def test_fractional_zero_points_are_refused(of_zeros, asked, tmp_path):
    """By how many there are and what to round them would cost; experts' and dense matrices'."""
    bundle = open_bundle(of_zeros("fractional"))
    total = sum(2 * x.experts * m.rows * (m.cols // 32) for x in bundle.layers[:1] for m in x.matrices)
    command = bundle.path, "--to", "compressed-tensors"
    refused(asked(*command, "--bits", "4"), f"of its {total:,} zero points are not whole codes", "zeros: integer or ")
    refused(asked(*command, "--bits", "8", "--dense", "w4"), "w4 of dense matrices is not exported: ", "zeros: integer")
    refused(asked(*command, "--bits", "1"), "w1 is not exported: it is not integer codes of 2 to 8 bits")
    refused(asked(*command, "--bits", "bf16"), "bf16 is not exported: it is not integer codes")
    refused(asked(*command), "say what to export, by --bits, --map or --fit: here are w8")
    refused(asked(*command, "--map", tmp_path / "no.json"), "cannot be read")
    rows = [["w8", "w4"] * 8 for _ in bundle.layers]
    (tmp_path / "map.json").write_text(json.dumps({"versions": rows}))
    mixed = asked(of_zeros("integer"), "--to", "compressed-tensors", "--map", tmp_path / "map.json")
    refused(mixed, "has one width for all experts of a layer, and the map gives layer 0 w4, w8")
    assert not (tmp_path / "out").exists()


def test_experts_in_one_tensor_are_refused(demo_model, text, asked, tmp_path):
    checkpoint = tiny_models.save_tiny("gpt_oss", tmp_path / "checkpoint", demo_model, intermediate_size=64)
    build_from(NATIVE.replace("native, w2", "w4"), checkpoint, tmp_path / "bundle", [text])
    answer = asked(tmp_path / "bundle", "--to", "compressed-tensors", "--bits", "4")
    refused(answer, "model.layers.0.mlp.experts.gate_up_proj holds all experts of a layer, or is turned")
