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
    """Those of any page, which the table of docs/benchmarks.md lists."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    documented = set().union(*(commands(page.read_text()) for page in pages if page.name != "CHANGELOG.md"))
    table = (ROOT / "docs" / "benchmarks.md").read_text().split("## Every command")[1]
    loop = re.findall(r"printf '%s\\n' ([a-z\s\\]+) \| xargs", (ROOT / ".ci" / "run").read_text())[-1]
    run = set(re.findall(r"[a-z]+", loop))
    assert documented == run == commands(table)
    for name in run:
        spec = importlib.util.find_spec(f"benchmarks.{name}")
        assert spec is not None and spec.origin is not None, name
        assert not spec.submodule_search_locations or importlib.util.find_spec(f"benchmarks.{name}.__main__"), name
