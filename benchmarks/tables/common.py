"""What tables of the documentation are made of: results by name, Markdown, and how numbers are shown."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "families.md",
    ROOT / "docs" / "papers.md",
    ROOT / "docs" / "policies.md",
    ROOT / "docs" / "reliability.md",
)
TEXTS = {"wikitext2-test": "WikiText-2 test", "gsm8k-test": "GSM8K test", "humaneval": "HumanEval"}
VERSIONS = ("bf16", "w4", "w3", "w2", "w1")


def results(name: str) -> dict[str, Any]:
    """One file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def machine(name: str) -> str:
    """What a file of results was measured on, in one line."""
    m = results(name)["machine"]
    libraries = ", ".join(f"{k} {v}" for k, v in m["libraries"].items() if k != "moepack")
    simd = f" ({', '.join(m['simd'])})" if m["simd"] else ""
    gpu = m["gpu"] or "no GPU"
    threads = f"{m['torch_threads']} torch thread{'s' * (m['torch_threads'] != 1)}"
    where = f"{m['cpu']}{simd}, {m['cores']} cores, {m['memory_gib']} GiB, {gpu}; {threads}; Python {m['python']}"
    return f"Machine: {where}, {libraries}. [As JSON](../benchmarks/results/{name}.json)."


def texts(row: dict[str, Any]) -> list[str]:
    """The texts that a row has figures of."""
    return [n for n in row if isinstance(row[n], float) and n in TEXTS]


def rise(row: dict[str, Any], base: dict[str, Any], text: str) -> float:
    """Per cent by which a row's perplexity is above another's."""
    return float(100 * (row[text] / base[text] - 1))


def mean_rise(row: dict[str, Any], base: dict[str, Any]) -> float:
    """The mean of it over the texts."""
    return statistics.fmean(rise(row, base, text) for text in TEXTS)


def percent(value: float) -> str:
    """A difference, in per cent."""
    shown = f"{value:+.0f}" if abs(value) >= 20 else f"{value:+.1f}" if abs(value) >= 9.95 else f"{value:+.2f}"
    return f"{shown.replace('-0.00', '+0.00')} %"


def ratio(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"


def figures(value: float) -> str:
    """A perplexity."""
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def as_is(name: str) -> str:
    """Results as a table without a choice of columns."""
    rows = results(name)["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[f"{v:.4g}" if isinstance(v := row.get(key, ""), float) else str(v) for key in columns] for row in rows]
    return table(columns, cells)
