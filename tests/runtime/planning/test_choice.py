"""One default policy wherever a budget is given, what it falls back to, and what has to be fetched for a policy."""

import json
import pickle
import shutil

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from support import for_logits, load_for_logits
from transformers import AutoModelForCausalLM

import moepack
from moepack.pack.errors import InputError
from moepack.pack.manifest import CONFIG
from moepack.pack.reader import Bundle, open_bundle
from moepack.reports.evaluate import evaluate
from moepack.reports.plan import plan
from moepack.runtime.planning.choice import choose_policy, versions_of
from moepack.runtime.planning.exceeded import BudgetExceeded, TooSmallError
from moepack.runtime.planning.options import LoadOptions

CPU = torch.device("cpu")


@pytest.fixture
def single(damaged):
    """A bundle of which one version was pulled."""
    for folder in (damaged / "experts").iterdir():
        if folder.name != "w4":
            shutil.rmtree(folder)
    return damaged


def test_the_default(bundle, single, caplog):
    opened, one = open_bundle(bundle), open_bundle(single)
    assert str(choose_policy(None, opened, ["cpu"], in_budget=False)) == "static"
    assert str(choose_policy(None, opened, ["cpu"], in_budget=True)) == "hotness"
    assert str(choose_policy("lru", opened, ["cpu"], in_budget=True)) == "lru" and not caplog.records
    assert str(choose_policy(None, one, ["cpu"], in_budget=True)) == "uniform"
    assert "w4 is its only version here: policy uniform in place of hotness" in caplog.text
    caplog.clear()
    assert str(choose_policy(None, opened, ["cpu", "meta"], in_budget=True)) == "uniform"
    assert "versions change on one CPU or one CUDA device" in caplog.text
    assert str(choose_policy("hotness", one, ["cpu"], in_budget=True)) == "hotness", "what is named is not replaced"
    with pytest.raises(InputError, match="needs a memory budget"):
        choose_policy("hotness", opened, ["cpu"], in_budget=False)


def test_it_is_the_same_everywhere(bundle, single, evaluation, monkeypatch):
    for path, policy in ((bundle, "hotness"), (single, "uniform")):
        assert plan(path, for_logits(device_memory=30_000_000)).policy == policy
        with load_for_logits(path, device_memory="30MB").moepack as serving:
            assert serving.policy == policy
        with AutoModelForCausalLM.from_pretrained(path, device_memory="30MB").moepack as serving:
            assert serving.policy == policy
        scored = evaluate(path, [str(evaluation)], LoadOptions(device_memory=30_000_000), length=32, samples=1)
        assert scored.policy == policy
    monkeypatch.setenv("MOEPACK_DEVICE_MEMORY", "30MB")
    with AutoModelForCausalLM.from_pretrained(bundle).moepack as serving:
        assert serving.policy == "hotness"


@pytest.mark.parametrize(
    "policy", ["static:w7", "static:absent.json", "hotness:hi=w9", "hotness:hi=w1", "lru", "hotnes"]
)
def test_a_policy_that_does_not_fit_is_refused_before_weights_are_read(bundle, policy, monkeypatch):
    def check(bundle, *names):
        assert not names or CONFIG in names  # none: all files but tensors
        assert not any(n.endswith(".safetensors") for n in names), "the dense weights were read"

    monkeypatch.setattr(Bundle, "check", check)
    for load in (moepack.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError):
            load(bundle, policy=policy, device_memory=None if policy == "lru" else "30MB")


def test_a_budget_that_is_exceeded_is_told_across_processes():
    """A pool's worker hands its error on by pickle: with its words once, and the least that would do.

    accelerate's search for a batch size that fits goes on after it.
    """
    for error in (BudgetExceeded("x needs y"), TooSmallError("x needs y", 7)):
        assert isinstance(error, torch.OutOfMemoryError) and should_reduce_batch_size(error)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) == "x needs y: out of memory."
    assert pickle.loads(pickle.dumps(TooSmallError("x", 7))).least == 7


def test_the_versions_that_a_policy_may_serve(bundle, tmp_path):
    manifest = moepack.open(bundle).manifest
    elsewhere = Bundle(tmp_path, manifest, manifest.versions)
    table = tmp_path / "map.json"
    table.write_text(json.dumps({"versions": [["w1"] * 16] * 3 + [["w4"] * 16]}))
    every = ("bf16", "w4", "w3", "w2", "w1")
    for text, in_budget, names in (
        (None, False, ("bf16",)), ("static", False, ("bf16",)), ("static:w2", True, ("w2",)),
        (f"static:{table}", False, ("w4", "w1")), (None, True, every), ("uniform", True, every),
        ("hotness", True, every), ("hotness:lo=absent", True, every), ("hotness:hi=w2,lo=absent", True, ("w2", "w1")),
        ("hotness:hi=w4,lo=w2", True, ("w4", "w3", "w2")), ("hotness:hi=w4,lo=w2,between=no", True, ("w4", "w2")),
        ("lru:lo=w1,hi=bf16", True, ("bf16", "w1")), ("lru:lo=absent", True, ("bf16",)), ("random", True, every),
        ("importance:hi=w4,lo=w2", True, ("w4", "w2")), ("paged", True, ("bf16",)), ("prefill", True, every),
        ("prefill:hi=w3,bits=2", True, ("w3", "w2", "w1")),
    ):  # fmt: skip
        assert versions_of(text, elsewhere, in_budget) == names, text
    named = {name for row in manifest.allocation.versions for name in row}
    assert set(versions_of("static:allocation", elsewhere, False)) == named
    one = Bundle(tmp_path, manifest, manifest.versions[3:4])
    assert versions_of(None, one, True) == ("w2",), "uniform serves it"
    for text, words in (("static:w4", "no version 'w4'"), ("hotness", "needs a memory budget")):
        with pytest.raises(InputError, match=words):
            versions_of(text, one, False)
