"""Dense matrices at several versions: which they are, what they hold and lose, and what commands make of them."""

import json

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from support import spy, tree

import moepack
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.dense import PASSED
from moepack.calibrate.forward import CalibrationPass
from moepack.pack.errors import InputError
from moepack.pipeline import build as pipeline
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.executors import local
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.run import LayerWalk
from moepack.pipeline.shrink import shrink
from moepack.quantize import dense_matrix
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify
from moepack.runtime.planning.options import LoadOptions

CALIBRATION = "calibration: {samples: 8, length: 64, batch_size: 3}"
RECIPE = f"""
versions: [bf16, w4]
dense: [w8, w4]
quantize: {{method: gptq, group_size: 32, loss_tokens: 64}}
{CALIBRATION}
"""
UNTIED = {"tie_word_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
RECIPES = parse_recipe(RECIPE, "test")
ROUNDED = parse_recipe(RECIPE.replace("gptq", "rtn") + "allocation: {average_bits: 7, dense: true}\n", "test")


@pytest.fixture(scope="module")
def checkpoint(demo_model, tmp_path_factory):
    """With biases, an output projection of its own, and one layer without experts."""
    extra = {**UNTIED, "attention_bias": True, "mlp_only_layers": [0], "hidden_size": 80, "intermediate_size": 100}
    return tiny_models.save_tiny("qwen3_moe", tmp_path_factory.mktemp("untied") / "checkpoint", demo_model, **extra)


@pytest.fixture(scope="module")
def dense(checkpoint, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "bundle"
    pipeline.build(checkpoint, path, RECIPES, [text])
    return path


@pytest.fixture(scope="module")
def rounded(checkpoint, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("rounded") / "bundle"
    pipeline.build(checkpoint, path, ROUNDED, [text])
    return path


def test_they_stand_in_their_versions_alone(dense, checkpoint):
    bundle = moepack.open(dense)
    assert bundle.verify() == [] and verify(dense, checkpoint) == []
    names = [m.module.removeprefix("model.layers.") for m in bundle.manifest.dense]
    attention = [f"self_attn.{k}_proj" for k in "qkvo"]
    assert names == [
        *(f"0.{n}" for n in attention), *(f"0.mlp.{k}_proj" for k in ("gate", "up", "down")),
        *(f"1.{n}" for n in attention), "lm_head",
    ]  # fmt: skip
    assert [v.name for v in bundle.dense_versions] == ["bf16", "w8", "w4"]
    source = load_file(checkpoint / "model.safetensors")
    for m in bundle.manifest.dense:
        exact = bundle.dense_matrix("bf16", m.module).torch()
        assert m.matrix.bias == (f"{m.module}.bias" in source)
        for name, tensor in exact.items():
            assert torch.equal(tensor, source[f"{m.module}.{name}"]) and f"{m.module}.{name}" not in bundle.dense()
    kept = set(bundle.dense()) | {f"{m.module}.{k}" for m in bundle.manifest.dense for k in ("weight", "bias")}
    assert {n for n in source if "experts" not in n} <= kept


def test_losses_are_those_of_windows_that_were_held_out(dense, checkpoint, text):
    """Against outputs: every Linear's inputs of the fourth window, caught in the model itself, through both weights."""
    from transformers import AutoModelForCausalLM

    from moepack.pipeline.start import calibration_text

    bundle = moepack.open(dense)
    table = bundle.calibration().dense
    assert table is not None and table.versions == ("bf16", "w8", "w4")
    assert table.tokens.tolist() == [8 * 64] * len(bundle.manifest.dense)
    _, windows = calibration_text(open_checkpoint(checkpoint), RECIPES, [text])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    caught = {}
    for m in bundle.manifest.dense:
        module = model.get_submodule(m.module)
        module.register_forward_pre_hook(lambda _, args, n=m.module: caught.__setitem__(n, args[0].float()))
    with torch.inference_mode():
        model(windows.ids[[3, 7]])  # one in four of eight
    for row, m in enumerate(bundle.manifest.dense):
        x = caught[m.module].reshape(-1, m.matrix.cols).numpy()
        exact = x @ bundle.dense_matrix("bf16", m.module).numpy()["weight"].T
        for column, name in ((1, "w8"), (2, "w4")):
            got = x @ bundle.dense_matrix(name, m.module).numpy()["weight"].T
            error = np.square(got - exact)
            assert error.sum() / np.square(exact).sum() == pytest.approx(table.relative[row, column], rel=0.05)
            assert error.mean() == pytest.approx(table.mse[row, column], rel=0.05)
        assert table.relative[row, 0] == 0 < table.relative[row, 1] < table.relative[row, 2] / 20
    assert {bundle.calibration().methods[n] for n in table.method[:, 1]} == {"gptq"}
    assert (table.method[:, 0] == 0).all() and (table.signal > 0).all()
    signal = {m.module: float(x) for m, x in zip(bundle.manifest.dense, table.signal, strict=True)}
    for block, last in (("0.self_attn", "o_proj"), ("0.mlp", "down_proj"), ("1.self_attn", "o_proj")):
        inner = [x for n, x in signal.items() if f".{block}." in n and not n.endswith(last)]
        assert inner == pytest.approx([PASSED * signal[f"model.layers.{block}.{last}"]] * len(inner)) and inner


def test_stages_give_the_same_bytes(dense, checkpoint, text, tmp_path, monkeypatch):
    pipeline.calibrate(checkpoint, tmp_path / "work", RECIPES, [text])
    monkeypatch.setattr(CalibrationPass, "run_layer", lambda *_: pytest.fail("calibrated again"))
    pipeline.quantize(tmp_path / "work")
    pipeline.pack(tmp_path / "work", tmp_path / "staged")
    assert tree(tmp_path / "staged") == tree(dense)
    made = tree(tmp_path / "work" / "quantize")
    (tmp_path / "work" / "calibrate" / "rest" / "moments.safetensors").unlink()
    with pytest.raises(InputError, match="without keeping the moments"):  # before anything is thrown away
        pipeline.quantize(tmp_path / "work", fresh=True)
    assert made and tree(tmp_path / "work" / "quantize") == made


def test_a_part_is_gone_on_with_where_it_stopped(dense, checkpoint, text, tmp_path, monkeypatch):
    """Stopped at the fifth matrix, of which four are not made again, and before the output projection. Then a work
    directory of another number of threads is refused."""
    work, made = tmp_path / "work", []

    def at_the_fifth(task, *_):
        made.append(task.matrix.module)
        if len(made) == 5:
            raise KeyboardInterrupt

    def before_the_output_projection(walk, part, *_):
        if part is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(local, "workers", lambda device, need: 1)
    spy(monkeypatch, local, "make_row_shard", at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        pipeline.build(checkpoint, tmp_path / "b", RECIPES, [text], work=work)
    assert len(list((work / "objects").iterdir())) == 4
    before = len(made)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        spy(patch, LayerWalk, "_quantise_layer", before_the_output_projection)
        pipeline.build(checkpoint, tmp_path / "b", RECIPES, [text], work=work)
    with pytest.raises(InputError, match="outside the layers is not quantised"):
        pipeline.pack(work, tmp_path / "b")
    pipeline.build(checkpoint, tmp_path / "b", RECIPES, [text], work=work)
    assert tree(tmp_path / "b") == tree(dense) and len(made) == before + 12 - 4
    settings = json.loads((work / "settings.json").read_text())
    settings["quantize"]["way of quantising dense matrices"] = "whole"
    (work / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"way of quantising dense matrices .*whole.*, now .*slices on 1 thread"):
        pipeline.build(checkpoint, tmp_path / "c", RECIPES, [text], work=work)


def test_slices_of_rows(rounded, checkpoint, text, tmp_path, monkeypatch):
    """Rows that are no whole slices or blocks, and biases: the same codes as in one piece, and the same losses."""
    made = []
    monkeypatch.setattr(dense_matrix, "ROW_SHARD", 4 * 80 * 48)
    spy(monkeypatch, local, "make_row_shard", lambda task, *_: made.append(task))
    pipeline.build(checkpoint, tmp_path / "b", ROUNDED, [text])
    assert len({task.address("m") for task in made}) == len(made) > 12 + 64
    assert any(task.rows.start and len(task.rows) % 16 for task in made)
    assert any(task.rows.start and task.shard.bias for task in made)
    whole, cut = tree(rounded), tree(tmp_path / "b")
    assert all(cut[name] == whole[name] for name in whole if name.startswith(("dense/", "experts/")))
    want, got = (moepack.open(path).calibration().dense for path in (rounded, tmp_path / "b"))
    for name in ("relative", "mse", "signal"):
        assert np.allclose(getattr(got, name), getattr(want, name), rtol=1e-5)
    assert np.array_equal(got.method, want.method) and np.array_equal(got.tokens, want.tokens)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "gpt_oss"])
def test_families(family, demo_model, text, tmp_path):
    """Latent attention, shared experts, dense layers, linear attention, biases, transposed and interleaved matrices:
    routers are never among the dense ones, and the dry run's bytes are those of the bundle."""
    source = tiny_models.save_tiny(
        family, tmp_path / "checkpoint", demo_model, hidden_size=128, tie_word_embeddings=False
    )
    sizes = "method: rtn, group_size: {w4: 128, w2: 32}, loss_tokens: 64"
    recipe = parse_recipe(f"quantize: {{{sizes}}}\ndense: [w8, w4]\n{CALIBRATION}", "test")
    expected = estimate(source, tmp_path / "out" / "bundle", recipe, [text])
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    pipeline.build(source, tmp_path / "bundle", recipe, [text])
    assert verify(tmp_path / "bundle", source) == []
    facts = inspect(tmp_path / "bundle")
    assert expected.dense_versions == {name: v["bytes"] for name, v in facts["dense_versions"].items()}
    assert expected.versions == {name: v["bytes"] for name, v in facts["versions"].items()}
    assert expected.dense_bytes <= facts["dense_bytes"] <= expected.dense_bytes + 64 * 1024  # headers
    assert expected.experts == facts["experts"] and expected.layers == facts["moe_layers"]
    modules = {m.module for m in moepack.open(tmp_path / "bundle").manifest.dense}
    last = {n.rpartition(".")[2] for n in modules}
    assert "lm_head" in last and not last & {"gate", "router", "shared_expert_gate"}
    assert "experts" not in {part for n in modules for part in n.split(".")}
    assert ("in_proj_qkvz" if family == "qwen3_next" else "o_proj") in last


def test_shrink(dense, tmp_path, monkeypatch):
    done = shrink(dense, tmp_path / "w8", dense=["w8"])
    small = moepack.open(tmp_path / "w8")
    assert done.dense == ("w8",) and done.versions == ("bf16", "w4") and small.verify() == []
    assert {n.split("/")[1] for n in tree(tmp_path / "w8") if n.startswith("dense/")} == {"w8"}
    gone = [moepack.open(dense).dense_bytes(name) for name in ("bf16", "w4")]
    assert done.bytes_before - done.bytes_after == sum(gone)
    note = json.loads((tmp_path / "w8" / "manifest.json").read_text())["provenance"]["shrunk"][-1]
    assert note["dense"] == ["w8"] and note["kept"] == ["bf16", "w4"]
    assert shrink(dense, tmp_path / "w4", ["w4"]).dense == ("bf16", "w8", "w4"), "all, where none is named"
    budget = LoadOptions(policy="uniform", device_memory="30MB")
    for named, kept in (([], ("bf16",)), (["w4", "w8"], ("w8", "w4"))):
        fitted = shrink(dense, tmp_path / f"fit{len(named)}", fit=budget, allocation=True, dense=named)
        assert fitted.dense == kept, "those that the plan serves, or those that are named"
        assert set(moepack.open(fitted.bundle).manifest.allocation.dense) == {kept[0]}
    with pytest.raises(InputError, match="no version 'w3' of dense matrices: here are bf16, w8, w4"):
        shrink(dense, tmp_path / "none", dense=["w3"])
    with monkeypatch.context() as patch, pytest.raises(InputError, match="no lossless version of its dense matrices"):
        patch.setattr("moepack.reports.verify.verify_digests", lambda *_: pytest.fail("read what is not told"))
        verify(tmp_path / "w8", "anything")
    card = (tmp_path / "w8" / "README.md").read_text()
    assert "| w8 | 12 matrices outside the experts: 8 bits" in card and card.count("outside the experts:") == 1


def test_one_allocation_over_experts_and_dense_matrices(rounded, checkpoint, text, tmp_path):
    """In the manifest, a version for each, all bytes within the average; shrink keeps what it names."""
    bundle = moepack.open(rounded)
    chosen = bundle.manifest.allocation
    assert chosen is not None and chosen.dense is not None
    assert chosen.name == "greedy at 7 bits of experts and dense matrices, losses weighted by gates"
    taken = sum(
        bundle.dense_file(name, bundle.dense_place(n)[0]).extent_size(bundle.dense_place(n)[1])
        for n, name in enumerate(chosen.dense)
    )
    taken += sum(
        bundle.layer_file(name, p).extent_size(e) for p, row in enumerate(chosen.versions) for e, name in enumerate(row)
    )
    weights = bundle.expert_weights + sum(m.matrix.weights for m in bundle.manifest.dense)
    assert 6 < 8 * taken / weights <= 7
    done = shrink(rounded, tmp_path / "small", allocation=True)
    assert set(done.dense) == set(chosen.dense) and moepack.open(tmp_path / "small").manifest.allocation == chosen
    least = shrink(rounded, tmp_path / "least", dense=["bf16"])
    kept = moepack.open(tmp_path / "least").manifest.allocation
    assert least.dense == ("bf16",) and kept is not None and (kept.dense is None) == (set(chosen.dense) != {"bf16"})
    for wrong in ("weight: logits, dense: true", "dense: 1"):
        with pytest.raises(InputError, match=r"allocation\.dense"):
            parse_recipe(RECIPE + f"allocation: {{average_bits: 7, {wrong}}}\n", "r")
    with pytest.raises(InputError, match="needs dense: in the recipe"):
        parse_recipe("allocation: {average_bits: 7, dense: true}", "r")
    with pytest.raises(InputError, match=r"the smallest versions take 5\.\d+ bits"):
        low = parse_recipe(RECIPE + "allocation: {average_bits: 4, dense: true}\n", "r")
        pipeline.build(checkpoint, tmp_path / "none", low, [text])
