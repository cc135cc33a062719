"""Every tensor of a checkpoint is served, equal to the one it is tied to, or left out by a rule; others are refused.

The fault is silence: a bundle that lacks, or has twice, what its checkpoint holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from support import RTN
from torch import Tensor
from transformers import AutoModelForCausalLM

import moepack
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.stream import StreamedModel
from moepack.pack.errors import InputError
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.verify import verify

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
EXPERT = "model.layers.0.mlp.experts.{}.down_proj.weight"
Tensors = dict[str, Tensor]


def planted(model: Path, path: Path, change: Callable[[Tensors], None], **config: object) -> Path:
    """A copy of a checkpoint with its tensors and its configuration changed."""
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(document | config))
    return path


def stacked(tensors: Tensors) -> None:
    rows = [tensors[EXPERT.format(e)] for e in range(16)]
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.stack(rows)


def a_layer_more(tensors: Tensors, *more: str) -> None:
    last = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    tensors |= last | {f"model.layers.2.{name}": torch.ones(1) for name in more}


REFUSED: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "a tensor of no rule": (lambda t: t.update(odd=torch.ones(1)), "odd has no place in the model"),
    "an expert more": (lambda t: t.update({EXPERT.format(16): t[EXPERT.format(0)].clone()}), "down_proj"),
    "an expert less": (lambda t: t.pop(EXPERT.format(15)), "down_proj"),
    "fused and separate": (stacked, "are both model.layers.0.mlp.experts.down_proj"),
    "a layer more": (a_layer_more, r"model\.layers\.2\..* beyond the 2 of config.json"),
    "neither head nor table": (lambda t: t.pop(TABLE), TABLE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, short_model: Path, tmp_path: Path) -> None:
    change, words = REFUSED[case]
    path = planted(short_model, tmp_path / "planted", change)
    with pytest.raises(InputError, match=words):
        StreamedModel(open_checkpoint(path)).load(0)


def test_a_head_that_is_not_tied_and_not_there(short_model: Path, tmp_path: Path) -> None:
    path = planted(short_model, tmp_path / "planted", lambda t: None, tie_word_embeddings=False)
    with pytest.raises(InputError, match=f"nothing for {HEAD}"):
        StreamedModel(open_checkpoint(path))


def test_a_tensor_in_two_files(short_model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(short_model, tmp_path / "planted"))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    files = {"model-1-of-2.safetensors": dict(tensors), "model-2-of-2.safetensors": {TABLE: tensors[TABLE] + 1}}
    for name, some in files.items():
        save_file(some, path / name, {"format": "pt"})
    places = dict.fromkeys(tensors, "model-1-of-2.safetensors") | {TABLE: "model-2-of-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match=rf"{TABLE} is in model-\d-of-2\.safetensors and in model-\d-of-2"):
        open_checkpoint(path)


LEFT_OUT = {
    "model.rotary_emb.inv_freq": "rotary",
    "model.layers.1.self_attn.k_scale": "of a cache",
    "model.layers.0.self_attn.rotary_emb.cos_cached": "rotary",
}


def test_left_out_by_a_rule_that_says_why(short_model: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        a_layer_more(tensors, "eh_proj.weight")
        tensors |= {name: torch.ones(1) for name in LEFT_OUT}

    stream = StreamedModel(open_checkpoint(planted(short_model, tmp_path / "planted", change)))
    assert stream.unused == sorted(LEFT_OUT) and len(stream.mtp) > 16 * 3
    for name, words in LEFT_OUT.items():
        assert words in stream.left_out[name]


@pytest.mark.parametrize("there", [(HEAD,), (HEAD, TABLE), (TABLE,)], ids=str)
def test_a_tied_head_is_read_wherever_it_is(there: tuple[str, ...], short_model: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        table = tensors.pop(TABLE)
        tensors |= {name: table.clone() for name in there}

    stream = StreamedModel(open_checkpoint(planted(short_model, tmp_path / "planted", change)))
    table = load_file(short_model / "model.safetensors")[TABLE]
    assert not stream.untied and torch.equal(stream.load(None)[TABLE], table)
    assert HEAD not in stream.names(None)


def test_another_head_than_the_tied_one_is_served(short_model: Path, text: Path, tmp_path: Path) -> None:
    """As by transformers: logits, dense versions of the head, `verify`; a bundle that says it is tied is found."""

    def change(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[TABLE].flip(0).contiguous()

    path = planted(short_model, tmp_path / "planted", change)
    build(path, tmp_path / "bundle", parse_recipe(f"versions: [bf16, w2]\ndense: [w8]\n{RTN}", "test"), [text])
    ids = torch.arange(5, 40)[None]
    with torch.inference_mode():
        right = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(ids).logits
        for dense in (None, "w8"):
            ours = moepack.load(tmp_path / "bundle", policy="static:bf16", dense=dense)
            assert (ours(ids).logits - right).abs().max() <= 0.02 * right.abs().max()
            ours.moepack.close()
    assert verify(tmp_path / "bundle", path) == []
    found = verify(tmp_path / "bundle", short_model)
    assert any(HEAD in problem.message for problem in found), found


def test_biases_of_a_router_stay_in_float32(demo_model: Path, text: Path, tmp_path: Path) -> None:
    """`e_score_correction_bias` is a buffer in FP32: with the bits of BF16 other experts are chosen."""
    path = tiny_models.save_tiny("deepseek_v3", tmp_path / "checkpoint", demo_model)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    exact = torch.linspace(0.1, 0.2, 8) + 1e-6
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: exact}, path / "model.safetensors", {"format": "pt"})
    build(path, tmp_path / "bundle", parse_recipe(f"versions: [bf16, w2]\n{RTN}", "test"), [text])
    model = moepack.load(tmp_path / "bundle", policy="static:bf16")
    served = model.get_parameter_or_buffer(name)
    assert served.dtype == torch.float32 and torch.equal(served, exact)
    model.moepack.close()
