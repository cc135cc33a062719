"""The pipeline: stages and one pass give the same bytes, settings are not mixed, and dry runs leave nothing behind."""

import contextlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import RTN, Notes, build_from, cli, files_of_at_most, refused, spy, tree

import moepack
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.forward import CalibrationPass
from moepack.pack.errors import InputError, MoepackError, TargetError
from moepack.pack.tables import FEW_TOKENS
from moepack.pipeline import build as pipeline
from moepack.pipeline.add import add
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.few_tokens import advice
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.start import calibration_text
from moepack.pipeline.work import WorkDirectory
from moepack.quantize import losses
from moepack.reports.inspect import inspect, render
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


def test_two_builds_in_one_work_directory(short_model, text, tmp_path):
    first, other = WorkDirectory(tmp_path / "work"), WorkDirectory(tmp_path / ".b.work-used")
    WorkDirectory(tmp_path / ".b.work-left").close()
    with pytest.raises(TargetError, match="another build is at work"):
        build_from(RTN, short_model, tmp_path / "b", [text], work=tmp_path / "work")
    first.close()
    WorkDirectory(tmp_path / "work").close()
    for target in (tmp_path / "b", tmp_path / "new" / "deep" / "b"):
        with pytest.raises(InputError, match=r"no-model"):
            build_from(RTN, tmp_path / "no-model", target, [text])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.work-used", "work"], (
        "a killed build's folder goes, and new ones"
    )
    other.close()


def test_quantised_by_another_recipe_than_calibrated(short_model, text, evaluation, tmp_path, monkeypatch):
    """Nothing is quantised yet, so nothing is mixed; the bundle tells of the recipe that made it. From then on settings
    that change are refused by name."""
    work, other = tmp_path / "work", tmp_path / "other.yaml"
    recipe = f"versions: [w2]\n{RTN}"
    other.write_text(recipe.replace("rtn", "rtn, refine: false").replace("loss_tokens: 64", "loss_tokens: 65"))
    pipeline.calibrate(short_model, work, parse_recipe(recipe, "t"), [text])
    pipeline.quantize(work, str(other))
    pipeline.pack(work, tmp_path / "b")
    assert moepack.open(tmp_path / "b").manifest.provenance["recipe"] == other.read_text()
    add(tmp_path / "b", work, ["w1"])
    assert [v.name for v in moepack.open(tmp_path / "b").versions] == ["w2", "w1"]
    for change, name in (
        (("length: 64", "length: 32"), "length 64, now 32: use the old setting"),
        (("batch_size: 2", "batch_size: 4"), "batch_size 2, now 4"),
        (("rtn", "hqq"), 'method "rtn", now "hqq"'),
        (("loss_tokens: 65", "loss_tokens: 64"), "loss_tokens 65, now 64"),
    ):
        with pytest.raises(InputError, match=f"made with {name}"):
            build_from(other.read_text().replace(*change), short_model, tmp_path / "c", [text], work=work)
    with pytest.raises(InputError, match=r'made with text \["calibration.jsonl"\], now \["evaluation.jsonl"\]'):
        build_from(recipe, short_model, tmp_path / "c", [evaluation], work=work)
    now = losses.ESTIMATE
    monkeypatch.setattr(losses, "ESTIMATE", now + 1)
    with pytest.raises(InputError, match=f"made with estimate of losses {now}, now {now + 1}: .*fresh"):
        pipeline.quantize(work, str(other))
    with pytest.raises(InputError, match="run moepack calibrate first"):
        pipeline.quantize(tmp_path / "empty")


@pytest.mark.parametrize(
    "files", [["quantize/notes.txt"], ["objects/mine.txt", "lock"], ["settings.json"], ["config.json"]]
)
@pytest.mark.parametrize("more", [[], ["--fresh"], ["--dry-run"]])
def test_a_directory_with_other_files_is_no_work_directory(files, more, short_model, text, tmp_path):
    for name in files:
        (tmp_path / "w" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "w" / name).write_text("mine")
    before = tree(tmp_path)
    words = ["build", short_model, "-o", tmp_path / "b", "-c", text, "--work", tmp_path / "w", *more]
    refused(
        cli(*words, "-q"), f"{tmp_path / 'w'}: holds files and is no work directory of moepack: name another --work"
    )
    assert tree(tmp_path) == before


@pytest.mark.parametrize("flag", ["--keep", "--fresh"])
def test_what_is_of_a_work_directory_needs_one(flag, short_model, tmp_path):
    refused(cli("build", short_model, "-o", tmp_path / "b", flag), f"{flag} ", "work directory: name one with --work")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inside", ["", "work"])
