"""Colours, axes and the names beside points: what pictures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = "#fcfbf8"
INK = "#1d1d1f"
GREY = "#6d6d72"
OURS = "#0b6bcb"
THEIRS = "#c25700"


def plain_axes(axis: Axes) -> None:
    """Axes without a box, lines behind the points."""
    axis.set_facecolor(PAPER)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=14)
    axis.grid(axis="y", color="#e4e1da")
    axis.set_axisbelow(True)
