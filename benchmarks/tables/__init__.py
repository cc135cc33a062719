"""The tables of the documentation, from benchmarks/results/*.json: `python -m benchmarks.draw --tables` writes them.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. Measures nothing.
"""

import re
from pathlib import Path

from . import building, formats, gpu_day, kernels, peers, serving  # noqa: F401 - each puts its tables into TABLES
from .common import RESULTS, ROOT, TABLES, listed, machine, results, shown


@shown
def missed() -> str:
    """Targets that are not met, of all results."""
    out = []
    for path in sorted(RESULTS.glob("*.json")):
        for t in results(path.stem).get("targets", []):
            if not t["met"] and not t["name"].endswith("ambition"):
                out.append({**t, "results": path.stem, "sign": "at least" if t["better"] == "higher" else "at most"})
    columns = {"results": "{results}", "target": "{name}", "measured": "{value:.4g}", "wanted": "{sign} {target:g}"}
    return listed(out, columns)


_TABLE = re.compile(r"<!-- table: ([a-z0-9_]+) -->\n.*?<!-- end of table -->", re.S)
_MACHINE = re.compile(r"<!-- machine: ([a-z0-9- ]+) -->\n.*?<!-- end of machine -->", re.S)


def with_tables(text: str, page: Path = ROOT / "README.md") -> str:
    """The text of a page with its tables, and its lines that name machines, made anew."""
    text = _TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{TABLES[m[1]]()}\n<!-- end of table -->", text)
    return _MACHINE.sub(lambda m: f"<!-- machine: {m[1]} -->\n{machine(m[1], page)}\n<!-- end of machine -->", text)
