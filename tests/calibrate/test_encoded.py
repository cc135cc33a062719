"""Checkpoints stored as block FP8 and MXFP4: decoded as their authors do, and what "lossless" then means."""

import json

import numpy as np
import pytest
import tiny_models
import torch
from released import same
from released_kinds import KINDS
from safetensors.torch import load_file, save_file
from support import Notes, build_from, edit_config, edit_tensors
from support import ids as token_ids

import moepack
from moepack.export import export_checkpoint
from moepack.pack.reader import open_bundle
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify

RECIPE = """
versions: [bf16, w4]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def loaded(path):
    """The model at `path`, by transformers alone, whose import takes seconds that collecting tests should not."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def by_transformers(blocks, scales):
    """MXFP4 weights as transformers decodes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


def both(path, tokenizer, family, quantization, encode):
    """A checkpoint with encoded tensors, and the same model in BF16."""
    coded, plain = (tiny_models.save_tiny(family, path / name, tokenizer) for name in ("coded", "bf16"))
    stored, values = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        made, values[name] = encode(name, tensor)
        stored |= made
    save_file(stored, coded / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    edit_config(coded, quantization_config=quantization)
    return coded, plain


def fp8_checkpoint(path, tokenizer):
    """A DeepSeek-V3 in block FP8, dense projections, a layer for multi-token prediction and all; the same in BF16."""
    kind, rng = KINDS["fp8 blocks"], np.random.default_rng(0)  # the tiny matrices of 48 rows end in half a block

    def encode(name, tensor):
        if not (name.endswith("_proj.weight") or ("_proj" in name and "self_attn" in name and tensor.ndim == 2)):
            return {name: tensor}, tensor
        made, value = kind.make(rng, *tensor.shape)
        return {f"{name.removesuffix('weight')}{n}": t for n, t in made.items()}, torch.from_numpy(value).bfloat16()

    coded, plain = both(path, tokenizer, "deepseek_v3", kind.quantization, encode)
    last = json.loads((coded / "config.json").read_text())["num_hidden_layers"]

    def one_layer_more(tensors):
        of = f"layers.{last - 1}."
        tensors |= {n.replace(of, f"layers.{last}."): t.clone() for n, t in tensors.items() if of in n}
        tensors[f"model.layers.{last}.enorm.weight"] = torch.ones(64, dtype=torch.bfloat16)

    for checkpoint in (coded, plain):
        edit_tensors(checkpoint, one_layer_more)
    return coded, plain


def mxfp4_checkpoint(path, tokenizer):
    """A gpt-oss with its experts in MXFP4, and the same model in BF16, decoded by transformers."""
    rng = torch.Generator().manual_seed(0)

    def encode(name, tensor):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}, tensor
        experts, cols, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(118, 123, (experts, rows, cols // 32), generator=rng, dtype=torch.uint8)
        value = by_transformers(blocks, scales).contiguous()
        assert value.shape == tensor.shape
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, value

    scheme = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return both(path, tokenizer, "gpt_oss", scheme, encode)


@pytest.mark.parametrize(
    ("make", "dtype", "said"),
    [(fp8_checkpoint, "F8_E4M3", "rounded to BF16"), (mxfp4_checkpoint, "MXFP4", "BF16 holds exactly")],
)
def test_a_bundle_of_it_is_the_decoded_model(make, dtype, said, demo_model, text, tmp_path):
    coded, plain = make(tmp_path, demo_model)
    notes = Notes()
    build_from(RECIPE + "mtp: keep\n", coded, tmp_path / "bundle", [text], reporter=notes)
    assert verify(tmp_path / "bundle", coded) == []
    assert verify(tmp_path / "bundle", plain) == []  # every dense tensor, every expert and MTP, bit for bit
    before, after = (load_file(path / "model.safetensors") for path in (plain, tmp_path / "bundle"))
    mtp = {n: t for n, t in before.items() if "layers.3." in n}
    assert bool(mtp) == (dtype == "F8_E4M3") and all(same(after[n], t) for n, t in mtp.items())
    assert not any("scale" in n for n in after)
    assert open_bundle(tmp_path / "bundle").manifest.model["expert_dtype"] == dtype
    assert any(said in n for n in notes.notes) and inspect(tmp_path / "bundle")["expert_dtype"] == dtype
    assert not any("no place in the model" in n for n in notes.notes)  # scales are not left over
    config = json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "moepack"}
    ids = token_ids(40, 1, 2)
    model = loaded(plain)
    ours = moepack.load(tmp_path / "bundle", dtype=torch.float32)
    with torch.inference_mode():
        want, got = model(ids).logits, ours(ids).logits
    assert float((got - want).norm() / want.norm()) <= 1e-3  # as in test_families: another order of sums


@pytest.mark.numeric
def test_gpt_oss_code_for_code(demo_model, text, tmp_path):
    """Biases, transposed and interleaved matrices: transformers' logits, and the checkpoint's bytes from the bundle."""
    coded, plain = mxfp4_checkpoint(tmp_path, demo_model)
    build_from(RECIPE.replace("bf16, w4", "native, w2"), coded, tmp_path / "b", [text])
    bundle = open_bundle(tmp_path / "b")
    assert [v.name for v in bundle.versions] == ["mxfp4", "w2"] and all(m.bias for m in bundle.layers[0].matrices)
    assert verify(tmp_path / "b", coded) == []
    ids = token_ids(40, 1, 2)
    with torch.inference_mode():
        want = loaded(plain)(ids).logits
        got = moepack.load(tmp_path / "b", dtype=torch.float32)(ids).logits
    assert float((got - want).norm() / want.norm()) < 1e-5
    export_checkpoint(tmp_path / "b", tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (coded, tmp_path / "again"))
    assert before.keys() == after.keys() and all(same(after[name], tensor) for name, tensor in before.items())
