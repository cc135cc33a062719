"""Transformers' own list of models that have experts, each built and loaded: what comes of it is what docs/families.md
says, which is drawn from the same file. A family that newly works fails as one that no longer does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers
from support import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import families

FOUND = {f.model_type: f for f in families.walk()}
SAID = json.loads(families.RESULT.read_text())
ROWS = {row["model_type"]: row for row in SAID["rows"]}
SAME = SAID["machine"]["libraries"]["transformers"] == transformers.__version__


def test_the_list_is_transformers_own() -> None:
    """With the version that the table was made with; another may have more families or fewer."""
    assert {"qwen3_moe", "mixtral", "llama4", "gpt_oss", "qwen3_vl_moe"} <= FOUND.keys()
    assert not {"llama", "qwen3", "bert"} & FOUND.keys()
    assert not SAME or FOUND.keys() == ROWS.keys(), "python -m benchmarks.families"


def test_nothing_ends_in_a_traceback() -> None:
    assert {row["outcome"] for row in ROWS.values()} <= {"works", "refused", "no small model"}
    assert all(row["why"] for row in ROWS.values() if row["outcome"] != "works")


@pytest.mark.parametrize("name", [n for n in FOUND if n in ROWS])
def test_what_comes_of_it(name: str, tmp_path: Path) -> None:
    """Same outcome, and the same words of a refusal or of what does not work."""
    got = families.attempt(FOUND[name], tmp_path)
    assert got["outcome"] == ROWS[name]["outcome"] and got.get("experts") == ROWS[name].get("experts"), got
    assert got["why"] == ROWS[name]["why"] or not SAME
