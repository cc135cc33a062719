"""shrink: fewer versions, the same bytes, or nothing at all."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support import flip, tree

import moepack
from moepack.pack.errors import BundleError, InputError, TargetError
from moepack.pipeline.shrink import shrink
from moepack.reports.fitting import Described, fitting
from moepack.reports.plan import plan
from moepack.reports.verify import verify
from moepack.runtime.planning.options import LoadOptions


def test_versions_that_are_kept_are_the_same_bytes(bundle, tmp_path):
    done = shrink(bundle, tmp_path / "small", ["w2", "w4"])
    before, after = tree(bundle), tree(tmp_path / "small")
    assert done.versions == ("w4", "w2") and done.allocation is None, "its map names w3"
    assert verify(tmp_path / "small") == []
    assert {n.split("/")[1] for n in after if n.startswith("experts/")} == {"w4", "w2"}
    changed = {n for n in after if after[n] != before.get(n)}
    assert changed == {"manifest.json", "README.md"}
    gone = sum(len(data) for name, data in before.items() if name.split("/")[1:2] in (["bf16"], ["w3"], ["w1"]))
    gone += len(before["released.json"])  # of bf16's checkpoint
    assert done.bytes_before - done.bytes_after == gone
    note = json.loads(after["manifest.json"])["provenance"]["shrunk"]
    assert [(x["from"], x["kept"]) for x in note] == [(["bf16", "w4", "w3", "w2", "w1"], ["w4", "w2"])]
    assert moepack.load(tmp_path / "small").moepack.versions[0][0] == "w4"
    again = shrink(tmp_path / "small", tmp_path / "smaller", ["w2"])
    assert again.versions == ("w2",)
    note = json.loads((tmp_path / "smaller" / "manifest.json").read_text())["provenance"]["shrunk"]
    assert [x["kept"] for x in note] == [["w4", "w2"], ["w2"]]


def test_weights_are_linked_and_what_people_edit_is_copied(bundle, tmp_path):
    home = tmp_path / "models--some--bundle"  # as the Hub's cache: every file a link to a blob
    cache = home / "snapshots" / "0123abc"
    (home / "blobs").mkdir(parents=True)
    for number, name in enumerate(tree(bundle)):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(bundle / name, home / "blobs" / str(number))
        (cache / name).symlink_to(home / "blobs" / str(number))
    shrink(cache, tmp_path / "small", ["w2"])
    links = {"experts/w2/layer-001.safetensors": True, "model.safetensors": True, "config.json": False}
    for name, linked in links.items():
        made = tmp_path / "small" / name
        assert not made.is_symlink() and made.samefile(bundle / name) == linked


def test_the_map_of_the_manifest_stays_with_its_versions(bundle, tmp_path):
    table = moepack.open(bundle).manifest.allocation
    named = {name for row in table.versions for name in row}
    done = shrink(bundle, tmp_path / "small", allocation=True)
    assert set(done.versions) == named < {"bf16", "w4", "w3", "w2", "w1"}
    assert moepack.open(tmp_path / "small").manifest.allocation == table
    model = moepack.load(tmp_path / "small", policy="static:allocation")
    assert model.moepack.versions == table.versions


def test_a_budget_chooses_what_the_plan_serves(bundle, tmp_path):
    """By the plan's arithmetic, whether or not the weights are here; the plan of what is kept is the same."""
    least = plan(bundle, LoadOptions(device_memory=1 << 30)).least_bytes
    sizes = [least, least + 400_000, 1 << 30]
    found = [fitting(moepack.open(bundle), LoadOptions(device_memory=size)) for size in sizes]
    assert found[0].versions == ("w1",) and found[0].experts == (64,)
    assert len(found[1].versions) > 1 and sum(found[1].experts) == 64
    assert found[2].versions == ("bf16",)
    opened = moepack.open(bundle)
    without = Path(shutil.copytree(bundle, tmp_path / "described", ignore=shutil.ignore_patterns("experts")))
    described = Described(without, opened.manifest, opened.versions)
    told = [fitting(described, LoadOptions(device_memory=size)).versions for size in sizes]
    assert told == [f.versions for f in found]
    with pytest.raises(InputError, match="the least that would do is"):
        fitting(described, LoadOptions(device_memory=sizes[0] - 1))
    for policy, names in (
        ("importance:hi=w4,lo=w2", ("w4", "w2")), ("lru:hi=w4,lo=w1", ("w4", "w1")), ("paged", ("bf16",)),
        ("prefill:hi=w3,bits=2", ("w3", "w2", "w1")),
    ):  # fmt: skip
        moving = LoadOptions(device_memory=1 << 30, policy=policy)
        assert fitting(opened, moving).versions == names, f"{policy}: what it may need, whatever it begins with"
        if policy == "paged":
            with pytest.raises(InputError, match="measures rates on weights: fetch bf16 by name"):
                fitting(described, moving)
        else:
            assert fitting(described, moving).versions == names
        with pytest.raises(InputError, match="no map"):
            shrink(bundle, tmp_path / "none", fit=moving, allocation=True)
    done = shrink(bundle, tmp_path / "small", fit=LoadOptions(device_memory=sizes[1]), allocation=True)
    assert done.versions == found[1].versions and done.allocation == f"plan for {sizes[1]} bytes"
    kept = moepack.open(tmp_path / "small").manifest.allocation
    assert kept is not None and kept.versions == found[1].table
    served = LoadOptions(device_memory=sizes[1], policy="static:allocation")
    small = plan(tmp_path / "small", served)
    assert small.feasible and small.table == found[1].table


def test_nothing_is_written_where_it_is_refused(damaged, tmp_path):
    before = sorted(tmp_path.iterdir())
    for words, options in (
        ("nothing says what to keep", {}),
        ("no version 'w9'", {"versions": ["w9"]}),
        ("give it alone", {"versions": ["w2"], "allocation": True}),
    ):
        with pytest.raises(InputError, match=words):
            shrink(damaged, tmp_path / "small", **options)
    flip(damaged / "experts/w2/layer-001.safetensors", -5)
    with pytest.raises(BundleError, match="digest"):
        shrink(damaged, tmp_path / "small", ["w2"])
    with pytest.raises(TargetError, match="not empty"):
        shrink(damaged, damaged, ["w4"])
    assert sorted(tmp_path.iterdir()) == before
    assert shrink(damaged, tmp_path / "small", ["w4"]).versions == ("w4",), "what goes may be damaged"
