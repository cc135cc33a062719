"""Versions added to a bundle: the bytes of a build with all of them, nothing made twice, one bundle at every moment."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support import HELPERS, build_from, cli, ok, python, refused, spy, tree
from tiny_models import save_tiny

import moepack
from moepack.pack import writer
from moepack.pack.errors import InputError, TargetError
from moepack.pipeline import build as pipeline
from moepack.pipeline.add import add
from moepack.pipeline.executors import local
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.shrink import shrink

BASE = "calibration: {samples: 12, length: 64, batch_size: 6}\n"
RTN = f"versions: [bf16, w4]  # the first two\nquantize: {{method: rtn, loss_tokens: 64}}\n{BASE}"


def rebuilt(bundle, model, text, out):
    """A build of a bundle's recipe, from the beginning."""
    recipe = moepack.open(bundle).manifest.provenance["recipe"]
    assert isinstance(recipe, str)
    build_from(recipe, model, out, [text])
    return tree(out)


def groups(versions):
    """Versions' names and group sizes."""
    return [f"{v.name} {v.group_size}" for v in versions]


@pytest.fixture(scope="module")
def kept(short_model, text, made_once):
    """A bundle and the work directory that it was built in; read only."""

    def make(root):
        build_from(RTN, short_model, root / "b", [text], work=root / "w", keep=True)

    return made_once("added-to", make)


@pytest.fixture
def mine(kept, tmp_path):
    """Copies to change."""
    return Path(shutil.copytree(kept, tmp_path / "mine"))


def versions_of(make, monkeypatch):
    """The versions that a function of the executors makes pieces in, from now on."""
    names = []
    spy(monkeypatch, local, make, lambda task, *_: names.extend(v.name for v in task.versions))
    return names


@pytest.fixture
def made(monkeypatch):
    """The versions that expert batches are made in."""
    return versions_of("make_expert_batch", monkeypatch)


def test_added_versions_are_those_of_one_build(mine, short_model, text, tmp_path, made, monkeypatch):
    from moepack.calibrate.forward import CalibrationPass

    before = tree(mine / "b")
    with monkeypatch.context() as patch:
        patch.setattr(CalibrationPass, "run_layer", lambda *_: pytest.fail("calibrated again"))
        report = add(mine / "b", mine / "w", ["w2", "w1"], checkpoint=short_model)
        assert report.bundle == mine / "b" and set(report.methods) == {"w4", "w2", "w1"}
        assert set(made) == {"w2", "w1"}, "what is there is not made again"
        after = tree(mine / "b")
        assert {k for k in before if k.startswith("experts/")} < after.keys()
        assert all(after[k] == v for k, v in before.items() if k.startswith("experts/"))
        # Once more: nothing to do, and nothing done.
        made.clear()
        assert add(mine / "b", mine / "w", ["w2"]) == replace(report, unchanged=True)
        assert not made
        # On top of it another group size: the version is replaced, and only it is made.
        add(mine / "b", mine / "w", ["w4"], {"w4": 32})
        assert set(made) == {"w4"}
    assert groups(moepack.open(mine / "b").versions) == ["bf16 0", "w4 32", "w2 64", "w1 64"]
    assert not moepack.open(mine / "b").verify()
    assert sorted(p.name for p in mine.iterdir()) == ["b", "w"]
    assert tree(mine / "b") == rebuilt(mine / "b", short_model, text, tmp_path / "fresh")


def test_versions_of_dense_matrices(short_model, text, tmp_path, made, monkeypatch):
    """Nothing of the experts is made or asked for, but where these are added to as well; the map takes them in. In the
    end codes, losses, their errors and the map are bit for bit those of a build in which all widths share a pass."""
    recipe = f"versions: [w4, w3]\ndense: [w4]\nquantize: {{method: gptq, loss_tokens: 64}}\n{BASE}"
    recipe += "allocation: {average_bits: 5.2, dense: true}\n"
    bundle, work = tmp_path / "b", tmp_path / "w"
    model = save_tiny("qwen3_moe", tmp_path / "model", short_model, tie_word_embeddings=True)
    build_from(recipe, model, bundle, [text], work=work, keep=True)
    slices = versions_of("make_row_shard", monkeypatch)
    made.clear()
    with monkeypatch.context() as patch:
        patch.setattr("moepack.pipeline.run.load_observation", lambda *_: pytest.fail("what experts saw was read"))
        patch.setattr("moepack.calibrate.stream.StreamedModel.load", lambda *_: pytest.fail("experts were read"))
        add(bundle, work, [], {"w8": 32}, dense=["w8"])
    assert not made and set(slices) == {"bf16", "w8"}, "the lossless one is made with every other"
    assert groups(moepack.open(bundle).dense_versions) == ["bf16 0", "w8 32", "w4 64"]
    slices.clear()
    made.clear()
    # Of both at once; and one that both have changes its group size in both.
    add(bundle, work, ["w4", "w2"], {"w4": 32}, dense=["w4"])
    assert set(made) == {"w4", "w2"} and set(slices) == {"bf16", "w4"}
    assert tree(bundle) == rebuilt(bundle, model, text, tmp_path / "again")
    before = tree(bundle)
    assert add(bundle, work, [], dense=["w8"], group_sizes={"w8": 32}).unchanged and tree(bundle) == before
    with pytest.raises(InputError, match="w4: dense matrices would have it in groups of 64, experts of 32"):
        add(bundle, work, [], {"w4": 64}, dense=["w4"])
    assert tree(bundle) == before
    # A bundle of fewer gets back the lossless one, which a recipe's dense matrices always have.
    shrink(bundle, tmp_path / "s", ["w4"], dense=["w8"])
    assert [v.name for v in moepack.open(tmp_path / "s").dense_versions] == ["w8"]
    add(tmp_path / "s", work, ["w2"])
    assert [v.name for v in moepack.open(tmp_path / "s").dense_versions] == ["bf16", "w8"]
    assert not moepack.open(tmp_path / "s").verify()


