"""Bring the pictures and the tables of the documentation up to date.

    python -m benchmarks.draw [--out DIR]    the pictures, into docs/images/ or elsewhere
    python -m benchmarks.draw --tables       the tables, into the documents (benchmarks/tables/)

limited.svg is of a model larger than memory: tokens a second against the limit, with divergences beside the points.
Divergence is what the same bits cost on a trained model (results/peers.json): the generated one has none worth naming.
contexts.svg is of decoding by the depth of the context. Both come from benchmarks/results/*.json, and have a background
of their own, so that they read the same on a light and on a dark page, and letters that are still legible at half the
width. The others in docs/images are drawings.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import Row
from benchmarks.tables import with_tables
from benchmarks.tables.common import DOCUMENTS, ROOT, results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = ROOT / "docs" / "images"
PAPER = "#fcfbf8"
INK = "#1d1d1f"
GREY = "#6d6d72"
OURS = "#0b6bcb"
THEIRS = "#c25700"
MIXES = {"Q4_K_M": "Q4_K_M", "Q2_K": "Q2_K mix"}  # a side's mix -> its encoding in the peers' table
MARKS = {"moepack": "o^DvPp", "llama": "sX"}  # one a side


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
    return bool(max(r["decode tokens/s"] for r in alike) > row["decode tokens/s"])


def drawn(rows: Sequence[Row], known: Mapping[str, float]) -> Figure:
    """The picture of rows, without those held to AVX2 and those that decoded nothing, which the table has."""
    rows = [row for row in rows if ":avx2" not in row["side"] and "decode tokens/s" in row]
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.6, 6.2), facecolor=PAPER, layout="constrained")
    plain_axes(axis)
    axis.set_yscale("log")
    axis.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"], minor=False)
    axis.set_yticks([], minor=True)
    limits = sorted({row["cage GB"] for row in rows})
    axis.set_xticks(limits, [f"{limit:g}" for limit in limits])
    labelled: list[tuple[str, float, float]] = []
    for who, colour, up in (("moepack", OURS, 11), ("llama", THEIRS, -20)):
        sides = dict.fromkeys(r["side"] for r in rows if r["side"].startswith(f"{who}:"))
        for mark, side in zip(itertools.cycle(MARKS[who]), sides, strict=False):
            mine = sorted((r for r in rows if r["side"] == side), key=lambda r: r["cage GB"])
            x = [r["cage GB"] for r in mine]
            y = [r["decode tokens/s"] for r in mine]
            name = side.replace(":", " ", 1).replace("llama", "llama.cpp").split(":dense=")[0].split(":read-ahead")[0]
            style = f"{mark}--" if beaten(mine[0], rows) else f"{mark}-"
            axis.plot(x, y, style, color=colour, linewidth=2, markersize=9, label=name)
            for row in mine:
                at = (row["cage GB"], row["decode tokens/s"])
                near = [w for w, x, y in labelled if at[0] == x and 0.85 < at[1] / y < 1.18]
                if (cost := divergence(row, known)) is not None and who not in near:  # the table has all of them
                    labelled.append((who, *at))
                    away = (36, 4) if near else (0, -20 if beaten(row, rows) else up)
                    axis.annotate(
                        f"KL {cost:.2g}", at, away, textcoords="offset points", ha="center", fontsize=12, color=colour
                    )
    figure.legend(frameon=False, fontsize=12, loc="outside lower center", ncols=2)
    axis.margins(x=0.2, y=0.15)
    axis.set_xlabel("limit of memory, page cache included, GB", fontsize=13, color=INK)
    axis.set_ylabel("decoded tokens a second", fontsize=13, color=INK)
    title = "A 30 B model larger than memory, on two cores\nKL (mnat): what these bits cost a trained 21 M model"
    axis.set_title(title, fontsize=13, color=INK, loc="left", weight="bold")
    return figure


def by_depth(rows: Sequence[Row]) -> Figure:
    """The picture of decoding by depth, a field a model: moepack's line, and llama.cpp's."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, fields = plt.subplots(
        2, -(-len(models) // 2), figsize=(10, 6.2), facecolor=PAPER, layout="constrained", sharex=True, sharey=True
    )
    depths = sorted({row["depth"] for row in rows})
    for axis, model in zip(fields.flat, models, strict=False):
        plain_axes(axis)
        mine = [row for row in rows if row["model"] == model]
        for who, colour, mark in (("moepack", OURS, "o-"), ("llama.cpp", THEIRS, "s--")):
            known = [row for row in mine if f"{who}, decode" in row]
            rates = [row[f"{who}, decode"] for row in known]
            axis.plot([row["depth"] for row in known], rates, mark, color=colour, linewidth=2, markersize=8, label=who)
        axis.set_title(f"{model}, {mine[0]['attention']}", fontsize=13, color=INK, loc="left", weight="bold")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(depths, [f"{depth:,}" for depth in depths], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"], minor=False)
        axis.set_yticks([], minor=True)
        axis.margins(x=0.15, y=0.1)
    for axis in fields.flat[len(models) :]:
        axis.axis("off")
    handles = fields.flat[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=13, loc="outside upper right", ncols=2)
    figure.supxlabel("tokens in the context", fontsize=13, color=INK)
    figure.supylabel("decoded tokens a second, four layers", fontsize=13, color=INK)
    return figure


def plain_axes(axis: Axes) -> None:
    """Axes without a box, lines behind the points."""
    axis.set_facecolor(PAPER)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=14)
    axis.grid(axis="y", color="#e4e1da")
    axis.set_axisbelow(True)


def draw(out: Path) -> list[Path]:
    """Draw the pictures into a directory; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    files = []
    with plt.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "moepack", "path.simplify": True}):
        pictures = {
            "limited.svg": drawn(results("limited")["rows"], divergences(results("peers")["rows"])),
            "contexts.svg": by_depth(results("contexts")["rows"]),
        }
        for name, figure in pictures.items():
            figure.savefig(out / name, dpi=100, facecolor=PAPER, metadata={"Date": None})
            plt.close(figure)
            files.append(out / name)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="where they go")
    parser.add_argument("--tables", action="store_true", help="write the tables instead")
    args = parser.parse_args()
    if args.tables:
        for path in DOCUMENTS:
            path.write_text(with_tables(path.read_text(), path))
        return
    print(*draw(args.out), sep="\n")


if __name__ == "__main__":
    main()
