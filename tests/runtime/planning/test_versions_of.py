"""What has to be fetched for a policy, before any of it is here."""

import json

import pytest

import moepack
from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.runtime.planning.choice import versions_of


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
