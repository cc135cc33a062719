"""Every documented benchmark exists and runs in its quick form before a commit."""

from __future__ import annotations

import importlib.util
import re
import sys

from support import ROOT

sys.path.insert(0, str(ROOT))

DRAWS = {"draw"}  # measures nothing: tests/docs/test_documents.py runs it


def commands(text: str) -> set[str]:
    """The benchmarks that a text names as commands."""
    return set(re.findall(r"python -m benchmarks\.([a-z_]+)", text)) - DRAWS


def test_documented_benchmarks_exist_and_run_in_ci() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    documented = set().union(*(commands(page.read_text()) for page in pages if page.name != "CHANGELOG.md"))
    run = set(re.findall(r"[a-z]+", re.findall(r"for name in ([a-z\s\\]+); do\s+\S+ -m \"bench", _ci())[-1]))
    assert documented == run
    for name in run:
        spec = importlib.util.find_spec(f"benchmarks.{name}")
        assert spec is not None and spec.origin is not None, name
        assert not spec.submodule_search_locations or importlib.util.find_spec(f"benchmarks.{name}.__main__"), name


def test_the_page_of_benchmarks_lists_every_command() -> None:
    table = (ROOT / "docs" / "benchmarks.md").read_text().split("## Every command")[1]
    assert commands(table) == set(re.findall(r"[a-z]+", re.findall(r"for name in ([a-z\s\\]+); do", _ci())[-1]))


def _ci() -> str:
    return (ROOT / ".ci" / "run").read_text()
