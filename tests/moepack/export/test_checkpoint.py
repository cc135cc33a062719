"""`export --to checkpoint` at a width: the model's own tensors, dequantised; and what every target refuses."""

import json
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from support import NATIVE, build_from, flip, ok, refused
from transformers import AutoModelForCausalLM

from moepack.export import Wanted, export, export_checkpoint
from moepack.export.choice import named
from moepack.export.targets import TARGETS
from moepack.pack.errors import TargetError
from moepack.pack.reader import open_bundle


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "mixtral"])
def test_every_layout(family, demo_model, text, tmp_path):
    """One tensor an expert, all of a layer in one, transposed, with biases; in the order and names of the original."""
    checkpoint = tiny_models.save_tiny(family, tmp_path / "checkpoint", demo_model)
    build_from(NATIVE, checkpoint, tmp_path / "bundle", [text])
    made = export(tmp_path / "bundle", tmp_path / "plain", wanted=Wanted(bits="bf16"))
    assert made.exact and made.loss == 0
    assert made.bits == (16 if family != "gpt_oss" else 16 + 16 / 72)  # a bias of 3 numbers for 216 weights
    export_checkpoint(tmp_path / "bundle", tmp_path / "again")
    assert not (tmp_path / "bundle" / "released.safetensors").exists(), "no tensor is kept beside the versions for it"
    before = load_file(checkpoint / "model.safetensors")
    for path in (tmp_path / "plain", tmp_path / "again"):
        after = load_file(path / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
        assert json.loads((path / "config.json").read_text()) == json.loads((checkpoint / "config.json").read_text())
    export(tmp_path / "bundle", tmp_path / "w2", wanted=Wanted(bits="2"))
    bundle = open_bundle(tmp_path / "bundle")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "w2", dtype=torch.bfloat16)
    for layer in bundle.layers:
        module = model.get_submodule(layer.module)
        for e in range(layer.experts):
            for name, values in bundle.expert("w2", layer.index, e).torch().items():
                matrix, _, bias = name.partition(".")
                own = getattr(module, f"{matrix}_proj{'_bias' if bias else ''}")[e]
                own = own.mT if module.is_transposed and not bias else own
                assert torch.equal(own, values.to(torch.bfloat16)), (layer.index, e, name)


def test_a_map_and_shards(bundle, tmp_path):
    """A version an expert, and files of at most so many bytes, with an index that transformers reads."""
    opened = open_bundle(bundle)
    rows = [[("bf16", "w4", "w2")[(i + e) % 3] for e in range(16)] for i in range(4)]
    (tmp_path / "map.json").write_text(json.dumps({"versions": rows}))
    made = export(bundle, tmp_path / "out", wanted=Wanted(map=str(tmp_path / "map.json"), shard="1MB"))
    sizes = [(tmp_path / "out" / name).stat().st_size for name in made.files]
    assert len(sizes) > 3 and sum(sizes) == made.bytes
    assert all(sum(t.nbytes for t in load_file(tmp_path / "out" / n).values()) <= 1_048_576 for n in made.files)
    assert made.versions == {n: sum(r.count(n) for r in rows) for n in ("bf16", "w4", "w2")}
    tables = opened.calibration()
    losses = [x.relative[range(16), tables.columns(r)].sum() for x, r in zip(tables.layers, rows, strict=True)]
    assert made.loss == pytest.approx(sum(losses) / 64)
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_submodule(opened.layers[1].module)
    for e, name in enumerate(rows[1]):
        own = opened.expert(name, opened.layers[1].index, e).torch()["down"]
        assert torch.equal(got.down_proj[e].to(torch.bfloat16), own.to(torch.bfloat16))


def test_a_dry_run_writes_nothing(bundle, asked, tmp_path):
    """And says what the export then takes."""
    dry = json.loads(ok(asked(bundle, "--bits", "3", "--json", "--dry-run")))
    assert not (tmp_path / "out").exists()
    made = json.loads(ok(asked(bundle, "--bits", "3", "--json")))
    assert made.pop("files") == ["model.safetensors"] and dry.pop("files") == [] and made == dry
    assert made["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("bits", "here", "name"),
    [
        ("4", "w4d5 w4", "w4"),
        ("3", "t3 w3d4", "w3d4"),
        ("3", "t3 t2", "t3"),
        ("2", "t2d3", "t2d3"),
        ("t2", "t2 w2", "t2"),
    ],
)
def test_what_bits_mean(bits, here, name):
    versions = [SimpleNamespace(name=version) for version in here.split()]
    assert named(SimpleNamespace(path="b", versions=versions), TARGETS["checkpoint"], bits) == name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "onnx"), f"--to onnx: there are {', '.join(TARGETS)}"),
        (("--bits", "7"), "--bits 7: has no version 'w7': here are"),
        (("--bits", "4", "--fit", "1GB"), "--bits and --fit: each chooses what to export: give only one"),
        (("--map", "widths"), "--map widths: give a .json file"),
        (("--bits", "4", "--scales", "fp64"), "--scales fp64: there are bf16, fp32"),
        (("--scales", "fp32"), "--scales fp32: --to checkpoint has no choice of scales: leave"),
        (("--bits", "4", "--shard-size", "0"), "--shard-size 0: the size must be above 0"),
        (("--bits", "4", "--dense", "w8"), "--dense w8: its dense matrices have no versions"),
        (("--fit", "1MB"), "--fit 1MB: the smallest that is exported takes"),
    ],
)
def test_what_cannot_be_is_refused(words, said, bundle, asked, tmp_path):
    refused(asked(bundle, *words), said)
    assert list(tmp_path.iterdir()) == []


def test_it_is_not_written_into_its_bundle(bundle, tmp_path):
    """By whatever name."""
    (tmp_path / "link").symlink_to(bundle)
    for name in (bundle, tmp_path / "link", bundle.parent / "x" / ".." / bundle.name):
        with pytest.raises(TargetError, match="lies in the bundle"):
            export(bundle, name / "out", wanted=Wanted(bits="4"))


def test_a_damaged_tokenizer_is_not_copied(damaged, asked, tmp_path):
    flip(damaged / "tokenizer.json", 1000)
    refused(asked(damaged, "--bits", "4"), "tokenizer.json")
    assert not (tmp_path / "out").exists()
