"""What tables of the documentation are made of: results by name, Markdown, and how numbers are shown."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks.common import Row

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TEXTS = {"wikitext2-test": "WikiText-2 test", "gsm8k-test": "GSM8K test", "humaneval": "HumanEval"}
TABLES: dict[str, Callable[[], str]] = {}  # by the name that stands in the document


def shown(make: Callable[[], str]) -> Callable[[], str]:
    """Put what makes a table into TABLES, by its function's name."""
    TABLES[make.__name__] = make
    return make


def results(name: str) -> Row:
    """One file of results."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def machine(names: str, page: Path) -> str:
    """What files of results were measured on: each machine once, with the files and their threads."""
    files: dict[str, list[str]] = {}
    for name in names.split():
        m = results(name)["machine"]
        simd = f" ({', '.join(m['simd'])})" if m["simd"] else ""
        where = f"{m['cpu']}{simd}, {m['cores']} cores, {m['memory_gib']} GiB, {m['gpu'] or 'no GPU'}"
        path = os.path.relpath(RESULTS / f"{name}.json", page.parent)
        threads = f"{m['torch_threads']} thread{'s' * (m['torch_threads'] != 1)}"
        files.setdefault(f"{where}, {threads}", []).append(f"[{name}]({path})")
    shown = [f"{where}: {', '.join(of)}." for where, of in files.items()]
    return " ".join(["Machine:", *shown])


def rise(row: Row, base: Row, text: str) -> float:
    """Per cent by which a row's perplexity is above another's."""
    return float(100 * (row[text] / base[text] - 1))


def percent(value: float) -> str:
    """A difference, in per cent."""
    decimals = 2
    if abs(value) >= 9.95:
        decimals = 0 if abs(value) >= 20 else 1
    shown = f"{value:+.{decimals}f}"
    return f"{shown.replace('-0.00', '+0.00')} %"


def ratio(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"


def figures(value: float) -> str:
    """A perplexity."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def joined(columns: list[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """A table with a line for each name, which has the cells of all of its rows in their order."""
    found: dict[str, list[str]] = {}
    for name, cells in rows:
        found.setdefault(name, []).extend(cells)
    return table(columns, [[name, *cells] for name, cells in found.items()])


def listed(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A table of rows: by heading a template, which each row's figures fill."""
    return table([*columns], [[cell.format_map(row) for cell in columns.values()] for row in rows])
