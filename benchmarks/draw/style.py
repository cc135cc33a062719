"""Colours, axes and the names beside points: what pictures share."""

from __future__ import annotations

from typing import Any

PAPER = "#fcfbf8"
INK = "#1d1d1f"
GREY = "#6d6d72"
OURS = "#0b6bcb"
THEIRS = "#c25700"
THIRD = "#3a8a3e"
FOURTH = "#8a4fb0"


def plain_axes(axis: Any) -> None:
    """Axes without a box, lines behind the points."""
    axis.set_facecolor(PAPER)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(colors=INK, labelsize=14)
    axis.grid(axis="y", color="#e4e1da")
    axis.set_axisbelow(True)


def label_points(figure: Any, axis: Any, points: list[tuple[float, float, str, str]]) -> None:
    """Write each point's name beside it, where it covers no point and no other name."""
    figure.canvas.draw()
    marks = [axis.transData.transform(p[:2]) for p in points]
    legend = axis.get_legend()
    taken: list[Any] = [] if legend is None else [legend.get_window_extent()]
    for x, y, name, colour in points:
        for dx, dy, side in (
            (0, 12, "center"),
            (0, -24, "center"),
            (12, -4, "left"),
            (-12, -4, "right"),
            (0, 28, "center"),
            (0, -40, "center"),
        ):
            text = axis.annotate(
                name, (x, y), (dx, dy), textcoords="offset points", ha=side, fontsize=12, color=colour, weight="bold"
            )
            box = text.get_window_extent()
            inside = axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1
            if inside and not any(box.overlaps(t) for t in taken) and not any(box.contains(*m) for m in marks):
                taken.append(box)
                break
            text.remove()
        else:
            raise ValueError(f"no room for the name of {name}")
