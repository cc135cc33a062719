"""The tables of the documentation, from benchmarks/results/*.json: `python -m benchmarks.draw --tables` writes them.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. Measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from .building import (
    families,
    quality,
    quantisers,
    summary,
)
from .common import RESULTS, ROOT, machine, results, table
from .formats import (
    formats,
)
from .gpu_day import gpu_layers, gpu_measured
from .kernels import cache, codec, depth, kernels, released_kernels, whole_model
from .peers import limited, limited_released, peer_models, peer_quality
from .serving import (
    alpha,
    hostile,
    limited_clients,
    on_demand,
    pinned,
    policies,
    prediction,
    residency,
    retention,
    selector,
    serving,
    similarity,
    start,
    tpot,
)


def missed() -> str:
    """Targets that are not met, of all results."""
    out = []
    for path in sorted(RESULTS.glob("*.json")):
        for t in results(path.stem).get("targets", []):
            if not t["met"] and not t["name"].endswith("ambition"):
                sign = "at least" if t["better"] == "higher" else "at most"
                out.append([path.stem, t["name"], f"{t['value']:.4g}", f"{sign} {t['target']:g}"])
    return table(["results", "target", "measured", "wanted"], out)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        summary,
        quality,
        quantisers,
        cache,
        codec,
        depth,
        kernels,
        whole_model,
        released_kernels,
        residency,
        tpot,
        missed,
        pinned,
        policies,
        similarity,
        selector,
        retention,
        on_demand,
        prediction,
        alpha,
        hostile,
        serving,
        start,
        families,
        peer_models,
        peer_quality,
        gpu_layers,
        gpu_measured,
        formats,
        limited,
        limited_clients,
        limited_released,
    )
}
_TABLE = re.compile(r"<!-- table: ([a-z0-9_]+) -->\n.*?<!-- end of table -->", re.S)
_MACHINE = re.compile(r"<!-- machine: ([a-z0-9- ]+) -->\n.*?<!-- end of machine -->", re.S)


def with_tables(text: str, page: Path = ROOT / "README.md") -> str:
    """The text of a page with its tables, and its lines that name machines, made anew."""
    text = _TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n{TABLES[m[1]]()}\n<!-- end of table -->", text)
    return _MACHINE.sub(lambda m: f"<!-- machine: {m[1]} -->\n{machine(m[1], page)}\n<!-- end of machine -->", text)
