"""Which checkpoint a build is of, and that builds which were stopped or killed go on to the same bytes."""

import contextlib
import hashlib
import shutil
import threading
import time
from pathlib import Path

import pytest
import tiny_models
from support import RTN, Notes, flip, spy, tree

import moepack
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.forward import CalibrationPass
from moepack.calibrate.identity import identity
from moepack.pack.errors import InputError
from moepack.pipeline import build as pipeline
from moepack.pipeline import run
from moepack.pipeline.artifacts import save
from moepack.pipeline.executors import local
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.run import LayerWalk
from moepack.pipeline.work import WorkDirectory
from moepack.quantize import expert_batch

RECIPE = parse_recipe(RTN, "test")
SMALL = parse_recipe(f"versions: [w2]\n{RTN}", "test")


@pytest.fixture
def checkpoint(short_model, tmp_path):
    return Path(shutil.copytree(short_model, tmp_path / "short"))


def tuned(checkpoint):
    """Another model with the same header and size: one weight differs."""
    flip(checkpoint / "model.safetensors", -100)


def stop(patch, name, at):
    """Let the call `name` for layer `at` be interrupted."""

    def look(walk, *args, **_):
        if args[0 if name == "_quantise_layer" else 1] == at:
            raise KeyboardInterrupt

    spy(patch, LayerWalk, name, look)


def test_a_digest_is_of_the_whole_file_and_is_not_taken_twice(checkpoint):
    opened, read = open_checkpoint(checkpoint), []
    digests, known = identity(opened, None, read.append)
    assert digests == {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }
    assert sum(read) == sum((checkpoint / name).stat().st_size for name in digests)
    read.clear()
    assert identity(opened, known, read.append) == (digests, known) and not read
    tuned(checkpoint)
    other, _ = identity(opened, known, read.append)
    assert read and other["model.safetensors"] != digests["model.safetensors"]
    assert other["config.json"] == digests["config.json"]
    wrong = {**known, "config.json": {**known["config.json"], "sha256": None, "more": 1}}
    assert identity(opened, wrong)[0]["config.json"] == digests["config.json"], "an entry that was tampered with"


def test_a_file_that_changes_meanwhile_is_refused(checkpoint):
    lock = threading.Lock()  # files are read by threads of their own

    def change(size):
        time.sleep(0.02)  # the system's time of a file's change advances in steps of milliseconds
        with lock:
            tuned(checkpoint)

    with pytest.raises(InputError, match=r"changed while it was read"):
        identity(open_checkpoint(checkpoint), None, change)


def test_two_fine_tunes_do_not_mix(checkpoint, text, tmp_path):
    work = tmp_path / "work"
    pipeline.calibrate(checkpoint, work, SMALL, [text])
    tuned(checkpoint)
    with pytest.raises(InputError, match=r"made with checkpoint \(model.safetensors\)"):
        pipeline.build(checkpoint, tmp_path / "b", SMALL, [text], work=work)
    with pytest.raises(InputError, match=r"model.safetensors is not what .* was calibrated with"):
        pipeline.quantize(work)
    left = work / "objects" / "left.safetensors"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"")
    pipeline.build(checkpoint, tmp_path / "b", SMALL, [text], work=work, fresh=True)
    assert not left.exists()
    made = moepack.open(tmp_path / "b").manifest.provenance["checkpoint"]["files"]
    assert made["model.safetensors"] == hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


def test_a_revision_is_for_the_hub(checkpoint):
    with pytest.raises(InputError, match="revision is for a model on the Hub"):
        open_checkpoint(checkpoint, "main")


@pytest.mark.parametrize(("every", "lost", "again"), [(1, False, [1]), (2, False, [0, 1]), (1, True, [0, 1])])
def test_a_stopped_calibrate_goes_on_in_a_build(
    every, lost, again, checkpoint, text, tmp_path, monkeypatch,
    whole,
):  # fmt: skip
    """Calibrated layers are not run again, except those since the activations that were kept last, and are not lost."""
    work, ran = tmp_path / "work", []
    monkeypatch.setattr(run, "EVERY", every)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop(patch, "_keep_hidden", 1)
        pipeline.calibrate(checkpoint, work, RECIPE, [text])
    if lost:
        (work / "calibrate" / "layer-000" / "hidden.safetensors").unlink()
    spy(monkeypatch, CalibrationPass, "run_layer", lambda self, layer, *_: ran.append(layer))
    pipeline.build(checkpoint, tmp_path / "b", RECIPE, [text], work=work)
    assert tree(tmp_path / "b") == whole and ran == again


def test_nothing_is_thrown_away_that_cannot_be_made_again(short_model, kept, text, tmp_path):
    work = tmp_path / "work"
    pipeline.build(short_model, tmp_path / "bundle", SMALL, [text], work=work)
    before = tree(work / "quantize")
    with pytest.raises(InputError, match="layer 0: what its experts saw was not kept"):
        pipeline.quantize(work, fresh=True)
    assert before and tree(work / "quantize") == before
    (work / "calibrate" / "layer-001" / "done.json").unlink()  # as after a calibration that was killed
    save(work / "calibrate" / "layer-000" / "observation.safetensors", {})
    with pytest.raises(InputError, match="layer 1 is not calibrated: run moepack calibrate to its end"):
        pipeline.quantize(work, fresh=True)
    assert tree(work / "quantize") == before
    work = Path(shutil.copytree(kept[2], tmp_path / "dense"))
    before = tree(work / "quantize")
    (work / "calibrate" / "rest" / "moments.safetensors").unlink()
    with pytest.raises(InputError, match="without keeping the moments"):
        pipeline.quantize(work, fresh=True)
    assert before and tree(work / "quantize") == before


