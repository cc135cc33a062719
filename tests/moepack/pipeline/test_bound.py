"""A build's bound on memory: kept, or refused with the least; no bit of a bundle depends on where things lie."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import HELPERS, cli, python, refused, tree

from moepack.calibrate import products, skeleton
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.held import empty, is_mapped, mapped, release
from moepack.calibrate.stream import StreamedModel
from moepack.pack.errors import InputError, TargetError
from moepack.pack.safetensors_file import read_header
from moepack.pipeline import artifacts, bound, saved, start
from moepack.pipeline import build as pipeline
from moepack.pipeline.bound import MAPPED, MIB, BuildNeeds, MemoryPlan, peak, place, steps
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.needs import needs_of
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.work import WorkDirectory

RECIPE = parse_recipe(
    "{versions: [bf16, w2], quantize: {method: rtn, loss_tokens: 64}, "
    "calibration: {samples: 4, length: 64, batch_size: 2}}",
    "test",
)
NEEDS = BuildNeeds(
    process=100 * MIB, loading=300 * MIB, layer=100 * MIB, hidden=400 * MIB, seen=400 * MIB, routing=10 * MIB,
    window=50 * MIB, forward=0, batches=((1, 150 * MIB),), waiting=100 * MIB,
)  # fmt: skip


def test_processes_stay_in_what_is_said_of_them(demo_model, text, tmp_path):
    """A build in the least that it asks for, of which it takes most; activations in a file; what a piece takes."""
    python(HELPERS / "peak_memory.py", demo_model, text, tmp_path)
    kept, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("build", "parts"))
    assert kept["peak"] <= kept["bound"] <= 1.3 * kept["peak"]  # 1.27 measured
    assert found["disk"]["growth"] < 2 * MAPPED < found["memory"]["bytes"] < found["memory"]["growth"] + MIB
    assert found["files"]["left"] == 0, "the file has no name: nothing is left of a process that is killed"
    for piece in (found["batch"], found["refine"], found["dense"]):
        assert 0.5 * piece["said"] < piece["took"] < piece["said"]


def test_what_goes_to_disk_first_and_the_least():
    """By hand, in MiB: reading takes 100 + 400 + 300; calibrating 100 + 810 + 100 + 4 * 50; quantising, with 150 for
    its batch, less."""
    assert {step: sum(parts.values()) // MIB for step, parts in steps(NEEDS, MemoryPlan(4)).items()} == {
        "read a layer": 800, "read what lies outside the layers": 500, "calibrate": 1210, "quantise": 1160,
    }  # fmt: skip
    on_disk = MAPPED // MIB
    assert place(NEEDS, 4, None) == place(NEEDS, 4, 1210 * MIB) == MemoryPlan(4, batches=1, row_shards=1)
    assert place(NEEDS, 4, 1209 * MIB) == place(NEEDS, 4, (810 + on_disk) * MIB) == MemoryPlan(4, True, False, 1, 1)
    both = 410 + 2 * on_disk
    assert place(NEEDS, 4, (810 + on_disk) * MIB - 1) == place(NEEDS, 4, both * MIB) == MemoryPlan(4, True, True, 1, 1)
    assert place(NEEDS, 4, both * MIB - 1) == place(NEEDS, 4, (both - 50) * MIB) == MemoryPlan(3, True, True, 1, 1)
    # A batch of one takes 260 and what is mapped, quantising 360: the least.
    assert place(NEEDS, 4, (360 + 2 * on_disk) * MIB) == MemoryPlan(3, True, True, 1, 1)
    with pytest.raises(InputError, match=rf"least is {360 + 2 * on_disk}MiB, to quantise \(expert batches 150MiB\)"):
        place(NEEDS, 4, (360 + 2 * on_disk) * MIB - 1)
    # Two batches of experts at once take 150 more as they are quantised; one does before anything else shrinks.
    two = replace(NEEDS, batches=((2, 150 * MIB),))
    assert place(two, 4, 1310 * MIB) == MemoryPlan(4, batches=2, row_shards=1)
    assert place(two, 4, (510 + 2 * on_disk) * MIB) == MemoryPlan(4, True, True, 2, 1)
    assert place(two, 4, (510 + 2 * on_disk) * MIB - 1) == MemoryPlan(4, True, True, 1, 1)
    assert peak(replace(NEEDS, loading=2000 * MIB), MemoryPlan(4))[0] == "read a layer"
    # Moments of dense matrices are there while a layer is calibrated, and until all of it is quantised.
    dense = steps(replace(two, dense=70 * MIB), MemoryPlan(4, batches=2, row_shards=1))
    assert [sum(parts.values()) // MIB for parts in dense.values()] == [800, 500, 1280, 1380]


def test_memory_is_used_again_where_there_is_room_for_the_holes(monkeypatch):
    """Four windows of 50 MiB take 0.6 times as much more; nothing else is changed for it."""
    monkeypatch.setattr(bound, "available_memory", lambda: 1 << 40)
    step, least = peak(NEEDS, place(NEEDS, 4, None))
    assert step == "calibrate" and least["forward"] == int(1.6 * 200 * MIB) and place(NEEDS, 4, None).reuse
    needed = sum(least.values())
    assert place(NEEDS, 4, needed).reuse and not place(NEEDS, 4, needed - 1).reuse
    assert place(NEEDS, 4, needed - 1) == MemoryPlan(4, batches=1, row_shards=1)
    assert not place(replace(NEEDS, window=0), 4, None).reuse


def test_a_build_reuses_memory_where_that_fits(short_model, text, tmp_path, monkeypatch):
    entered = []
    monkeypatch.setattr("moepack.pipeline.run.reusing", lambda: nullcontext(entered.append("")))
    for available, times in ((1 << 40, 2), (0, 0)):
        entered.clear()
        monkeypatch.setattr(bound, "available_memory", lambda a=available: a)
        pipeline.calibrate(short_model, tmp_path / str(available), RECIPE, [text])
        assert len(entered) == times


def test_experts_that_are_read_with_dense_tensors_count(demo_model, monkeypatch):
    """Dense versions alone need no expert, where the checkpoint's layout lets dense tensors be read without."""
    monkeypatch.setattr(skeleton, "AT_ONCE", 1)
    model, recipe = StreamedModel(open_checkpoint(demo_model)), replace(RECIPE, versions=(), dense=("w8",))
    assert model.dense_apart(0)
    alone = needs_of(model, recipe, 4, 64, {}, 0)
    monkeypatch.setattr(StreamedModel, "dense_apart", lambda *_: False)
    together = needs_of(model, recipe, 4, 64, {}, 0)
    assert together.waiting - alone.waiting == model.file_bytes(0) > 0
    assert together.loading - alone.loading >= model.file_bytes(0) // 2
    assert (alone.layer_on_disk, together.experts) == (0, model.file_bytes(0)), "which can go to disk"


