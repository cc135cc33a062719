"""The command line: what it prints and where, and one clear line with exit code 2 for every bad input."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from support import ROOT, cli, edit_config, edit_tensors, flip, ok, refused

from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.reports.doctor import triton_fails
from moepack.runtime.planning.sizes import in_unit, parse_size
from moepack.runtime.plugin import MoepackConfig

RECIPE = "quantize: {method: rtn, loss_tokens: 64}\ncalibration: {samples: 2, length: 64}\nversions: [bf16, w2]\n"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


# --- what works


def test_help_imports_no_large_library_and_names_every_command():
    """Each of these takes longer to import than all that parsing a command line needs."""
    run = [sys.executable, "-X", "importtime", "-m", "moepack", "--help"]
    out = subprocess.run(run, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in out.stderr.splitlines()}
    large = {"torch", "transformers", "ray", "huggingface_hub", "safetensors", "matplotlib", "scipy"}
    assert "typer" in imported and not imported & large
    names = {"build", "calibrate", "quantize", "pack", "inspect", "verify", "eval", "generate", "plan", "shrink"}
    names |= {"push", "pull", "doctor"}
    assert [name for name in names if f"\n  {name} " not in out.stdout] == []


def test_version():
    import moepack

    assert cli("--version") == (0, f"moepack {moepack.__version__}\n", "")


def test_json_and_quiet(short_model, text, recipe, bundle, evaluation, tmp_path):
    """Stdout is JSON alone; progress goes to stderr, and -q leaves it out."""
    code, out, err = cli("build", short_model, "-o", tmp_path / "b", "-r", recipe, "-c", text, "--json")
    assert code == 0 and "pack" in err
    assert json.loads(out)["calibration_tokens"] == 128 and json.loads(out)["methods"] == {"w2": {"rtn": 32}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "recipe.yaml"]
    few = ("--policy", "static:w2", "--length", "64", "--samples", "2", "--json", "-q")
    code, out, err = cli("eval", bundle, "-d", evaluation, "-d", text, *few)
    facts = json.loads(out)
    keys = {"perplexity", "tokens", "tokens_per_second", "resident_bytes_peak", "budget_bytes", "promotions"}
    assert keys <= set(facts) and facts["policy"] == "static:w2" and len(facts["files"]) == 2 and err == ""


def test_inspect_json_has_the_keys_others_rely_on(bundle, tmp_path):
    code, out, err = cli("inspect", bundle, "--json", "--plot", tmp_path / "x" / "plot.png")
    facts = json.loads(out)
    assert code == 0 and err == ""
    assert facts["model_type"] == "qwen3_moe" and facts["moe_layers"] == 4 and facts["experts"] == 64
    assert facts["calibration_tokens"] == 16 * 128
    assert list(facts["versions"]) == list(facts["loss"]) == ["bf16", "w4", "w3", "w2", "w1"]
    assert (
        facts["versions"]["w4"]["bits_per_weight"] == 4.375 and 10 < facts["versions"]["bf16"]["bits_per_weight"] < 11
    )
    on_disk = sum(p.stat().st_size for p in (bundle / "experts" / "w3").iterdir())
    assert facts["versions"]["w3"]["bytes"] == on_disk
    assert facts["loss"]["bf16"] == 0 and facts["loss"]["w4"] < facts["loss"]["w2"] < facts["loss"]["w1"]
    assert (tmp_path / "x" / "plot.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("flag", "name"), [("--plot", "a.svg"), ("--html", "a.html")])
def test_a_report_on_a_full_disk_is_not_there(bundle, tmp_path, monkeypatch, flag, name):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "new" / name
    refused(cli("inspect", bundle, flag, file), f"{file}: No space left on device")
    assert not list(tmp_path.iterdir())


def test_reports_keep_brackets(bundle, tmp_path):
    (tmp_path / "a [bold] name").symlink_to(bundle)
    shown = cli("plan", tmp_path / "a [bold] name", "--device-memory", "40MB")[1]
    assert "a[bold]name" in "".join(shown.split()), "wherever its lines break"


def test_doctor():
    code, out, _ = cli("doctor", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["problems"] == [] and facts["can_build"] is True
    assert facts["methods"] == dict.fromkeys(("gptq", "hqq", "rtn", "gptqmodel"), "ready")
    assert facts["codec"]["decode_bytes_per_second"] > 1e6 and facts["codec"]["encode_bytes_per_second"] > 1e6
    assert facts["cpu"]["cores"] >= 1 and facts["disk"]["write_bytes_per_second"] > 0
    assert list(facts["disk"]["direct_bytes_per_second"]) == ["1", "2", "4", "8"]


def test_doctor_prints_units(monkeypatch):
    facts = {
        "libraries": {"torch": "2.11", "hqq": None},
        "can_build": True,
        "memory_free_bytes": 3_240_000_000,
        "devices": [{"name": "H200", "memory_bytes": 141 * 10**9}],
        "disk": {"read_bytes_per_second": 2.5e9, "direct_bytes_per_second": {"4": 1.2e9, "8": None}},
        "problems": [],
    }
    monkeypatch.setattr("moepack.reports.doctor.doctor", lambda directory: facts)
    code, out, _ = cli("doctor")
    assert code == 0 and [re.sub(" +", " ", line).strip() for line in out.splitlines()] == [
        "libraries: torch 2.11", "libraries: hqq none", "can build yes", "memory free 3.2 GB", "devices 0: name H200",
        "devices 0: memory 141.0 GB", "disk: read 2.5 GB/s", "disk: direct: 4 1.2 GB/s",
        "disk: direct bytes per second: 8 none", "problems none",
    ]  # fmt: skip


def test_doctor_asks_triton_itself():
    """Triton is there, and yet no kernel starts: for want of a GPU here, and of a C compiler in a slim image."""
    pytest.importorskip("triton")
    why = triton_fails()
    assert why is None if torch.cuda.is_available() else why and "active drivers" in why


def test_errors_have_sizes_in_the_users_unit():
    """Rounded up, so that they suffice, and down where they are the most."""
    text = "20000000 bytes are too few: the least is 1,073,741,825 bytes for 2048 cached tokens; at most 1999 bytes"
    for like, expected in (
        ("1MB", "20MB are too few: the least is 1073.75MB for 2048 cached tokens; at most 0.00199MB"),
        ("0.5 GiB", "0.0187GiB are too few: the least is 1.01GiB for 2048 cached tokens; at most 0.00000186GiB"),
        (parse_size("3g"), "0.02g are too few: the least is 1.08g for 2048 cached tokens; at most 0.00000199g"),
    ):
        assert in_unit(text, like) == expected
    for like in (None, "4096", 4096, "auto"):
        assert in_unit(text, like) == text
    assert (
        in_unit("/data/20000000/b: kv 1234567, 1 of 20000000-3", "1MB")
        == "/data/20000000/b: kv 1.24MB, 1 of 20000000-3"
    )
    assert pickle.loads(pickle.dumps(parse_size("3g"))).text == "3g"


def test_sizes():
    sizes = {"4096": 4096, "24GiB": 24 * 2**30, "1.5g": 1_500_000_000, "800 MB": 800_000_000, "2Ki": 2048}
    assert {text: parse_size(text) for text in sizes} == sizes
    assert [parse_size(size) for size in (7, 7.0, np.int64(7), np.float32(7), None)] == [7, 7, 7, 7, None]
    kept = MoepackConfig(device_memory=np.int64(7), host_memory=7.0).given
    assert json.dumps(kept) == '{"device_memory": 7, "host_memory": 7}'
    wrong = ("", "GiB", "12 parsecs", "-4", "1e3x", True, 7.5, float("inf"), -7.0, torch.ones(1) / 2, np.ones(2))
    for text in wrong:
        with pytest.raises(InputError):
            parse_size(text)


# --- what does not


@pytest.fixture
def checkpoint(demo_model, tmp_path):
    """A copy of the demo model that a test may damage."""
    return Path(shutil.copytree(demo_model, tmp_path / "checkpoint"))


def shard(checkpoint):
    """Cut the checkpoint into two shards with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({n: tensors[n] for n in part}, checkpoint / file)
        places.update(dict.fromkeys(part, file))
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def configured(**changes):
    return lambda c: edit_config(c, **changes)


