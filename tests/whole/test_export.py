"""A checkpoint again from its bundle alone: every tensor byte for byte, whatever the model is made of."""

import json
import re

import pytest
import tiny_models
import torch
from native_checkpoints import exported, released
from released_kinds import weight
from safetensors.torch import load_file, save_file
from support import NATIVE, Notes, build_from, edit_tensors
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moepack.export import Wanted, export, export_checkpoint
from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pipeline.build import build
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.shrink import shrink
from moepack.reports.verify import verify
from moepack.shared.progress import Reporter


class Steps(Reporter):
    """Keeps the number of steps of the last stage, and their names."""

    def stage(self, name, total):
        self.steps = [total]

    def step(self, detail=""):
        self.steps.append(detail)


def made(checkpoint, folder, text, more=""):
    """Build, dry-run and export; the notes of the build, and the tensors that did not come back."""
    notes, dry, recipe = Notes(), Notes(), parse_recipe(NATIVE + more, "test")
    few = estimate(checkpoint, folder / "bundle", recipe, [text], reporter=dry)
    build(checkpoint, folder / "bundle", recipe, [text], reporter=notes)
    assert [n for n in dry.notes if "export" in n] == [n for n in notes.notes if "export" in n]
    kept = folder / "bundle" / "released.safetensors"
    assert few.carried_bytes == (sum(t.nbytes for t in load_file(kept).values()) if kept.exists() else 0)
    told = Steps()
    assert verify(folder / "bundle", checkpoint, told) == []
    total, *steps, done = told.steps
    assert steps[0] == "outside the layers" and done == "done" and len(steps) == total
    assert ("tensors for an export" in steps) == kept.exists()
    assert ("multi-token prediction" in steps) == ("mtp: keep" in more)
    return notes.notes, exported(folder / "bundle", checkpoint, folder / "again")


def plain(family, folder, demo_model, **extra):
    return tiny_models.save_tiny(family, folder / "checkpoint", demo_model, **extra)


