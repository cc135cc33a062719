"""Layers for multi-token prediction: known by name, left out or kept by the recipe, and used by who guesses ahead."""

import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from support import Notes, build_from, edit_tensors, tree
from support import ids as token_ids

import moepack
from moepack.calibrate import skeleton
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.stream import StreamedModel
from moepack.families.mtp import mtp_patterns, mtp_tensors
from moepack.pack.errors import InputError
from moepack.pipeline.artifacts import save
from moepack.pipeline.build import build
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.needs import needs_of
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.verify import verify

RECIPE = """
versions: [bf16, w4]
quantize: {{method: rtn, group_size: 32, loss_tokens: 64}}
calibration: {{samples: 4, length: 64, batch_size: 2}}
mtp: {}
"""


def test_which_tensors_they_are():
    """By number behind the last layer, or by name; another tensor of no use is none of them."""
    names = [
        "model.layers.60.mlp.gate.weight", "model.layers.61.eh_proj.weight", "model.layers.61.mlp.experts.0.up_proj",
        "mtp.layers.0.mlp.gate.weight", "model.mtp_block.0.weight", "model.mtp.layers.0.enorm.weight",
        "model.mtp_layers.0.attn_hc.fn", "mtp_dspark.norm.weight",
        "model.smtp.weight", "visual.blocks.70.weight", "model.extra.weight",
    ]  # fmt: skip
    assert mtp_tensors(names, 61) == [*names[1:3], *names[3:8]]
    assert mtp_tensors(names, 62) == names[3:8]
    named = {r"^mtp\.", r"^model\.mtp_block\.", r"^model\.mtp\.", r"^model\.mtp_layers\.", r"^mtp_dspark\."}
    assert mtp_patterns(names, 61) == {r"^model\.layers\.61\.", *named}


@pytest.fixture(scope="module")
def checkpoint(demo_model, tmp_path_factory):
    """glm4_moe of three layers, its third's tensors again as layer 3 with what MTP has beside a layer, and a rotary
    table."""
    path = tiny_models.save_tiny("glm4_moe", tmp_path_factory.mktemp("mtp") / "checkpoint", demo_model)
    tensors = load_file(path / "model.safetensors")
    g = torch.Generator().manual_seed(3)
    extra = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if ".layers.2." in n}
    extra |= {f"model.layers.3.{n}.weight": torch.ones(64, dtype=torch.bfloat16) for n in ("enorm", "hnorm")}
    extra["model.layers.3.shared_head.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    extra["model.layers.3.eh_proj.weight"] = torch.randn(64, 128, generator=g).bfloat16() * 0.1
    save_file(
        {**tensors, **extra, "model.rotary_emb.inv_freq": torch.zeros(1)}, path / "model.safetensors", {"format": "pt"}
    )
    return path


def mtp_of(path):
    return {n: t for n, t in load_file(path / "model.safetensors").items() if "layers.3." in n}


def test_left_out_and_said_so(checkpoint, text, tmp_path):
    notes = Notes()
    report = build_from(RECIPE.format("drop"), checkpoint, tmp_path / "b", [text], reporter=notes)
    count = len(mtp_of(checkpoint))
    assert f"{count} tensors of layers for multi-token prediction (MTP) are left out" in " ".join(notes.notes)
    assert "1 tensors of the checkpoint have no place in the model (a table of rotary embeddings" in " ".join(
        notes.notes
    )
    assert report.unused_tensors == count + 1 and mtp_of(tmp_path / "b") == {}
    assert "mtp" not in moepack.open(tmp_path / "b").manifest.model


def test_kept_as_they_are(checkpoint, text, tmp_path, caplog):
    """To the bit, verified, counted by the dry run, no news to who loads the bundle; generation guesses with them."""
    recipe, notes = parse_recipe(RECIPE.format("keep"), "t"), Notes()
    report = build(checkpoint, tmp_path / "b", recipe, [text], work=tmp_path / "work", reporter=notes)
    theirs, ours = mtp_of(checkpoint), mtp_of(tmp_path / "b")
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[n], ours[n]) for n in theirs)
    assert report.unused_tensors == 1 and "are kept" in " ".join(notes.notes)
    assert verify(tmp_path / "b", checkpoint) == []
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    edit_tensors(other, lambda tensors: tensors["model.layers.3.eh_proj.weight"][0, 0].add_(1))
    (problem,) = verify(tmp_path / "b", other)
    assert "eh_proj" in str(problem)
    few = estimate(checkpoint, tmp_path / "c", parse_recipe(RECIPE.format("drop"), "t"), [text]).dense_bytes
    more = estimate(checkpoint, tmp_path / "c", recipe, [text]).dense_bytes
    assert more - few == sum(t.nbytes for t in theirs.values())
    with pytest.raises(InputError, match="made with mtp"):
        build_from(RECIPE.format("drop"), checkpoint, tmp_path / "d", [text], work=tmp_path / "work")

    model = moepack.load(tmp_path / "b", policy="static:bf16", dtype=torch.float32)
    assert "UNEXPECTED" not in caplog.text
    ids = token_ids(12, 1, 1)
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    guessed = model.generate(ids, max_new_tokens=8, do_sample=False, use_mtp=True)
    assert torch.equal(plain, guessed)


def test_they_are_read_some_at_a_time(checkpoint, text, tmp_path, monkeypatch):
    """A bound on memory counts one group of them, and no two are there at once; the same bytes."""
    recipe = parse_recipe(RECIPE.format("keep"), "t")
    build(checkpoint, tmp_path / "b", recipe, [text])
    sizes = [t.nbytes for t in mtp_of(checkpoint).values()]
    monkeypatch.setattr(skeleton, "AT_ONCE", sum(sizes) // 4)
    model = StreamedModel(open_checkpoint(checkpoint))
    assert model.mtp_loading_bytes == 2 * (sum(sizes) // 4 + max(sizes)) + 2 * max(sizes)
    monkeypatch.setattr(model, "loading_bytes", lambda *part, **how: 1)
    monkeypatch.setattr(model, "part_bytes", lambda part: 1)
    assert needs_of(model, recipe, 1, 16, {}, 0).outside == model.mtp_loading_bytes
    assert needs_of(model, parse_recipe(RECIPE.format("drop"), "t"), 1, 16, {}, 0).outside < max(sizes)
    groups = []

    def kept(path, tensors, *rest):
        if path.name.startswith("mtp"):
            assert not any(groups) and sum(t.nbytes for t in tensors.values()) <= sum(sizes) // 4 + max(sizes)
            groups.append(tensors)
        save(path, tensors, *rest)

    monkeypatch.setattr("moepack.pipeline.run.save", kept)
    left = tmp_path / "work" / "calibrate" / "rest" / "mtp-00099.safetensors"  # of a killed run
    left.parent.mkdir(parents=True)
    save_file({"mtp.foreign": torch.zeros(1)}, left)
    for name in ("lock", "settings.json"):
        (tmp_path / "work" / name).write_text("{}")
    build(checkpoint, tmp_path / "again", recipe, [text], work=tmp_path / "work")
    assert len(groups) > 2 and tree(tmp_path / "again") == tree(tmp_path / "b")
