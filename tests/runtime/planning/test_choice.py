"""One default policy wherever a budget is given, and what it falls back to."""

import pickle
import shutil

import pytest
import torch
from support import for_logits, load_for_logits
from transformers import AutoModelForCausalLM

import moepack
from moepack.pack.errors import InputError
from moepack.pack.manifest import CONFIG
from moepack.pack.reader import Bundle, open_bundle
from moepack.reports.evaluate import evaluate
from moepack.reports.plan import plan
from moepack.runtime.planning.choice import choose_policy
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
    """A pool's worker hands its error on by pickle: with its words once, and the least that would do."""
    for error in (BudgetExceeded("x needs y"), TooSmallError("x needs y", 7)):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) == "x needs y: out of memory."
    assert pickle.loads(pickle.dumps(TooSmallError("x", 7))).least == 7
