"""Configurations, tables and files edited to do harm, where transformers or a plan meets them: every command says so in
one line, and none waits or prints a traceback."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from hostile_edits import Victim, in_time, one_line
from support import edit_config, for_logits
from transformers import GenerationConfig

import moepack
from moepack.generation import generate
from moepack.pack.errors import MoepackError
from moepack.pipeline.dryrun.estimate import estimate
from moepack.pipeline.recipe import parse_recipe
from moepack.reports.evaluate import evaluate
from moepack.reports.plan import plan
from moepack.server.command import Serve, serve

CONFIG = "config.json"


@pytest.fixture(scope="module")
def copied(bundle, tmp_path_factory):
    plan(bundle, for_logits(device_memory=1 << 30, policy="static:w2"))  # imports what it needs, which takes seconds
    return Victim(bundle, tmp_path_factory.mktemp("victim"))


@pytest.fixture
def victim(copied):
    yield copied
    copied.restore()


def refuses(*uses, match="", seconds=20):
    """What the last use says, in one line; each is refused in this time."""
    for use in uses:
        with in_time(seconds), pytest.raises(MoepackError, match=match) as error:
            use()
        one_line(str(error.value))
    return str(error.value)


@pytest.fixture
def model(demo_model, tmp_path):
    """A copy of the demo model to edit."""
    return Path(shutil.copytree(demo_model, tmp_path / "model"))


def config(**changes):
    def edit(v):
        v.rewrite(CONFIG, json.dumps({**json.loads((v.path / CONFIG).read_text()), **changes}).encode())

    return edit


EDITS = {
    "no JSON": (lambda v: v.rewrite(CONFIG, b"{"), "its config cannot be read"),
    "nested deeply": (lambda v: v.rewrite(CONFIG, b'{"a":' * 50_000), "its config cannot be read"),
    "an escape": (config(model_type="\x1b[31m\ud800"), r"model type `\\x1b\[31m\\ud800`"),
    "a long word": (config(dtype="x" * 100_000), "its config cannot be read"),
    "a dtype that is an object": (config(dtype={"a": {}}), "has no dtype that torch knows"),
    "a width that is text": (config(hidden_size="64"), "its config cannot be read"),
    "architectures of objects": (config(architectures=[{}]), "architectures that are no list of names"),
    "five layers": (config(num_hidden_layers=5), "layers, its manifest 4"),
    "a billion labels": (config(num_labels=10**9), "has num_labels 1000000000: 65536 is the most"),
    "-1 experts of a token": (config(num_experts_per_tok=-1), "num_experts_per_tok '-1', its layers have 16"),
    "a quantisation that is a list": (config(quantization_config=[]), "config"),
    "another byte": (lambda v: v.write(CONFIG, (v.path / CONFIG).read_bytes().replace(b"1", b"2")), "digest"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_config_is_refused_in_a_line(name, victim):
    """Before a tokenizer is loaded too: transformers reads the config for its sake, and raises what it raises."""
    edit, message = EDITS[name]
    edit(victim)
    uses = (
        lambda: plan(victim.path, for_logits(device_memory=1 << 30, policy="static:w2")),
        lambda: moepack.load(victim.path),
        lambda: generate(victim.path, "The"),
    )
    refuses(*uses[: 2 if name == "an escape" else 3], match=message)


def test_a_checkpoints_config_is_refused_in_a_line(model, text, tmp_path):
    edit_config(model, vocab_size=10**12)
    refuses(
        lambda: generate(model, "The"),
        lambda: evaluate(model, [str(text)], samples=1),
        lambda: moepack.build(model, tmp_path / "bundle", calibration=[text]),
        match="has vocab_size 1000000000000: ",
    )


UNFIT = (  # one for each kind of error, as the configuration is read and as the model is built
    {"hidden_size": "128"}, {"dtype": "nonsense"}, {"quantization_config": []}, {"auto_map": 3},
    {"hidden_size": 0}, {"rope_parameters": {"rope_type": "nonsense"}}, {"num_attention_heads": 0},
    {"architectures": 7}, {"pad_token_id": 1 << 20}, {"text_config": 3},
    {"attn_implementation": "flash_attention_2"}, {"num_experts_per_tok": 0},
)  # fmt: skip


@pytest.mark.parametrize("changes", UNFIT, ids=str)
def test_a_checkpoint_that_no_model_fits_is_refused_in_a_line(changes, model, text, tmp_path):
    edit_config(model, **changes)
    recipe = parse_recipe("{quantize: {method: rtn, loss_tokens: 32}, calibration: {samples: 2, length: 32}}", "test")
    said = refuses(lambda: estimate(model, tmp_path / "bundle", recipe, [text]), seconds=60)
    assert len(said.removeprefix(str(model)).split()) > 3, "a word alone says nothing"


@pytest.mark.parametrize("said", ['{"max_new_tokens": -3}', '{"watermarking_config": {"a": 1}}', "[]", "{"])
def test_a_generation_config_that_transformers_refuses_is_named(said, model):
    (model / "generation_config.json").write_text(said)
    refuses(lambda: generate(model, "The", max_new_tokens=1), match=r"generation_config\.json", seconds=60)


def test_a_generation_config_that_cannot_be_read_is_no_missing_one(model, monkeypatch):
    def denied(file):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    with monkeypatch.context() as patch:
        patch.setattr(GenerationConfig, "_dict_from_json_file", denied)
        refuses(lambda: generate(model, "The", max_new_tokens=1), match=r"generation_config\.json", seconds=60)
    (model / "generation_config.json").unlink()
    assert generate(model, "The", max_new_tokens=1)


def another_byte(file):
    return lambda v: v.write(file, (v.path / file).read_bytes().replace(b"0", b"1", 1))


READ = {
    "an absurd config": (config(num_labels=10**9), "has num_labels"),
    "a tokenizer's byte": (another_byte("tokenizer.json"), "do not match their digest"),
    "a token's number": (another_byte("generation_config.json"), "do not match their digest"),
    "a pipe": (lambda v: v.replace("tokenizer_config.json", os.mkfifo), "is a pipe"),
}


@pytest.mark.parametrize("name", READ)
def test_what_transformers_reads_is_looked_at_before(name, victim, monkeypatch, evaluation):
    def read(*asked, **more):
        raise AssertionError("it was read")

    for reader in ("AutoTokenizer", "GenerationConfig", "AutoConfig"):
        monkeypatch.setattr(f"transformers.{reader}.from_pretrained", read)
    edit, message = READ[name]
    edit(victim)
    refuses(
        lambda: moepack.load(victim.path),
        lambda: generate(victim.path, "The", max_new_tokens=1),
        lambda: serve(Serve(str(victim.path), port=0), lambda where: None),
        lambda: evaluate(victim.path, [str(evaluation)], samples=1),
        match=message,
    )


MISFITS = (
    {"hidden_size": 96}, {"rope_parameters": {"rope_type": True}}, {"head_dim": 0}, {"pad_token_id": 1 << 20},
    {"attn_implementation": "flash_attention_2"},
)  # fmt: skip


@pytest.mark.parametrize("changes", MISFITS)
def test_a_model_that_is_not_its_tensors_is_refused_in_a_line(changes, victim):
    config(**changes)(victim)
    refuses(lambda: moepack.load(victim.path), seconds=60)


@pytest.mark.parametrize("end", [-1, True, [3, "x"], {"a": 1}, [1, 10**30]])
def test_a_generation_config_that_ends_at_no_token(end, victim):
    victim.rewrite("generation_config.json", json.dumps({"eos_token_id": end}).encode())
    refuses(
        lambda: generate(victim.path, "The", max_new_tokens=1),
        lambda: serve(Serve(str(victim.path), port=0), lambda where: None),
        match=r"generation_config\.json", seconds=60,
    )  # fmt: skip


def test_a_generation_config_that_asks_for_anything(victim):
    """What it says of choosing is not what the command was asked for."""
    asks = {
        "stop_strings": 3, "use_mtp": True, "num_beams": 4, "cache_implementation": "static", "do_sample": True,
        "repetition_penalty": 9.0, "max_length": 1, "suppress_tokens": "x", "max_time": 0,
    }  # fmt: skip
    plain = generate(victim.path, "The", max_new_tokens=4)
    victim.rewrite("generation_config.json", json.dumps(asks).encode())
    assert generate(victim.path, "The", max_new_tokens=4) == plain


def test_an_error_of_the_caller_s_own_stays_its_own(bundle):
    def tell(text):
        raise ValueError("a pipe that has gone")

    with pytest.raises(ValueError, match="a pipe that has gone"):
        generate(bundle, "The", max_new_tokens=4, tell=tell)


def test_a_context_of_no_tokens_is_none(victim, evaluation):
    config(max_position_embeddings=-1)(victim)
    assert evaluate(victim.path, [str(evaluation)], length=32, samples=1).tokens


def test_a_tokenizer_is_refused_in_a_line(victim):
    for data in (b"[]", b'{"tokenizer_class": 3}', b"\xff", b'{"model_max_length": "x"}'):
        victim.rewrite("tokenizer_config.json", data)
        if b"model_max" not in data:  # this one is loaded, and trips over its first text
            victim.rewrite("tokenizer.json", b"{}")
        said = "no tokenizer that transformers can load"
        refuses(lambda: generate(victim.path, "The"), match=said, seconds=60)
        victim.restore()


def test_tables_are_refused_in_a_line_by_plan(victim):
    victim.tables(lambda arrays, metadata: arrays["layers.0.relative"].fill(float("nan")))
    refuses(lambda: plan(victim.path, for_logits(device_memory=1 << 30, policy="hotness")), match="not finite")


def test_the_manifest_a_pipe_is_no_bundle(victim):
    victim.replace("manifest.json", os.mkfifo)
    refuses(lambda: moepack.load(victim.path), match="not a bundle")
    refuses(lambda: plan(victim.path, for_logits(device_memory=1 << 30)), match="is a pipe")
