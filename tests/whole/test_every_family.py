"""Transformers' own list of models that have experts, each built and loaded: what comes of it is what docs/families.md
says, which is drawn from the same file. A family that newly works fails as one that no longer does."""

import json

import pytest
import transformers

from benchmarks import families
from moepack.runtime.dense.values import ReadValues

FOUND = {f.model_type: f for f in families.walk()}
SAID = json.loads((families.ROOT / "benchmarks" / "results" / "families.json").read_text())
ROWS = {row["model_type"]: row for row in SAID["rows"]}
SAME = SAID["machine"]["libraries"]["transformers"] == transformers.__version__


def test_the_list_is_transformers_own():
    """With the version that the table was made with; another may have more families or fewer."""
    assert {"qwen3_moe", "mixtral", "llama4", "gpt_oss", "qwen3_vl_moe"} <= FOUND.keys()
    assert not {"llama", "qwen3", "bert"} & FOUND.keys()
    assert not SAME or FOUND.keys() == ROWS.keys(), "python -m benchmarks.families"


def test_nothing_ends_in_a_traceback():
    assert {row["outcome"] for row in ROWS.values()} <= {"works", "refused", "no small model"}
    assert all(row["why"] for row in ROWS.values() if row["outcome"] != "works")


# Kinds of attention that code names where no decoder layer has them.
ELSEWHERE = {
    "deepseek_ocr2": "sliding full",  # its tower's
    "dots3_note": "full",  # in place of "indexed", by an option
    "dots3_note_text": "full",
    "inkling": "full sliding linear",  # parts of "hybrid" and "hybrid_sliding" layers
    "muse_spark": "window",  # its tower's
    "qwen3_omni_moe_thinker": "full sliding",  # of the parts that speak
}


@pytest.mark.parametrize("name", sorted(n for n, row in ROWS.items() if row["outcome"] == "works" and n in FOUND))
def test_layers_of_every_kind_are_tried(name):
    """A kind that a family's code tells apart is in its small model: else what replaces its code is never compared."""
    tried = {word for layer in ROWS[name]["layers"].split(", ") for word in layer.split()}
    elsewhere = next((of for family, of in ELSEWHERE.items() if name.startswith(family)), "")
    assert families.attentions(name) <= tried | set(elsewhere.split())


def test_errors_in_bf16_are_those_of_rounding():
    """As the committed table has them: no family's error is above 1.2 times plain BF16's."""
    ratios = [float(row["ratio"]) for row in ROWS.values() if row["outcome"] == "works"]
    assert len(ratios) > 70 and max(ratios) <= families.MORE


def test_a_layer_served_as_another_is_found(tmp_path, monkeypatch):
    """Planted: one trial for a class, so that flint's full layer, which does not rotate, is served as its first one."""
    monkeypatch.setattr(ReadValues, "of", lambda self, module, without="": (type(module),))
    got = families.attempt(FOUND["flint"], tmp_path)
    assert got["outcome"] == "broken" and "in BF16, logits differ" in got["why"]


@pytest.mark.parametrize("name", [n for n in FOUND if n in ROWS])
def test_what_comes_of_it(name, tmp_path):
    """Same outcome, the same words of a refusal or of what does not work, and in BF16 no more error than rounding's."""
    got = families.attempt(FOUND[name], tmp_path)
    for of in ("outcome", "experts", "layers"):
        assert got.get(of) == ROWS[name].get(of), got
    assert got["why"] == ROWS[name]["why"] or not SAME
