"""Hostile bundles, some of those that `python -m benchmarks.hostile` makes, and what was found with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hostile_edits import in_time, refusal

from benchmarks import hostile as cases
from moepack.pack.manifest import strict_json


def test_some_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens is then shown and decoded, and a refusal is one printable line."""
    began = cases.attempt

    def attempt(root: Path, out: Path, shrinks: bool) -> str:
        found = began(root, out, shrinks)
        assert found == "refused" or refusal(root) is None
        return "refused" if refusal(root) else found

    monkeypatch.setattr(cases, "attempt", attempt)
    rows, wrong = cases.hostile(300, first=1_000_000)
    assert not wrong, "\n".join(wrong)
    assert sum(row["cases"] for row in rows) == 300
    assert all(row["refused"] for row in rows) and sum(row["opened"] for row in rows) > 5


def test_a_case_that_does_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, a process that ends, a case that takes too long, and bytes written elsewhere."""
    began = cases.attempt

    def attempt(root: Path, out: Path, shrinks: bool) -> str:
        number = next(turns)
        if number == 1:
            raise KeyError("x")
        if number == 2:
            os._exit(7)
        if number == 3:
            (root.parent / "outside" / "file").write_text("changed")
        if number == 4:
            while True:
                pass
        return began(root, out, shrinks)

    monkeypatch.setattr(cases, "HOLDING", cases.HOLDING[:1])
    monkeypatch.setattr(cases, "BATCH", 4)
    monkeypatch.setattr(cases, "PATIENCE", 1)
    monkeypatch.setattr(cases, "attempt", attempt)
    turns = iter(range(100))
    _, wrong = cases.hostile(2)
    assert len(wrong) == 2 and "KeyError at" in wrong[0] and "ended with 7" in wrong[1]
    turns = iter([0, 0, 3, 4, 0])
    _, wrong = cases.hostile(4)
    assert len(wrong) == 2 and "more than 1 s" in wrong[0] and "outside was changed" in wrong[1]


def test_a_name_that_stands_twice_among_many_is_found_at_once() -> None:
    names = ",".join(f'"{i}":0' for i in range(300_000))
    with in_time(20), pytest.raises(ValueError, match="the name '299999' stands twice"):
        strict_json.loads(f'{{{names},"299999":0}}'.encode())