@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_layer_keeps_its_finished_batches(damaged, short_model, text, tmp_path, monkeypatch, whole):
    """Batches of four experts: the second run makes only those that the first had not, or that are damaged since."""
    monkeypatch.setattr(expert_batch, "MOST", 4)
    made = []

    def count(task, *_):
        made.append((task.layer, task.experts.start))
        if len(made) == 7:
            raise KeyboardInterrupt

    spy(monkeypatch, local, "make_expert_batch", count)
    with pytest.raises(KeyboardInterrupt):
        pipeline.build(short_model, tmp_path / "b", RECIPE, [text], work=tmp_path / "w")
    results = list((tmp_path / "w" / "objects").iterdir())
    assert len(made) == 7 and len(results) == 2
    if damaged:
        flip(results[0], -20)
    pipeline.build(short_model, tmp_path / "b", RECIPE, [text], work=tmp_path / "w")
    assert {*made[:7], *made[7:]} == {(layer, start) for layer in (0, 1) for start in (0, 4, 8, 12)}
    assert len(made[7:]) == 2 + damaged, "what was finished is not made again"
    assert tree(tmp_path / "b") == whole


@pytest.fixture(scope="module")
def kept(demo_model, text, tmp_path_factory):
    """A checkpoint with an output projection of its own, and what a build with everything keeps of it."""
    root = tmp_path_factory.mktemp("kept")
    sizes = {"tie_word_embeddings": False, "num_hidden_layers": 2}
    checkpoint = tiny_models.save_tiny("qwen3_moe", root / "checkpoint", demo_model, **sizes)
    recipe = parse_recipe(f"versions: [bf16, w2]\ndense: [w4]\n{RTN.replace('rtn', 'gptq')}", "test")
    pipeline.build(checkpoint, root / "b", recipe, [text], work=root / "w", keep=True)
    return checkpoint, recipe, root / "w", tree(root / "b")


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("quantize/layer-001/w2.safetensors", "flipped"),
        ("quantize/layer-000/bf16.safetensors", "cut"),
        ("quantize/layer-001/losses.safetensors", "cut"),
        ("quantize/layer-000/dense-w4.safetensors", "gone"),
        ("quantize/rest/dense-losses.safetensors", "flipped"),
        ("calibrate/rest/dense.safetensors", "flipped"),
        ("calibrate/rest/moments.safetensors", "cut"),
        ("calibrate/layer-000/dense.safetensors", "gone"),
        ("calibrate/layer-000/statistics.safetensors", "flipped"),
        ("calibrate/layer-001/observation.safetensors", "flipped"),
        ("calibrate/layer-001/hidden.safetensors", "cut"),
        ("quantize/layer-001/done.json", "renamed"),
    ],
)
def test_a_damaged_piece_is_made_again(file, how, kept, text, tmp_path):
    """A build says which, and ends in the same bytes; `pack`, which cannot make it, refuses it."""
    checkpoint, recipe, source, whole = kept
    work = Path(shutil.copytree(source, tmp_path / "w"))
    data = (work / file).read_bytes()
    (work / file).unlink()
    flipped = data[:-20] + bytes([data[-20] ^ 64]) + data[-19:]
    if how != "gone":
        made = {"flipped": flipped, "cut": data[:-20], "renamed": data.replace(b"payload", b"qayload")}
        (work / file).write_bytes(made[how])
    alone = shutil.copytree(work, tmp_path / "alone")
    with pytest.raises(InputError, match=r"is not (calibrated|quantised): run moepack"):
        pipeline.pack(alone, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    notes = Notes()
    pipeline.build(checkpoint, tmp_path / "b", recipe, [text], work=work, reporter=notes)
    assert tree(tmp_path / "b") == whole
    assert [note for note in notes.notes if "is damaged" in note] == [
        f"{work / file}: is damaged: what it holds has to be made again"
    ]


@pytest.mark.parametrize(
    ("now", "chosen", "words"),
    [
        ({"tokens": "bb"}, {"samples": 64}, "made with samples 128, now 64: use the old setting"),
        ({"tokens": "bb"}, {"text": ["b.txt"]}, r'made with text \["a.txt"\], now \["b.txt"\]'),
        ({"tokens": "bb"}, {}, 'made with tokens "aa", now "bb"'),
        ({"part": {"a": 9, "b": 9}}, {}, r"made with part \(a\) 8, now 9"),
    ],
)
def test_a_refused_resume_names_the_setting(now, chosen, words, tmp_path):
    """What the user chose, where what differs is a digest that follows from it."""
    settings = {"tokens": "aa", "part": {"a": 8}}
    behind = {"text": ["a.txt"], "samples": 256}
    with contextlib.closing(WorkDirectory(tmp_path)) as work:
        work.begin("calibrate", settings, False, behind)
        work.mark("calibrate", 0, {})
        work.begin("calibrate", settings, False, {**behind, "samples": 128})  # from which the same tokens follow
        with pytest.raises(InputError, match=words):
            work.begin("calibrate", {**settings, **now}, False, {**behind, "samples": 128, **chosen})