@settings(deadline=None)  # a search through a hundred placements
@given(st.lists(st.integers(0, 900), min_size=8, max_size=8), st.integers(1, 3), st.integers(1, 9))
def test_more_memory_is_never_worse(sizes, at_once, windows):
    """No bound leaves room for fewer windows than a smaller one, and what is named as the least is kept."""
    loading, layer, hidden, seen, window, batch, layer_on_disk, mapped_batch = (size * MIB for size in sizes)
    needs = replace(
        NEEDS, loading=loading, layer=layer, hidden=hidden, seen=seen, window=window, batches=((at_once, batch),),
        row_shards=((2 * at_once, batch // 3),), waiting=layer // 2, waiting_on_disk=layer_on_disk // 2,
        loading_on_disk=loading // 2, layer_on_disk=layer_on_disk, mapped=mapped_batch,
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        place(needs, windows, 1)
    found = re.search(r"the least is (\d+)MiB", str(caught.value))
    least, before = int(found.group(1)), 0
    for bound_mib in range(least, least + 6000, 150):
        how = place(needs, windows, bound_mib * MIB)
        assert how.batch_size >= before and sum(peak(needs, how)[1].values()) <= bound_mib * MIB
        before = how.batch_size
    assert place(needs, windows, 1 << 50) == MemoryPlan(windows, batches=at_once, row_shards=2 * at_once)
    with pytest.raises(InputError):
        place(needs, windows, (least - 1) * MIB)


def test_bytes_do_not_depend_on_where_activations_lie(short_model, text, tmp_path, monkeypatch):
    pipeline.build(short_model, tmp_path / "memory", RECIPE, [text])
    pieces = []
    monkeypatch.setattr(start, "place", lambda needs, size, memory: MemoryPlan(size, True, True, experts_on_disk=True))
    monkeypatch.setattr(skeleton, "AT_ONCE", 1 << 18)  # bytes: a third of a layer
    monkeypatch.setattr(products, "release", lambda tensor: (pieces.append(is_mapped(tensor)), release(tensor)))
    pipeline.build(short_model, tmp_path / "disk", RECIPE, [text], memory=1)
    assert len(pieces) > 50 and all(pieces)
    assert tree(tmp_path / "memory") == tree(tmp_path / "disk")
    pipeline.calibrate(short_model, tmp_path / "work", RECIPE, [text], memory=1)
    pipeline.quantize(tmp_path / "work", memory=1)
    pipeline.pack(tmp_path / "work", tmp_path / "staged")
    assert tree(tmp_path / "memory") == tree(tmp_path / "staged")


def test_smaller_batches_are_a_setting_of_the_work_directory(short_model, text, tmp_path, monkeypatch):
    """A later run with more memory or without a bound goes on with them, to the same bytes; one whose recipe has
    another number of windows and no bound is refused by the name of the setting."""
    monkeypatch.setattr(start, "place", lambda needs, size, memory: MemoryPlan(1 if memory == 1 else size))
    work, mark = tmp_path / "work", WorkDirectory.mark
    pipeline.build(short_model, tmp_path / "undisturbed", RECIPE, [text], memory=1)

    def killed(self, stage, layer, note):
        mark(self, stage, layer, note)
        if (stage, layer) == ("calibrate", 1):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WorkDirectory, "mark", killed)
        pipeline.build(short_model, tmp_path / "killed", RECIPE, [text], work=work, memory=1)
    assert json.loads((work / "settings.json").read_text())["calibrate"]["batch_size"] == 1
    for i, memory in enumerate((1 << 40, None)):
        pipeline.build(short_model, tmp_path / f"{i}", RECIPE, [text], work=work, memory=memory)
        assert tree(tmp_path / f"{i}") == tree(tmp_path / "undisturbed")
    other = replace(RECIPE, calibration=replace(RECIPE.calibration, batch_size=4))
    with pytest.raises(InputError, match="made with batch_size 1, now 4"):
        pipeline.build(short_model, tmp_path / "other", other, [text], work=work)
    pipeline.calibrate(short_model, work, RECIPE, [text], fresh=True)
    assert json.loads((work / "settings.json").read_text())["calibrate"]["batch_size"] == 2
    with pytest.raises(InputError, match="begun with 2 windows at once, and memory leaves room for 1: give it more"):
        pipeline.calibrate(short_model, work, RECIPE, [text], memory=1)


def test_what_cannot_be_kept_is_refused_before_any_work(short_model, text, tmp_path):
    arguments = ("build", short_model, "-o", tmp_path / "b", "-c", text, "--memory", "64MiB", "-q")
    for more in (("--dry-run",), ("--work", tmp_path / "work")):
        refused(cli(*arguments, *more), "--memory 64MiB cannot be kept: the least is ")
        assert not (tmp_path / "b").exists() and not (tmp_path / "work" / "calibrate").exists()


def test_the_dry_run_says_the_numbers_of_the_bound(short_model, text, tmp_path, monkeypatch):
    monkeypatch.setattr("moepack.pipeline.needs.resident_memory", lambda: 1000 * MIB)
    free = estimate(short_model, tmp_path / "b", RECIPE, [text])
    with pytest.raises(InputError) as caught:
        estimate(short_model, tmp_path / "b", RECIPE, [text], memory=1)
    found = re.search(r"the least is (\d+)MiB", str(caught.value))
    least = int(found.group(1)) * MIB
    tight = estimate(short_model, tmp_path / "b", RECIPE, [text], memory=least)
    assert sum(tight.memory.values()) <= least <= sum(free.memory.values()) + MIB
    assert free.batch_size == 2 and free.on_disk == ""


def test_a_full_disk_is_an_error_of_the_target(tmp_path):
    with pytest.raises(TargetError, match="memory"):
        empty((1 << 46,), torch.bfloat16, tmp_path)


def test_kept_tensors_read_back(tmp_path, monkeypatch):
    """Of every dtype, written in parts, mapped ones among them, and read in place."""
    monkeypatch.setattr(saved, "_AT_ONCE", 7)
    wanted = {
        "a": torch.arange(9, dtype=torch.uint8),
        "b": torch.tensor(3.5, dtype=torch.float64),
        "c": torch.randn(5, 3).bfloat16(),
        "d": torch.zeros(0, 4, dtype=torch.int32),
        "e": torch.randn(4, 6).T,
        "f": empty((3, 2), torch.float32, tmp_path).fill_(2.0),
    }
    artifacts.save(tmp_path / "x.safetensors", wanted, {"k": "v"})
    got = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(got[n], t) and got[n].dtype == t.dtype for n, t in wanted.items()) and len(got) == 6
    entry = read_header(tmp_path / "x.safetensors").tensors["c"]
    read = mapped(tmp_path / "x.safetensors", entry.begin, entry.shape, torch.bfloat16)
    release(read)
    assert torch.equal(read, wanted["c"])