def test_dense_matrices_that_had_none(mine, short_model, text, tmp_path):
    """A bundle without, of a calibration that saw them; of one that did not, adding is refused. A work directory that
    was quantised by another recipe since would replace the bundle's versions, or losses would not compare."""
    plain = f"versions: [w4]\nquantize: {{method: rtn, loss_tokens: 64}}\n{BASE}"
    bundle, work = tmp_path / "b", tmp_path / "w"
    pipeline.calibrate(short_model, work, parse_recipe(f"{plain}dense: [w8]\n", "x"), [text])
    pipeline.quantize(work, parse_recipe(plain, "x"))
    pipeline.pack(work, bundle)
    assert not moepack.open(bundle).dense_versions
    add(bundle, work, [], dense=["w3"])
    before = tree(bundle)
    assert before == rebuilt(bundle, short_model, text, tmp_path / "fresh")
    files = tree(work)
    with pytest.raises(InputError, match="name each version once, and at least one"):
        pipeline.quantize(work, replace(parse_recipe(plain, "x"), versions=(), dense=("w8",)), fresh=True)
    assert tree(work) == files
    for other, word in (("hqq, loss_tokens: 64", "method hqq"), ("rtn, loss_tokens: 65", "loss_tokens 65")):
        again = plain.replace("rtn, loss_tokens: 64", other).replace("[w4]", "[w8, w4]\ndense: [w8]")
        pipeline.quantize(work, parse_recipe(again, "x"), fresh=True)
        for versions, dense in ((["w2"], []), ([], ["w8"]), (["w8"], [])):
            with pytest.raises(InputError, match=f"was quantised with {word}, .*/b with"):
                add(bundle, work, versions, dense=dense)
    assert tree(bundle) == before
    files = tree(mine)
    for _ in range(2):  # a stage that was begun and refused is not taken for one that is done
        with pytest.raises(InputError, match="was calibrated without dense"):
            add(mine / "b", mine / "w", [], dense=["w3"])
        assert tree(mine) == files


def test_onto_a_calibrated_work_directory(short_model, text, tmp_path):
    """Stages, and no bundle yet: one is made of what is there and what is added, quantised before or not."""
    pipeline.calibrate(short_model, tmp_path / "w", parse_recipe(RTN, "x"), [text])
    add(tmp_path / "a", tmp_path / "w", ["w2"])
    pipeline.quantize(tmp_path / "w")
    add(tmp_path / "b", tmp_path / "w", ["w2"])
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert tree(tmp_path / "b") == rebuilt(tmp_path / "b", short_model, text, tmp_path / "fresh")
    pipeline.pack(tmp_path / "w", tmp_path / "first")
    assert [v.name for v in moepack.open(tmp_path / "first").versions] == ["bf16", "w4"], "and the stages stay"


def test_other_files_and_an_edited_card_stay(mine):
    bundle = mine / "b"
    (bundle / "notes").mkdir()
    (bundle / "notes" / "mine.txt").write_text("mine")
    (bundle / "link").symlink_to("notes")
    (bundle / ".pulled.json").write_text("{}")
    card = (bundle / "README.md").read_text()
    add(bundle, mine / "w", ["w2"])
    assert (bundle / "notes" / "mine.txt").read_text() == "mine" and (bundle / "link").readlink() == Path("notes")
    assert not (bundle / ".pulled.json").exists(), "it is not what was pulled any more"
    assert "| w2 |" in (bundle / "README.md").read_text() != card
    (bundle / "README.md").write_text("edited")
    add(bundle, mine / "w", ["w1"])
    assert (bundle / "README.md").read_text() == "edited" and not moepack.open(bundle).verify()


