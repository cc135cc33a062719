"""The form of the KV cache with which experts and cache lose least in a budget: as planned, and as loaded."""

import json

import pytest
from support import ROOT

import moepack
from moepack.pack.errors import InputError
from moepack.reports.plan import plan
from moepack.runtime.experts import backends
from moepack.runtime.kv.forms import FORMS, LOSS
from moepack.runtime.planning.decided import best_cache
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.options import LoadOptions

ASKED = {"kv": "auto", "kv_tokens": 2000, "prefill_tokens": 64, "all_logits": False}
ROOMY = 60_000_000


def loaded(bundle, **options):
    """The bits of each layer's cache; none for a plain one."""
    with moepack.load(bundle, **{**ASKED, **options}).moepack as serving:
        return serving.kv


@pytest.mark.parametrize(
    ("experts", "best"),
    [
        ({"16": 0.0, "8": 0.0, "k8v4": 0.0, "4": 0.0}, "16"),
        ({"16": 0.02, "8": 0.019, "k8v4": 0.0185, "4": 0.018}, "8"),
        ({"16": None, "8": 0.03, "k8v4": 0.02, "4": 0.019}, "k8v4"),
        ({"16": None, "8": None, "k8v4": None, "4": 0.5}, "4"),
        ({"16": None, "8": None}, "8"),
    ],
)
def test_the_least_sum_is_chosen(experts, best):
    """Where no form fits, the last is returned, so that loading says what would fit."""

    def lose(form):
        if experts[form] is None:
            raise TooSmallError("too small", 1)
        return experts[form]

    assert best_cache(experts, lose) == best


def test_a_form_loses_what_was_measured():
    """The larger of two models' losses, rounded up."""
    most = dict.fromkeys(FORMS, 0.0)
    for name in ("cache", "cache-tiny-qwen3-moe"):
        for row in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]:
            if row.get("experts") == "bf16":
                most[row["kv"]] = max(most[row["kv"]], row["as relative loss"])
    assert list(LOSS) == list(FORMS) and list(LOSS.values()) == sorted(LOSS.values())
    assert all(most[form] <= LOSS[form] <= 1.3 * most[form] for form in FORMS)


@pytest.mark.skipif(backends.library() is None, reason="a cache is coded by the compiled kernels")
def test_loading_takes_what_the_plan_chooses(bundle):
    roomy = plan(bundle, LoadOptions(device_memory=ROOMY, **ASKED))
    assert roomy.kv == "16" and [form.kv for form in roomy.caches] == list(FORMS)
    assert loaded(bundle, device_memory=ROOMY) == ()
    size = plan(bundle, LoadOptions(device_memory=ROOMY, **ASKED | {"kv": "k8v4"})).least_bytes
    tight = plan(bundle, LoadOptions(device_memory=size, **ASKED))
    found = {form.kv: form for form in tight.caches}
    assert found["16"].experts_loss is None and found["8"].experts_loss is None, "they do not fit"
    sums = {kv: form.experts_loss + form.cache_loss for kv, form in found.items() if form.experts_loss is not None}
    assert tight.kv == min(sums, key=sums.get) and tight.used_bytes <= size
    assert loaded(bundle, device_memory=size) == (FORMS[tight.kv],) * 4


def test_a_cache_stays_plain_where_nothing_is_weighed(bundle, monkeypatch):
    """Without a budget, and without the kernels that code a cache."""
    assert loaded(bundle, policy="static:w4") == ()
    monkeypatch.setattr(backends, "library", lambda: None)
    assert loaded(bundle, device_memory=ROOMY) == ()
    assert plan(bundle, LoadOptions(device_memory=ROOMY, **ASKED)).kv == "16"
    with pytest.raises(InputError, match="kv is one of 16, 8, k8v4, 4, auto, not '7'"):
        LoadOptions(kv="7")