def indexed(places):
    return lambda c: (shard(c), (c / INDEX).write_text(json.dumps({"weight_map": places})))


def make_dense(checkpoint):
    shutil.rmtree(checkpoint)
    tiny_models.save_tiny("qwen3", checkpoint)


CONFIG, INDEX = "config.json", "model.safetensors.index.json"
BAD_CHECKPOINTS = {
    "config not JSON": (lambda c: (c / CONFIG).write_text("{"), ("config.json", "not JSON")),
    "unknown family": (configured(model_type="mystery"), ("'mystery'", "upgrade")),
    "no model_type": (configured(model_type=None), ("model_type",)),
    "dense model": (make_dense, ("not a Mixture-of-Experts model",)),
    "no weights": (lambda c: (c / "model.safetensors").unlink(), ("model.safetensors",)),
    "truncated weights": (lambda c: os.truncate(c / "model.safetensors", 100_000), ("model.safetensors", "download")),
    "missing shard": (lambda c: (shard(c), (c / "model-1.safetensors").unlink()), ("model-1.safetensors", "missing")),
    "index outside": (indexed({"a": "../../x"}), ("'../../x'",)),
    "index not an index": (indexed(3), ("index",)),
    "expert tensor missing": (
        lambda c: edit_tensors(c, lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight")),
        ("model.layers.1.mlp.experts",),
    ),
    "no tokenizer": (
        lambda c: [(c / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")], ("tokenizer",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoints(name, checkpoint, recipe, text, tmp_path):
    damage, words = BAD_CHECKPOINTS[name]
    damage(checkpoint)
    before = sorted(p for p in tmp_path.rglob("*"))
    refused(cli("build", checkpoint, "-o", tmp_path / "out" / "b", "-r", recipe, "-c", text, "-q"), *words)
    after = sorted(p for p in tmp_path.rglob("*") if p != tmp_path / "out")
    assert after == before and not list((tmp_path / "out").glob("*"))


def test_bad_targets(demo_model, recipe, text, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep me")
    for target, word in ((tmp_path / "full", "not empty"), (recipe / "b", "cannot be written")):
        refused(cli("build", demo_model, "-o", target, "-r", recipe, "-c", text, "-q"), str(target), word)
    assert (tmp_path / "full" / "mine").read_text() == "keep me"
    refused(
        cli("build", demo_model, "-o", tmp_path / "b", "-r", recipe, "-c", text, "-q", "--work", recipe),
        "work directory",
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "recipe.yaml"]


def test_bad_recipes_and_text(demo_model, recipe, text, tmp_path):
    build = ("build", demo_model, "-o", tmp_path / "b", "-q")
    (tmp_path / "short.txt").write_text("not much")
    refused(
        cli(*build, "-r", recipe, "-c", tmp_path / "short.txt"), "short.txt", "shorter than one sample of 64 tokens"
    )
    refused(cli(*build, "-r", recipe, "-c", tmp_path / "absent.txt"), "absent.txt", "no such file")
    refused(cli(*build, "-r", recipe), "no calibration text")
    recipe.write_text(RECIPE + "allocation: {average_bits: 1.1}\n")
    refused(cli(*build, "-r", recipe, "-c", text), "average_bits 1.1", "2.667 bits")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.yaml", "short.txt"]


def test_bad_options(bundle, demo_model, evaluation, tmp_path):
    evaluate = ("eval", bundle, "-d", evaluation, "-q", "--length", "32", "--samples", "1")
    static = ("--policy", "static:w2", "--device-memory", "3MB")
    refused(cli(*evaluate, *static), "needs", "the budget is 3MB")
    refused(cli(*evaluate, *static, "--kv-tokens", "1000", "--batch", "3"), "kv 3.08MB")
    refused(cli("plan", bundle, "--device-memory", "lots"), "size 'lots'")
    refused(cli("plan", bundle), "--device-memory or --memory")
    refused(cli("plan", bundle, "--memory", "5MB"), "a memory limit of 5MB is", "the least that would do is")
    refused(cli("serve", bundle, "--replicas", "2", "--memory", "auto"), "--memory auto is for one process")
    refused(cli("eval", demo_model, "-d", evaluation, "--memory", "1GB"), "not a bundle")
    refused(cli("plan", bundle, "--device-memory", "1GB", "--device", "warp"), "device warp")
    refused(cli("bench", bundle, "--prompt", "0", "--new", "0"), "nothing to measure")
    refused(cli("inspect", bundle, "--plot", tmp_path / "losses.txt"), "losses.txt", ".png")
    refused(cli("inspect", bundle, "--plot", tmp_path / "a.pdf", "--html", tmp_path / "b.txt"), "b.txt", ".html")
    before = cli("build", demo_model, "-o", tmp_path / "b", "-q", "-c", evaluation, "--engine", "steam")
    refused(before, "engine 'steam' is unknown")
    for command in ("build", "calibrate", "quantize"):
        where = ("--work", tmp_path / "w") if command != "build" else ("-o", tmp_path / "b")
        source = (demo_model, "-c", evaluation) if command != "quantize" else ()
        refused(cli(command, *source, *where, "-q", "--device", "cuda:7"), "device cuda:7")
    refused(cli("build", demo_model, "-o", tmp_path / "b", "--dry-run", "--device", "warp", "-q"), "device warp")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "w2"), ("'w2' is unknown: did you mean static:w2?",)),
        (("--policy", "hotness:hi"), ("option hi has no value: write hi=...",)),
        (("--policy", "hotness,hi=bf16"), ("did you mean hotness:hi=bf16?",)),
        (("--policy", "hotness:high=bf16"), ("option 'high' is unknown: did you mean hi=?",)),
        (("--device", "gpu"), ("device gpu: did you mean cuda?",)),
        (("--dtype", "bf16"), ("dtype 'bf16' is unknown: did you mean bfloat16?",)),
        (("--device-memory", "0.001GiB"), ("a budget of 0.001GiB", "the least that would do is 0.0", "GiB")),
        (("-p", "caf\udce9"), ("the prompt is not text in UTF-8",)),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode()[:40],
)
def test_options_that_are_meant_otherwise(bundle, arguments, words):
    refused(cli("generate", bundle, "-p", "The", *arguments), *words)


@pytest.mark.parametrize("flags", ["--shots 3", "--limit 3", "--chat", "--task-folder x"])
def test_options_of_tasks_need_tasks(bundle, evaluation, flags):
    refused(cli("eval", bundle, "-d", evaluation, *flags.split()), f"{flags.split()[0]} is for tasks", "with --tasks")


@pytest.mark.parametrize("flags", ["--kl", "--trace t"])
def test_options_of_text_need_text(bundle, flags):
    refused(cli("eval", bundle, "--tasks", "arc", *flags.split()), f"{flags.split()[0]} is for text", "with --data")


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        *((("generate", "-p", "The"), f) for f in ("--kv-tokens 0", "--prefill-tokens 8", "--all-logits", "--batch 2")),
        *((("eval", "-d", "x.txt"), f) for f in ("--kv-tokens 9", "--all-logits", "--kv auto")),
        (("serve",), "--kv-tokens 9"),
        (("bench",), "--kv auto"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_options_of_a_budget_need_one(bundle, command, flags):
    name, *rest = command
    named = flags if "auto" in flags else flags.split()[0]
    refused(cli(name, bundle, *rest, *flags.split()), f"{named} is for a memory budget, and none is given")


def test_a_length_beyond_the_models_context_is_said(bundle, evaluation, tmp_path, monkeypatch):
    """On stderr, and in what is reported."""
    monkeypatch.setattr("moepack.runtime.planning.config.longest_context", lambda config: 32)
    said = "32 tokens at a time, the model's longest context, not 64"
    few = ("--length", "64", "--samples", "2", "--policy", "static:w2")
    code, out, err = cli("eval", bundle, "-d", evaluation, *few)
    assert code == 0 and said in err and "windows of 32 tokens" in " ".join(out.split())
    assert json.loads(cli("eval", bundle, "-d", evaluation, *few, "-q", "--json")[1])["length"] == 32
    code, out, err = cli("profile", bundle, evaluation, "-o", tmp_path / "profile.json", *few)
    assert code == 0 and said in err and ": 64 tokens" in out


def test_what_is_no_checkpoint_is_named(bundle, demo_model, text, tmp_path):
    (tmp_path / "ggufs").mkdir()
    gguf = tmp_path / "ggufs" / "model-Q4_K_M.GGUF"
    gguf.write_bytes(b"GGUF")
    gguf.with_suffix(".gguf").write_bytes(b"GGUF")
    (tmp_path / "weights.bin").write_bytes(b"")
    other = "give the checkpoint that it was made from"
    for model, words in (
        (gguf, ("is a GGUF file", other)),
        (gguf.parent, ("holds GGUF files, as model-Q4_K_M", other)),
        ("someone/Model-30B-GGUF", ("a repository of GGUF files", other)),
        (tmp_path / "weights.bin", ("is a file: give the directory that holds it",)),
        (bundle, ("is a bundle, not a checkpoint", other)),
    ):
        out = ("-o", tmp_path / "b", "-q")
        refused(cli("build", model, *out, "-c", text), str(model), *words)
        refused(cli("build", model, *out, "-c", text, "--dry-run"), str(model), *words)
        refused(cli("verify", bundle, "--checkpoint", model, "-q"), str(model), *words)
        if model not in (bundle, "someone/Model-30B-GGUF"):
            refused(cli("generate", model, "-p", "The"), str(model), *words)


def test_a_dry_run_names_a_missing_shard(checkpoint, recipe, text, tmp_path):
    shard(checkpoint)
    (checkpoint / "model-1.safetensors").unlink()
    said = ok(cli("build", checkpoint, "-o", tmp_path / "b", "-r", recipe, "-c", text, "-q", "--dry-run", "--json"))
    assert "of 2 files of weights 1 are missing, as model-1.safetensors" in said


def test_a_terminal_that_shows_ascii_alone(bundle, tmp_path):
    (tmp_path / "caf\u00e9").symlink_to(bundle)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    for command, word in (("inspect", b"bits/weight"), ("verify", b": good")):
        run = [sys.executable, "-m", "moepack", command, str(tmp_path / "caf\u00e9")]
        shown = subprocess.run(run, capture_output=True, env=environment, check=True)
        assert word in shown.stdout and b"Traceback" not in shown.stderr
        assert command == "verify" or shown.stdout.isascii(), "the library of command lines writes UTF-8 by itself"


@pytest.mark.parametrize(
    ("incomplete", "expected"),
    [
        ("static:al", ["static:allocation"]),
        ("hotness:pref", ["hotness:prefetch="]),
        ("hotness:hi=bf16,prefetch=", ["hotness:hi=bf16,prefetch=yes", "hotness:hi=bf16,prefetch=no"]),
        ("nonesuch:", []),
    ],
)
def test_policies_and_their_options_are_completed(incomplete, expected, monkeypatch):
    """By the shell's protocol of typer."""
    monkeypatch.setattr("__main__.__package__", None)  # else the program is named after `python -m pytest`
    monkeypatch.setenv("_MOEPACK_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"moepack generate bundle --policy {incomplete}")
    code, out, _ = cli()
    assert code == 0 and [line.partition("\t")[0] for line in out.splitlines() if line.strip()] == expected


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("build", "--work", "w"), "behind the last finished layer"),
        (("pull",), "fetches what is not here yet"),
        (("eval",), "nothing was kept"),
    ],
)
def test_an_interrupted_command_says_how_it_goes_on(command, words, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    named = {
        "build": "moepack.pipeline.build.build",
        "pull": "moepack.hub.pull",
        "eval": "moepack.reports.evaluate.evaluate",
    }
    monkeypatch.setattr(named[command[0]], stopped)
    arguments = ("owner/model", *(() if command[0] == "eval" else ("-o", "b")))
    code, out, err = cli(command[0], *arguments, *command[1:])
    assert code == 130 and out == "" and err.startswith("moepack: interrupted: ") and words in err
    assert err.count("\n") == 1


def test_what_is_wrong_is_said_before_a_model_is_loaded(bundle, demo_model, evaluation, tmp_path, monkeypatch):
    from moepack.reports import evaluate

    monkeypatch.setattr(evaluate, "load_shown", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "short.txt").write_text("not much")
    (tmp_path / "rows.jsonl").write_text('{"words": "and no text"}\n')
    for model in (bundle, demo_model):
        text, prompt = ("eval", model, "-q", "-d"), ("generate", model, "-p")
        refused(cli(*text, tmp_path / "absent.txt"), "absent.txt: no such file")
        refused(cli(*text, evaluation, "-d", "./absent"), "./absent: no such file")
        refused(cli(*text, tmp_path / "short.txt"), "short.txt: shorter than one window")
        refused(cli(*text, tmp_path / "rows.jsonl"), "rows have no 'text'")
        refused(cli(*prompt, ""), "prompt is empty")
        for command in ((*text, evaluation), (*prompt, "The")):
            refused(cli(*command, "--dtype", "int8"), "dtype 'int8'")
            refused(cli(*command, "--device", "warp"), "device warp")
            refused(cli(*command, "--device", "cuda:7"), "device cuda:7")
            refused(cli(*command, "--policy", "static:w7"), "no version 'w7'" if model == bundle else "not a bundle")
            refused(cli(*command, "--device-memory", "lots"), "size 'lots'")
        if model == bundle:
            for trace in (tmp_path, tmp_path / "absent" / "trace.jsonl"):
                refused(cli(*text, evaluation, "--trace", trace), str(trace), "cannot be written")
    refused(cli("eval", demo_model, "-q", "-d", evaluation, "--trace", tmp_path / "t"), "a trace needs one")


def test_a_bad_bundle(damaged):
    """As programs read it. tests/pack/test_rules.py runs `verify` on a bundle for each rule of the format."""
    at = open_bundle(damaged).layer_file("w4", 2).offset(9) + 7
    flip(damaged / "experts/w4/layer-002.safetensors", at)
    code, out, err = cli("verify", damaged, "-q", "--json")
    listed = json.loads(out)
    assert code == 2 and listed["ok"] is False and err == f"moepack: {damaged}: 1 problem\n"
    assert set(listed["problems"][0]) == {"location", "kind", "message"}
    refused(cli("generate", damaged, "-p", "The", "--policy", "static:w4"), "layer 2, expert 9, version w4")


def test_verify_against_another_checkpoint(bundle, checkpoint):
    edit_tensors(checkpoint, lambda t: t["model.layers.1.mlp.experts.3.up_proj.weight"][0, 0].add_(1))
    edit_tensors(checkpoint, lambda t: t["model.norm.weight"][0].add_(1))
    code, out, err = cli("verify", bundle, "--checkpoint", checkpoint, "-q")
    assert code == 2 and len(out.splitlines()) == 2 and err == f"moepack: {bundle}: 2 problems\n"
    assert "layer 1, expert 3, version bf16: differs" in out and "tensor model.norm.weight differs" in out
