"""The picture of the documentation that shows measurements, drawn by matplotlib from benchmarks/results/*.json.

Pictures have a background of their own, so that they read the same on a light and on a dark page, and letters that are
still legible at half the width. The others in docs/images are drawings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.tables.common import ROOT

from .limited import limited
from .style import PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = ROOT / "docs" / "images"
PICTURES: dict[str, Callable[[], Figure]] = {"limited": limited}


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
