"""Profiles: their file, what is refused, what a server saves, and what they change before the first token."""

import json
import shutil

import numpy as np
import pytest
import torch
from live_models import load, wait_for
from support import for_logits, ids

import moepack
import moepack.runtime.profile as profiles
from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle, variant
from moepack.reports.plan import plan
from moepack.reports.profile import make_profile
from moepack.runtime.profile import kept, profiled, read_profile, write_profile


def some(bundle):
    """Counts in which each layer's last expert is the busiest."""
    return [list(range(layer.experts)) for layer in bundle.layers]


def test_a_profile_is_what_was_written(bundle, tmp_path):
    """Of a bundle with other versions too: they share what routes. Nothing but the file is left."""
    opened, file = open_bundle(bundle), tmp_path / "p.json"
    for _ in range(2):
        write_profile(file, opened, some(opened))
    assert [row.tolist() for row in read_profile(file, opened)] == some(opened)
    assert [x.name for x in tmp_path.iterdir()] == ["p.json"]
    assert profiles.identity(variant(opened, opened.versions[:1])) == profiles.identity(opened)
    with pytest.raises(OSError):
        write_profile(tmp_path / "none" / "p.json", opened, some(opened))


def test_calibration_keeps_a_little_weight(bundle, tmp_path):
    opened = open_bundle(bundle)
    write_profile(tmp_path / "p", opened, some(opened))
    before, after = opened.calibration().layers, profiled(opened, tmp_path / "p").calibration().layers
    for old, new in zip(before, after, strict=True):
        assert np.allclose(new.tokens, np.arange(len(old.tokens)) + 256 * old.tokens / old.tokens.sum())
        assert (new.relative == old.relative).all()
    assert profiled(opened, None) is opened


def test_a_texts_profile_has_all_its_tokens(bundle, evaluation, tmp_path):
    """Two windows of 32, of which each token chooses two experts in each layer."""
    made = make_profile(bundle, [str(evaluation)], tmp_path / "p", length=32, samples=2)
    assert made.tokens == 64
    assert [int(row.sum()) for row in read_profile(tmp_path / "p", open_bundle(bundle))] == [128] * 4


def test_ones_own_traffic_is_in_memory_before_any_token(bundle, tmp_path):
    """Of a profile that saw the last four experts of each layer, in a budget for as many as those."""
    opened, file = open_bundle(bundle), tmp_path / "p"
    write_profile(file, opened, [[0] * 12 + [1 << 40] * 4] * 4)
    model = load(bundle, "hotness:hi=w4,lo=stored,between=no", room=1, profile=str(file))
    assert model.moepack.versions == (("stored",) * 12 + ("w4",) * 4,) * 4


def edited(key, value):
    return lambda document: document.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edited("format", "moepack.profile/2"), "not a profile: its format"),
        (edited("model", "0" * 64), "a profile of another model than"),
        (edited("counts", [[1, 2]]), "its counts are not one for each expert"),
        (edited("counts", "all"), "its counts are not one for each expert"),
        (lambda document: document["counts"].__setitem__(1, None), "its counts are not one for each expert"),
        (lambda document: document["counts"][1].__setitem__(1, -1), "a count is a whole number"),
        (lambda document: document["counts"][1].__setitem__(1, 10**400), "a count is a whole number"),
        (lambda document: document["counts"][1].__setitem__(1, True), "a count is a whole number"),
        (lambda document: document["counts"][1].__setitem__(1, 1.5), "a count is a whole number"),
    ],
)
def test_a_hostile_profile_is_refused(change, words, bundle, tmp_path):
    opened, file = open_bundle(bundle), tmp_path / "p.json"
    write_profile(file, opened, some(opened))
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=words):
        moepack.load(bundle, profile=str(file))


def test_what_is_no_profile_at_all(bundle, tmp_path, monkeypatch):
    opened, file = open_bundle(bundle), tmp_path / "p"
    for text, words in (("[" * 100_000, "it is no JSON"), ("\xff", "it is no JSON"), ("[]", "its format is not")):
        file.write_text(text, "latin-1")
        with pytest.raises(InputError, match=words):
            read_profile(file, opened)
    with pytest.raises(InputError, match="No such file"):
        plan(bundle, for_logits(device_memory="1GB", profile=str(tmp_path / "none")))
    monkeypatch.setattr(profiles, "MOST_BYTES", 1)
    with pytest.raises(InputError, match="more than 1 bytes"):
        read_profile(file, opened)


def test_traffic_is_saved_now_and_then_and_at_the_end(bundle, tmp_path, monkeypatch, caplog):
    """12 tokens choose two experts in each layer; a later session halves them. What cannot be saved is logged."""
    monkeypatch.setattr(profiles, "EVERY", 0.01)
    opened, file = open_bundle(bundle), tmp_path / "p"
    model = moepack.load(bundle, policy="static:w4")
    with model.moepack as serving, torch.inference_mode():
        with kept(file, opened, serving):
            assert not file.exists(), "nothing was served yet"
            model(ids(12))
            wait_for(file.exists)
        first = read_profile(file, opened)
        assert [int(row.sum()) for row in first] == [24] * len(opened.layers)
        with kept(file, opened, serving):
            pass
        assert all((a == b).all() for a, b in zip(first, read_profile(file, opened), strict=True))
        with kept(file, opened, serving):
            model(ids(12))
        for old, new in zip(first, read_profile(file, opened), strict=True):
            assert (new == old // 2 + old).all()
        monkeypatch.setattr(profiles, "EVERY", 1000.0)
        with kept(file, opened, serving):
            model(ids(12))
            shutil.rmtree(tmp_path)
        assert "the profile is not saved" in caplog.text
        assert len(serving._wrapper.watchers) == 1, "counted once"