def test_a_shrunk_bundle_gets_back_what_it_had(mine, made):
    shrink(mine / "b", mine / "small", ["w4"])
    assert set(add(mine / "small", mine / "w", ["w4"]).methods) == {"w4"}
    add(mine / "small", mine / "w", ["bf16"])
    assert not made and [v.name for v in moepack.open(mine / "small").versions] == ["bf16", "w4"]


def test_refusals(mine, short_model, text, tmp_path, monkeypatch):
    before = tree(mine / "b")

    def not_added(word, names=("w2",), sizes=None, **more):
        with pytest.raises((InputError, TargetError), match=word) as caught:
            add(more.pop("output", mine / "b"), more.pop("work", mine / "w"), names, sizes, **more)
        assert "\n" not in str(caught.value) and tree(mine / "b") == before

    not_added("name the versions to add", [])
    not_added("version 'w7' is unknown", ["w7"])
    not_added("group_size w2=48: groups are of", ["w2"], {"w2": 48})
    not_added("this version is not added", ["w2"], {"w4": 32})
    not_added("is not calibrated yet", work=tmp_path / "none")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    not_added("is not empty", output=tmp_path / "full")
    other = Path(shutil.copytree(short_model, tmp_path / "model"))
    not_added("name another work", checkpoint=other)
    with pytest.raises(InputError, match="name one with work"):
        build_from(RTN, short_model, tmp_path / "c", [text], keep=True)
    build_from(
        RTN.replace("12", "4").replace("bf16, w4", "w4"), short_model, tmp_path / "c", [text], work=tmp_path / "v"
    )
    not_added("was not made of what", work=tmp_path / "v")
    with pytest.raises(InputError, match="layer 0: what its experts saw was not kept"):
        add(tmp_path / "c", tmp_path / "v", ["w2"])

    def unable(*_):
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "exchange", unable)
        not_added(r"cannot be replaced in one step here \(Invalid argument\): name a new directory")
    add(tmp_path / "elsewhere", mine / "w", ["w2"])
    assert tree(mine / "b") == before and sorted(p.name for p in mine.iterdir()) == ["b", "w"]
    added = tree(mine)
    monkeypatch.setattr("moepack.quantize.losses.ESTIMATE", 0)  # before anything is thrown away
    not_added(r"measures losses in another way \(\d+, now 0\)", output=mine / "c", fresh=True)
    assert tree(mine) == added


def test_an_error_while_it_is_written_leaves_the_old_one(mine, monkeypatch):
    before = tree(mine / "b")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "sync", full)
        with pytest.raises(TargetError, match="No space"), writer.BundleWriter(mine / "b", ["README.md"]) as new:
            new.finish(moepack.open(mine / "b").manifest)
    with writer.BundleWriter(mine / "b", []), pytest.raises(TargetError, match="another process is replacing it"):
        writer.BundleWriter(mine / "b", [])
    assert tree(mine / "b") == before
    add(mine / "b", mine / "w", ["w2"])
    assert sorted(p.name for p in mine.iterdir()) == ["b", "w"], "what a stopped one left is gone"


def test_killed_at_every_step(kept, tmp_path):
    """At any moment the directory is the old bundle or the new one; run again, it is the new one and nothing else."""
    said = python(HELPERS / "kill_while_adding.py", kept, tmp_path)
    old, new = (int(n) for n in said.split()[-2:])
    assert old >= 5 and new >= 4, said


def test_on_the_command_line(short_model, text, tmp_path):
    (tmp_path / "r.yaml").write_text(RTN)
    common, work = ("build", short_model, "-o", tmp_path / "b", "-q"), ("--work", tmp_path / "w")
    ok(cli(*common, *work, "--recipe", tmp_path / "r.yaml", "-c", text, "--keep"))
    said = ok(cli(*common, *work, "--add", "w3,w2", "--group-size", "w2=32"))
    assert groups(moepack.open(tmp_path / "b").versions) == ["bf16 0", "w4 64", "w3 64", "w2 32"]
    assert "w3: 32 experts by rtn" in said and "nothing to add" not in said
    assert "holds these versions already: nothing to add" in ok(cli(*common, *work, "--add", "w3"))
    before, out = tree(tmp_path / "b"), "leave out --recipe, --calibration and --keep"
    for more, word in (
        (("--add", "w1"), "name its --work"),
        ((*work, "--add", "w1", "--dry-run"), "leave one of them out"),
        ((*work, "--add", "w1", "-r", "x.yaml"), f"{out}; other zeros or another method are another build"),
        ((*work, "--add", "w1", "-c", text), out),
        ((*work, "--add", "w1", "--keep"), out),
        ((*work, "--add", "w1", "--memory", "1MiB"), "--memory 1MiB cannot be kept"),
        ((*work, "--add-dense", ""), "name the versions to add"),
        ((*work, "--group-size", "w2"), "write VERSION=SIZE"),
        ((*work, "--group-size", "w2=32"), "name the versions to add"),
    ):
        refused(cli(*common, *more), word)
    assert tree(tmp_path / "b") == before
