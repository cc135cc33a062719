"""The pipeline: stages and one pass give the same bytes, settings are not mixed, and dry runs leave nothing behind."""

import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
from support import RTN, build_from, cli, refused, spy, tree

import moepack
from moepack.calibrate.forward import CalibrationPass
from moepack.pack.errors import InputError, MoepackError, TargetError
from moepack.pipeline import build as pipeline
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.inspect import inspect
from moepack.reports.verify import verify


def test_stages_write_the_same_bytes_as_one_pass(short_model, text, tmp_path, whole, monkeypatch):
    """A build on their work directory too, which calibrates nothing again."""
    recipe = parse_recipe(RTN, "test")
    pipeline.calibrate(short_model, tmp_path / "work", recipe, [text])
    with pytest.raises(InputError, match="not quantised"):
        pipeline.pack(tmp_path / "work", tmp_path / "staged")
    pipeline.quantize(tmp_path / "work")
    pipeline.pack(tmp_path / "work", tmp_path / "staged")
    assert tree(tmp_path / "staged") == whole and verify(tmp_path / "staged", short_model) == []
    monkeypatch.setattr(CalibrationPass, "run_layer", lambda *_: pytest.fail("the calibration pass ran again"))
    pipeline.build(short_model, tmp_path / "resumed", recipe, [text], work=tmp_path / "work")
    assert tree(tmp_path / "resumed") == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resumed", "staged", "work"]


def test_changed_settings_are_refused_by_name(short_model, text, evaluation, tmp_path):
    work = tmp_path / "work"
    pipeline.calibrate(short_model, work, parse_recipe(RTN, "test"), [text])
    pipeline.quantize(work)
    for change, name in (
        (("length: 64", "length: 32"), "length 64, now 32: use the old setting"),
        (("batch_size: 2", "batch_size: 4"), "batch_size 2, now 4"),
        (("rtn", "hqq"), 'method "rtn", now "hqq"'),
        (("loss_tokens: 64", "loss_tokens: 65"), "loss_tokens 64, now 65"),
    ):
        with pytest.raises(InputError, match=f"made with {name}"):
            build_from(RTN.replace(*change), short_model, tmp_path / "b", [text], work=work)
    with pytest.raises(InputError, match=r'made with text \["calibration.jsonl"\], now \["evaluation.jsonl"\]'):
        build_from(RTN, short_model, tmp_path / "b", [evaluation], work=work)
    other = parse_recipe(RTN.replace("rtn", "hqq"), "t")
    pipeline.build(short_model, tmp_path / "b", other, [text], work=work, fresh=True)
    assert inspect(tmp_path / "b")["methods"]["w2"] == {"hqq": 32}


def test_two_builds_in_one_work_directory(short_model, text, tmp_path):
    from moepack.pipeline.work import WorkDirectory

    first, other = WorkDirectory(tmp_path / "work"), WorkDirectory(tmp_path / ".b.work-used")
    WorkDirectory(tmp_path / ".b.work-left").close()
    with pytest.raises(TargetError, match="another build is at work"):
        build_from(RTN, short_model, tmp_path / "b", [text], work=tmp_path / "work")
    first.close()
    WorkDirectory(tmp_path / "work").close()
    with pytest.raises(InputError, match=r"no-model"):
        build_from(RTN, tmp_path / "no-model", tmp_path / "b", [text])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.work-used", "work"], "a killed build's folder goes"
    other.close()


def test_quantised_by_another_recipe_than_calibrated(short_model, text, tmp_path):
    """Nothing is quantised yet, so nothing is mixed; the bundle tells of the recipe that made it."""
    from moepack.pipeline.add import add

    work, other = tmp_path / "work", tmp_path / "other.yaml"
    other.write_text(RTN.replace("rtn", "rtn, refine: false").replace("loss_tokens: 64", "loss_tokens: 65"))
    pipeline.calibrate(short_model, work, parse_recipe(RTN, "t"), [text])
    pipeline.quantize(work, str(other))
    pipeline.pack(work, tmp_path / "b")
    assert moepack.open(tmp_path / "b").manifest.provenance["recipe"] == other.read_text()
    add(tmp_path / "b", work, ["w1"])
    assert "w1" in [v.name for v in moepack.open(tmp_path / "b").versions]
    with pytest.raises(InputError, match="loss_tokens 65, now 64"):
        build_from(RTN, short_model, tmp_path / "c", [text], work=work)
    (work / "settings.json").unlink()
    with pytest.raises(InputError, match="run moepack calibrate first"):
        pipeline.quantize(work)