def test_experts_that_bf16_rounds_are_no_checkpoint(demo_model, text, tmp_path):
    """Of float32: experts are held rounded to BF16, as a build says, everything else in float32 as it was."""
    checkpoint, notes = plain("qwen3_moe", tmp_path, demo_model, dtype=torch.float32), Notes()
    build_from(NATIVE, checkpoint, tmp_path / "bundle", [text], reporter=notes)
    assert any("rounded" in n for n in notes.notes) and verify(tmp_path / "bundle", checkpoint) == []
    assert open_bundle(tmp_path / "bundle").manifest.model["expert_dtype"] == "F32"
    assert load_file(tmp_path / "bundle" / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.float32
    (line,) = [n for n in notes.notes if "export" in n]
    assert line.startswith("moepack export will not make the checkpoint again: ")
    assert line.endswith("checkpoint: bf16 is not how its F32 experts were")
    rounded = "bf16 holds the checkpoint's FP32 weights rounded to BF16: bits bf16 writes its values in BF16$"
    with pytest.raises(InputError, match=rounded):
        export_checkpoint(tmp_path / "bundle", tmp_path / "again")
    export(tmp_path / "bundle", tmp_path / "values", "checkpoint", Wanted(bits="bf16"), dry_run=True)


def deepseek(folder, demo_model):
    """A DeepSeek-V4 as released: experts in MXFP4, attention in FP8; its o_a_proj is no Linear, others are small."""
    small = {
        "num_key_value_heads": 1, "n_routed_experts": 4, "moe_intermediate_size": 64, "q_lora_rank": 32,
        "o_lora_rank": 32, "o_groups": 2, "num_hidden_layers": 1, "head_dim": 32, "qk_rope_head_dim": 16,
        "mlp_layer_types": ["moe"], "layer_types": ["sliding_attention"],
    }  # fmt: skip
    path, tensors = plain("deepseek_v4", folder, demo_model, **small), {}
    for seed, (long, tensor) in enumerate(load_file(path / "model.safetensors").items()):
        name = long.removeprefix("model.")
        fp8 = "fp8 blocks E8M0" if re.search(r"\.(wo|wq|wkv|w\d)", name) else None
        kind = "deepseek mxfp4" if ".experts." in name else fp8
        tensors |= weight(kind, *tensor.shape, name.removesuffix(".weight"), seed)[0] if kind else {name: tensor}
    config = json.loads((path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    (path / "config.json").write_text(
        json.dumps({**config, "expert_dtype": "fp4", "quantization_config": quantization})
    )
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_matrices_that_are_decoded_are_kept_as_well(demo_model, text, tmp_path):
    notes, _ = made(deepseek(tmp_path, demo_model), tmp_path, text)
    (line,) = [n for n in notes if "export" in n]
    kept = load_file(tmp_path / "bundle" / "released.safetensors")
    assert {"layers.0.attn.wo_a.weight", "layers.0.attn.wo_a.scale"} <= kept.keys()
    assert f"{len(kept)} tensors (" in line and f"{sum(t.nbytes for t in kept.values()):,} bytes" in line
    edit_tensors(tmp_path / "checkpoint", lambda t: t["layers.0.attn.wo_a.scale"].view(torch.uint8)[0, 0].add_(1))
    problems = [str(p) for p in verify(tmp_path / "bundle", tmp_path / "checkpoint")]
    assert any("layers.0.attn.wo_a.scale differs" in p for p in problems)
    (tmp_path / "bundle" / "released.safetensors").unlink()
    shrink(tmp_path / "bundle", tmp_path / "small", ["mxfp4"])
    with pytest.raises(InputError, match="does not hold its checkpoint as it was"):
        export_checkpoint(tmp_path / "small", tmp_path / "none")


def test_a_tower_whose_matrices_are_cut(demo_model, text, tmp_path):
    """Kimi-K2.5's vision tower has one tensor for q, k and v, of which the model makes three."""
    language = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    language |= tiny_models._MLA | {"num_hidden_layers": 2, "model_type": "deepseek_v3"}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = CONFIG_MAPPING["kimi_k25"](text_config=language, vision_config=vision)
    torch.manual_seed(0)
    path = tmp_path / "checkpoint"
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    tiny_models.copy_tokenizer(demo_model, path)
    notes, _ = made(path, tmp_path, text)
    assert len([n for n in notes if "wqkv" in n and "for moepack export" in n]) == 1
    assert any("wqkv" in n for n in load_file(tmp_path / "bundle" / "released.safetensors"))


@pytest.mark.parametrize("mtp", ["drop", "keep"])
def test_what_the_model_has_no_place_for(mtp, demo_model, text, tmp_path):
    """An output projection that is tied and stored, a rotary table, and an MTP layer in FP8."""
    small = {"num_experts": 4, "moe_intermediate_size": 64, "tie_word_embeddings": True}
    tiny_models.save_tiny("qwen3_moe", tmp_path / "plain", demo_model, **small)
    path = tmp_path / "checkpoint"
    released(tmp_path / "plain", path, "fp8 blocks")
    tensors = load_file(path / "model.safetensors")
    tensors |= {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    tensors |= {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.rotary_emb.inv_freq": torch.arange(3),
    }
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    said, left = made(path, tmp_path, text, f"mtp: {mtp}")
    notes = " ".join(said)
    assert "1 tensors of the checkpoint have no place in the model (a table of rotary embeddings" in notes
    assert left == ({n for n in tensors if "layers.2." in n} if mtp == "drop" else set())
    assert ("are left out, of moepack export too: mtp: keep" in notes) == (mtp == "drop")
    assert "lm_head.weight" in load_file(tmp_path / "bundle" / "released.safetensors")


def test_narrower_dense_versions(demo_model, text, tmp_path):
    """Beside released ones they change nothing; without those an export is refused before it begins."""
    from released_kinds import KINDS

    small = {"num_experts": 4, "moe_intermediate_size": 64, "hidden_size": 128, "head_dim": 64}
    tiny_models.save_tiny("qwen3_moe", tmp_path / "plain", demo_model, **small)
    released(tmp_path / "plain", tmp_path / "checkpoint", "fp8 blocks", KINDS["fp8 blocks"].make)
    made(tmp_path / "checkpoint", tmp_path, text, "dense: [w4]")
    shrink(tmp_path / "bundle", tmp_path / "small", dense=["w4"])
    with pytest.raises(InputError, match="small: has no lossless version of its dense matrices here"):
        export_checkpoint(tmp_path / "small", tmp_path / "none")
    assert not (tmp_path / "none").exists()
