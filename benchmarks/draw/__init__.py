"""The pictures of the documentation, drawn by matplotlib from benchmarks/results/*.json.

Pictures have a background of their own, so that they read the same on a light and on a dark page, and letters that are
still legible at half the width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables.common import ROOT, results

from .limited import limited
from .style import GREY, INK, PAPER

IMAGES = ROOT / "docs" / "images"
VERSIONS = {"bf16": "#0b4f8a", "w4": "#1f7fc4", "w3": "#5fb0de", "w2": "#f2a65a", "w1": "#d9730d"}
LIBRARIES, KEPT = "#cfd8e3", "#e9e6df"


def _canvas(width: float, height: float) -> Any:
    """A figure and one axis over all of it, in units of a hundredth of an inch."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width / 100, height / 100), facecolor=PAPER)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def bundle() -> Any:
    """What moepack does: a checkpoint, a bundle of it, a budget it is served in."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

    figure, axis = _canvas(760, 440)

    def text(x: float, y: float, what: str, size: float = 15, **options: Any) -> None:
        axis.text(x, y, what, **{"fontsize": size, "color": INK, "va": "center", **options})

    def box(x: float, title: str, width: float) -> None:
        style = "round,pad=0,rounding_size=10"
        patch = FancyBboxPatch((x, 96), width, 272, style, facecolor="white", edgecolor=GREY, linewidth=1.5)
        axis.add_patch(patch)
        text(x + width / 2, 398, title, 18, ha="center", weight="bold")

    def squares(x: float, y: float, colours: list[str], across: int, size: float = 24) -> None:
        for i, colour in enumerate(colours):
            at = (x + (i % across) * (size + 4), y - (i // across) * (size + 4))
            axis.add_patch(Rectangle(at, size, size, facecolor=colour, edgecolor="none"))

    def arrow(x: float, to: float) -> None:
        axis.add_patch(
            FancyArrowPatch((x, 232), (to, 232), arrowstyle="-|>", mutation_scale=22, color=INK, linewidth=2)
        )

    box(18, "checkpoint", 168)
    text(102, 342, "experts", 14, ha="center")
    squares(48, 292, [VERSIONS["bf16"]] * 16, 4)
    text(102, 164, "BF16", 16, ha="center", color=VERSIONS["bf16"], weight="bold")
    text(102, 134, "16 bits a weight", 13, ha="center", color=GREY)

    box(236, "bundle", 248)
    text(360, 342, "every expert, 5 times", 14, ha="center")
    rows = results("quality-tiny-qwen3-moe")["rows"]
    bits = {r["version"].split()[0]: r["bits/weight"] for r in rows if "rtn" not in r["version"]}
    for i, (name, colour) in enumerate(VERSIONS.items()):
        y = 305 - 32 * i
        text(250, y, name, 14, color=colour, weight="bold")
        axis.add_patch(Rectangle((306, y - 10), 10.6 * bits[name], 20, facecolor=colour))
        text(312 + 10.6 * bits[name], y, f"{bits[name]:.4g}", 13)
    text(360, 146, "bits a weight,", 13, ha="center", color=GREY)
    text(360, 124, "and what each one costs", 13, ha="center", color=GREY)

    box(534, "budget", 208)
    for y, label, height in ((344, "dense tensors", 28), (312, "KV cache", 28), (280, "activations", 28)):
        axis.add_patch(Rectangle((548, y - height / 2), 180, height, facecolor="#e9e6df"))
        text(638, y, label, 14, ha="center")
    high, low = VERSIONS["bf16"], VERSIONS["w2"]
    squares(584, 236, [high if i in (1, 6, 7, 12) else low for i in range(16)], 4)
    text(638, 132, "busy experts high", 13, ha="center", color=high, weight="bold")
    text(638, 110, "the rest low", 13, ha="center", color="#b3620a", weight="bold")

    arrow(190, 232)
    arrow(488, 530)
    text(211, 62, "build", 16, ha="center", weight="bold")
    text(211, 34, "quantise, measure", 13, ha="center", color=GREY)
    text(509, 62, "serve", 16, ha="center", weight="bold")
    text(509, 34, "hard limit in bytes", 13, ha="center", color=GREY)
    return figure


def process() -> Any:
    """Three rows: what a control group counts, what the process takes of it, what the budget holds."""
    from matplotlib.patches import Rectangle

    figure, axis = _canvas(760, 300)

    def row(y: float, label: str, left: float, parts: list[tuple[float, str, str]], dashed: bool = False) -> None:
        axis.text(left, y + 62, label, fontsize=15, color=INK, weight="bold", va="center")
        for width, colour, name in parts:
            style = "--" if name.startswith("page cache") else "-"
            at = Rectangle((left, y), width, 48, facecolor=colour, edgecolor=GREY, linewidth=1.2, linestyle=style)
            axis.add_patch(at)
            axis.text(left + width / 2, y + 24, name, fontsize=11, color=INK, ha="center", va="center")
            left += width

    row(210, "control group", 18, [(554, "white", "the process"), (64, KEPT, "kernel"), (106, "white", "page cache")])
    later = "read ahead,\nthreads, holes"
    row(114, "--memory", 18, [(136, LIBRARIES, "Python, libraries"), (104, KEPT, later), (314, "white", "the budget")])
    high, low = VERSIONS["w3"], VERSIONS["w2"]
    parts = [(60, KEPT, "dense"), (40, KEPT, "KV"), (70, KEPT, "activa-\ntions"), (72, high, "busy\nexperts")]
    row(18, "--device-memory", 258, [*parts, (72, low, "other\nexperts")])
    said = "The system takes cached\npages back when it needs\nthem; the rest it cannot."
    axis.text(18, 42, said, fontsize=12, color=GREY, va="center")
    return figure


PICTURES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (bundle, process, limited)}


def draw(out: Path, png: bool = False) -> list[Path]:
    """Draw every picture into a directory; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    files = []
    with plt.rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "moepack", "path.simplify": True}):
        for name, make in PICTURES.items():
            files.append(out / f"{name}.{'png' if png else 'svg'}")
            figure = make()
            figure.savefig(files[-1], dpi=100, facecolor=PAPER, metadata={"Software" if png else "Date": None})
            plt.close(figure)
    return files