def test_starting_over_is_stopped(short_model, text, evaluation, tmp_path, monkeypatch):
    """What followed from the text before is not taken for what follows from the new one, wherever --fresh stopped."""
    from moepack.pipeline.work import WorkDirectory

    work, recipe = tmp_path / "work", parse_recipe(RTN, "t")
    pipeline.build(short_model, tmp_path / "new", recipe, [evaluation])
    for stops, at in ((WorkDirectory, "begin"), (shutil, "rmtree")):
        pipeline.build(short_model, tmp_path / "old", recipe, [text], work=work, fresh=True)
        calls = itertools.count(1)

        def stop(*_, calls=calls, **more):
            if next(calls) == 2:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            spy(patch, stops, at, stop)
            pipeline.build(short_model, tmp_path / "b", recipe, [evaluation], work=work, fresh=True)
        with contextlib.suppress(InputError):  # refused, or whole
            pipeline.calibrate(short_model, work, recipe, [evaluation])
            pipeline.build(short_model, tmp_path / "b", recipe, [evaluation], work=work)
            assert tree(tmp_path / "b") == tree(tmp_path / "new")
            shutil.rmtree(tmp_path / "b")
        shutil.rmtree(tmp_path / "old")
        shutil.rmtree(work)


def test_the_manifest_tells_how_the_bundle_was_made(bundle):
    manifest = moepack.open(bundle).manifest
    made = manifest.provenance
    assert "method: rtn" in made["recipe"] and made["method"] == "rtn"
    assert made["calibration"]["samples"] == 16 and len(made["calibration"]["tokens_sha256"]) == 64
    assert made["tools"]["moepack"] == moepack.__version__ and "torch" in made["tools"]
    assert list(made["checkpoint"]["files"]) == ["config.json", "model.safetensors"]
    assert str(Path.home()) not in json.dumps(dict(made)) and "/" not in made["checkpoint"]["name"]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE behaves so on Linux")
def test_a_full_disk_is_one_line_and_then_there_is_room(short_model, text, tmp_path, whole):
    """A limit on file size stands in for a full disk: the write fails in the middle of a stage, and a build with room
    goes on from there."""
    work, (before, most) = tmp_path / "work", resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "r.yaml").write_text(RTN)
    words = ["build", short_model, "-o", tmp_path / "out" / "b", "-r", tmp_path / "r.yaml", "-c", text, "--work", work]
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, most))
    try:
        refused(cli(*words, "-q"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    build_from(RTN, short_model, tmp_path / "b", [text], work=work)
    assert tree(tmp_path / "b") == whole
    assert not list((work / "objects").iterdir()), "objects are dropped once their layer is done"


# --- the dry run

SIZES = """
quantize: {method: rtn, group_size: {w4: 128, w2: 32}, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 2}
"""


def test_a_dry_run_refuses_what_a_build_refuses(demo_model, text, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    recipe = parse_recipe(SIZES, "test")
    cases = (
        ("full", {}, "is not empty"),
        ("file/below", {}, "is not a writable directory"),
        ("b", {"work": tmp_path / "file"}, "cannot be used as a work directory"),
        ("b", {"engine": "nope"}, "engine 'nope' is unknown"),
        ("b", {"address": "localhost:1"}, "give engine ray"),
        ("b", {"engine": "ray", "address": "127.0.0.1:1"}, "Ray at 127.0.0.1:1: nobody answers there"),
        ("b", {"engine": "ray", "address": "a..b:1"}, "Ray at a..b:1: nobody answers there"),
    )
    with pytest.raises(InputError, match="no such directory"):
        estimate(tmp_path / "nothing", tmp_path / "b", recipe, [text])
    for output, more, message in cases:
        for run in (estimate, pipeline.build):
            with pytest.raises(MoepackError, match=message):
                run(demo_model, tmp_path / output, recipe, [text], **more)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]


def test_a_dry_run_counts_the_disk_beside_the_bundle(demo_model, text, tmp_path):
    """Layer files are linked into the bundle; where the work directory is on another disk, they lie there twice."""
    recipe = parse_recipe(SIZES, "test")
    near = estimate(demo_model, tmp_path / "b", recipe, [text], work=tmp_path / "w").work_bytes
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm on a disk of its own")
    said = estimate(demo_model, tmp_path / "b", recipe, [text], work=shm / f"work-{os.getpid()}")
    assert said.work_bytes >= near + sum(said.versions.values()) - said.dense_bytes
    assert not (shm / f"work-{os.getpid()}").exists()
