"""The picture of a model larger than memory: tokens a second against the limit, with divergences beside the points.

Divergence is what the same bits cost on a trained model (results/peers.json): the generated one has none worth naming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.common import Row
from benchmarks.tables.common import results

from .style import GREY, INK, OURS, PAPER, THEIRS, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIXES = {"Q4_K_M": "Q4_K_M", "Q2_K": "Q2_K mix"}  # a side's mix -> its encoding in the peers' table
DEAD = 0.01  # tokens a second at which what gave none is drawn


def limited() -> Figure:
    """Tokens a second by memory, of results/limited.json."""
    return drawn(results("limited")["rows"], divergences(results("peers")["rows"]))


def divergences(rows: Sequence[Row]) -> dict[str, float]:
    """Thousandths of a nat by encoding, attention quantised too, of the first trained model that has them."""
    found = [r for r in rows if r["part"] == "quality" and "attention" in r.get("quantised", "") and "KL, mnat" in r]
    return {r["encoding"]: r["KL, mnat"] for r in found if r["model"] == found[0]["model"]}


def divergence(row: Row, known: Mapping[str, float]) -> float | None:
    """Of a row: between w4's and w2's by their shares of what was served."""
    who, _, rest = row["side"].partition(":")
    if who == "llama":
        return known.get(MIXES.get(rest.split(":")[0], ""))
    dense = next((p.removeprefix("dense=") for p in rest.split(":") if p.startswith("dense=")), "w8")
    shares = {v: row.get(f"served {v}", 0.0) for v in ("w4", "w2")}
    costs = {v: known.get(f"{v}, dense {dense}") for v in shares}
    if not sum(shares.values()) or any(costs[v] is None for v, share in shares.items() if share):
        return None
    return float(sum(share * (costs[v] or 0.0) for v, share in shares.items()) / sum(shares.values()))


def beaten(row: Row, rows: Sequence[Row]) -> bool:
    """Whether another row of the same program is faster in the same limit."""
    who = row["side"].partition(":")[0]
    alike = [r for r in rows if r["cage GB"] == row["cage GB"] and r["side"].partition(":")[0] == who]
    return bool(max(r.get("decode tokens/s", 0.0) for r in alike) > row["decode tokens/s"])


def drawn(rows: Sequence[Row], known: Mapping[str, float]) -> Figure:
    """The picture of rows, without those held to AVX2; a side that was killed or refused stands at the bottom."""
    rows = [row for row in rows if ":avx2" not in row["side"]]
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.6, 6.2), facecolor=PAPER, layout="constrained")
    plain_axes(axis)
    axis.set_yscale("log")
    axis.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"], minor=False)
    axis.set_yticks([], minor=True)
    labelled: list[tuple[str, float, float]] = []
    for who, colour, mark, up in (("moepack", OURS, "o", 11), ("llama", THEIRS, "s", -20)):
        for side in dict.fromkeys(r["side"] for r in rows if r["side"].startswith(f"{who}:")):
            mine = sorted((r for r in rows if r["side"] == side), key=lambda r: r["cage GB"])
            alive = [r for r in mine if "decode tokens/s" in r]
            dead = [] if "static" in side else [r["cage GB"] for r in mine if "decode tokens/s" not in r]
            x = [r["cage GB"] for r in alive]
            y = [r["decode tokens/s"] for r in alive]
            name = side.replace(":", " ", 1).replace("llama", "llama.cpp").split(":dense=")[0].split(":read-ahead")[0]
            style = "D"
            if len(alive) > 1:
                style = f"{mark}--" if beaten(alive[0], rows) else f"{mark}-"
            axis.plot(x, y, style, color=colour, linewidth=2, markersize=9, label=name)
            axis.plot(dead, [DEAD] * len(dead), "x", color=colour, markersize=10, markeredgewidth=2.5)
            for row in alive:
                at = (row["cage GB"], row["decode tokens/s"])
                near = [w for w, x, y in labelled if at[0] == x and 0.85 < at[1] / y < 1.18]
                if (cost := divergence(row, known)) is not None and who not in near:  # the table has all of them
                    labelled.append((who, *at))
                    away = (36, 4) if near else (0, -20 if beaten(row, rows) else up)
                    axis.annotate(
                        f"KL {cost:.2g}", at, away, textcoords="offset points", ha="center", fontsize=12, color=colour
                    )
    figure.legend(frameon=False, fontsize=12, loc="outside lower center", ncols=2)
    if not all("decode tokens/s" in r or "static" in r["side"] for r in rows):
        axis.text(
            0.02, 0.03, "x: refused, killed, or no token in time", transform=axis.transAxes, fontsize=11, color=GREY
        )
    axis.margins(x=0.2, y=0.15)
    axis.set_xlabel("memory, page cache included, GB", fontsize=15, color=INK)
    axis.set_title(
        "Tokens a second of a model larger than memory; KL in mnat", fontsize=14, color=INK, loc="left", weight="bold"
    )
    return figure