@pytest.mark.parametrize(
    "words", [["build", "MODEL"], ["build", "MODEL", "--dry-run"], ["build", "MODEL", "--add", "w2"], ["pack"]]
)
def test_a_work_directory_in_the_output_is_refused_at_the_start(words, inside, short_model, tmp_path):
    words = [short_model if word == "MODEL" else word for word in words]
    work = tmp_path / "b" / inside
    refused(cli(*words, "-o", tmp_path / "b", "--work", work, "-q"), f"{work}: lies in the bundle's directory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"calibrate": 1}'])
def test_damaged_settings_are_started_over(damaged, short_model, text, tmp_path, whole):
    work = tmp_path / "w"
    build_from(RTN, short_model, tmp_path / "a", [text], work=work)
    (work / "settings.json").write_text(damaged)
    with pytest.raises(TargetError, match=r"settings.json: is damaged: start over with .* fresh"):
        build_from(RTN, short_model, tmp_path / "b", [text], work=work)
    build_from(RTN, short_model, tmp_path / "b", [text], work=work, fresh=True)
    assert tree(tmp_path / "b") == whole


@pytest.mark.parametrize("at", ["rename", "rmtree"])
def test_starting_over_is_stopped(tmp_path, monkeypatch, at):
    """What followed from the text before is not taken for what follows from the new one, wherever --fresh stopped."""
    stages, accepted = ("calibrate", "quantize", "add-w1.64"), []
    for last in itertools.count(1):
        with contextlib.closing(WorkDirectory(tmp_path / f"{last}")) as work:
            for stage in stages:
                work.begin(stage, {"text": "old"}, False)
                work.mark(stage, 0, {})
            work.object("0" * 64).write_bytes(b"old")
            calls = itertools.count(1)

            def stop(*_, calls=calls, last=last, **more):
                if next(calls) == last:
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                spy(patch, *((Path, at) if at == "rename" else (shutil, at)), stop)
                work.begin("calibrate", {"text": "new"}, True)
            try:
                work.begin("calibrate", {"text": "new"}, False)
            except InputError:
                accepted.append(False)
                continue
            accepted.append(True)
            assert not any(map(work.holds, stages))
            if next(calls) <= last:  # it was not stopped any more
                break
    assert accepted[0] is False and len(accepted) > len(stages)
    assert not list((tmp_path / f"{last}" / "objects").glob("*"))


def test_the_manifest_tells_how_the_bundle_was_made(bundle):
    manifest = moepack.open(bundle).manifest
    made = manifest.provenance
    assert "method: rtn" in made["recipe"] and made["method"] == "rtn"
    assert made["calibration"]["samples"] == 16 and len(made["calibration"]["tokens_sha256"]) == 64
    assert made["tools"]["moepack"] == moepack.__version__ and "torch" in made["tools"]
    assert list(made["checkpoint"]["files"]) == ["config.json", "model.safetensors"]
    assert str(Path.home()) not in json.dumps(dict(made)) and "/" not in made["checkpoint"]["name"]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE behaves so on Linux")
def test_a_full_disk_is_one_line_and_then_there_is_room(short_model, text, tmp_path, whole, monkeypatch):
    """Too little room for what is known beforehand is refused before the first layer. A limit on file size stands in
    for a full disk: the write fails in the middle of a stage, and a build with room goes on from there."""
    work = tmp_path / "work"
    (tmp_path / "r.yaml").write_text(RTN)
    words = ["build", short_model, "-o", tmp_path / "out" / "b", "-r", tmp_path / "r.yaml", "-c", text, "--work", work]
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=600_000))
        refused(cli(*words, "-q"), "work: the disk lacks room: 1,310,720 bytes to write, 600,000 free")
    assert not list((work / "calibrate").glob("layer-*/*")), "before the first layer"
    with files_of_at_most(300_000):
        refused(cli(*words, "-q"), ".safetensors: cannot be written: File too large")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    build_from(RTN, short_model, tmp_path / "b", [text], work=work)
    assert tree(tmp_path / "b") == whole
    assert not list((work / "objects").iterdir()), "objects are dropped once their layer is done"


FEW = """
versions: [w4]
quantize: {method: rtn, loss_tokens: 64}
calibration: {samples: 6, length: 32, batch_size: 4}
"""


def test_experts_that_few_calibration_tokens_reach_are_said(short_model, text, tmp_path):
    notes = Notes()
    build_from(FEW, short_model, tmp_path / "b", [text], reporter=notes)
    facts = inspect(tmp_path / "b")
    assert facts["calibration_tokens"] == 6 * 32
    # Six windows bring 384 tokens to a layer's 16 experts: most are below what losses need.
    tables = moepack.open(tmp_path / "b").calibration()
    few = sum(int((t.tokens < 256).sum()) for t in tables.layers)
    assert FEW_TOKENS == 256 and few > 16
    said = {"below": 256, "experts": few}
    assert facts["few_tokens"] == said == moepack.open(tmp_path / "b").manifest.provenance["calibration"]["few_tokens"]
    assert any(n.startswith(f"{few} of 32 experts were reached by fewer than 256 tokens") for n in notes.notes)
    assert f"{few} experts had fewer than 256" in str(render(facts).caption)
    assert f"{few} of 32 experts had fewer than 256" in (tmp_path / "b" / "README.md").read_text()
    assert advice({}, 64) == "", "nothing is said where all have enough"
    assert "3 of 1,024 experts" in (said := advice({2: 1, 7: 2}, 1024)) and "layer 7: 2" in said


def test_weights_of_a_recipe_reach_the_windows(short_model, text, evaluation, tmp_path):
    mixed = f"calibration: {{data: [{{source: '{text}', weight: 3}}, '{evaluation}'], samples: 8, length: 32}}"
    recipe = parse_recipe(f"versions: [w4]\nquantize: {{method: rtn, loss_tokens: 64}}\n{mixed}", "x")
    pipeline.build(short_model, tmp_path / "b", recipe)
    calibration = moepack.open(tmp_path / "b").manifest.provenance["calibration"]
    assert calibration["windows"] == [6, 2] and calibration["sources"] == [text.name, evaluation.name]
    sources, windows = calibration_text(open_checkpoint(short_model), recipe, [evaluation])
    assert sources == [str(evaluation)] and list(windows.taken) == [8], "what is named takes the recipe's place"


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
