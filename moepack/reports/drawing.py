"""Pictures for a page: maps of numbers, lines and stacked bars as SVG text that needs nothing from outside.

Numbers and labels in, text out; labels are escaped here. Decides nothing about what is shown.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

# viridis at nine points: even to the eye, and in grey, and to those who see few colours.
_COLOURS = np.array(
    [(68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128), (94, 201, 98),
     (173, 220, 48), (253, 231, 37)]
)  # fmt: skip
WIDTH = 640  # of a drawing; a page scales it


def heat_map(values: NDArray[np.float64], rows: Sequence[str], title: str) -> str:
    """A map of numbers on a logarithmic scale, dark to bright; one pixel each, however many there are.

    Args:
        values: float64 [rows, columns]; what is not a number is left clear, what is not above zero is darkest.
        rows: labels.
        title: for readers that do not see it.
    """
    known = np.isfinite(values)
    positive = known & (values > 0)
    low, high = (float(f(values[positive])) for f in (np.min, np.max)) if positive.any() else (1.0, 1.0)
    scaled = np.zeros(values.shape)
    span = np.log(high / low) or 1.0
    scaled[positive] = np.log(values[positive] / low) / span
    at = np.linspace(0, 1, len(_COLOURS))
    pixels = np.stack([np.interp(scaled, at, _COLOURS[:, c]) for c in range(3)] + [np.where(known, 255.0, 0.0)], -1)
    image = base64.b64encode(png(pixels.round().astype(np.uint8))).decode()
    height = max(96, min(480, 12 * len(rows)))
    step = max(1, -(-len(rows) // (height // 14)))
    labels = "".join(
        f'<text x="36" y="{(i + 0.5) * height / len(rows) + 4:.1f}" text-anchor="end">{escape(rows[i])}</text>'
        for i in range(0, len(rows), step)
    )
    scale = f"{_short(low)} (dark) to {_short(high)} (bright)"
    return _svg(
        f'<image x="42" y="0" width="{WIDTH - 42}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{image}"/>{labels}'
        f'<text x="42" y="{height + 16}">experts; {escape(scale)}</text>',
        height + 22,
        title,
    )


def lines(series: Mapping[str, Sequence[float]], columns: Sequence[str], title: str, classes: Sequence[str]) -> str:
    """Lines over the same columns, on a logarithmic scale; each has a class of `classes` for its colour."""
    height, left, foot = 220, 60, 200
    found = [v for row in series.values() for v in row if np.isfinite(v) and v > 0]
    low, high = (min(found), max(found)) if found else (1.0, 1.0)
    span = np.log(high / low) or 1.0

    def place(value: float) -> float:
        return foot - (foot - 12) * float(np.log(max(value, low) / low)) / span

    parts = []
    for (name, row), kind in zip(series.items(), classes, strict=True):
        step = (WIDTH - left - 70) / max(1, len(row) - 1)
        points = [(left + i * step, place(v)) for i, v in enumerate(row) if np.isfinite(v)]
        if points:
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{kind}" points="{text}"/>')
            parts.append(f'<text x="{points[-1][0] + 6:.1f}" y="{points[-1][1] + 4:.1f}">{escape(name)}</text>')
    parts += [f'<text x="{left - 6}" y="{place(v) + 4:.1f}" text-anchor="end">{_short(v)}</text>' for v in (low, high)]
    ends = [(left, "start", columns[0]), (WIDTH - 70, "end", columns[-1])] if columns else []
    parts += [f'<text x="{x}" y="{foot + 16}" text-anchor="{a}">{escape(t)}</text>' for x, a, t in ends]
    return _svg("".join(parts), height, title)


def stacked(rows: Mapping[str, Mapping[str, int]], classes: Mapping[str, str], title: str) -> str:
    """One bar a row, of parts as wide as their share of it."""
    each = max(4, min(18, 480 // max(1, len(rows))))
    step = max(1, -(-14 // each))
    parts = []
    for i, (name, counts) in enumerate(rows.items()):
        x, whole = 42.0, sum(counts.values()) or 1
        for part, count in counts.items():
            wide = (WIDTH - 42) * count / whole
            told = f"<title>{escape(f'{name}: {count:,} at {part}')}</title>"
            parts.append(
                f'<rect class="{classes[part]}" x="{x:.1f}" y="{i * each}" width="{wide:.1f}" height="{each - 1}">'
                f"{told}</rect>"
            )
            x += wide
        if i % step == 0:
            parts.append(f'<text x="36" y="{i * each + min(each, 12)}" text-anchor="end">{escape(name)}</text>')
    return _svg("".join(parts), each * len(rows) + 6, title)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of uint8 [height, width, 4], red, green, blue and opacity (ISO/IEC 15948)."""
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, 4 * width)], 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _svg(inside: str, height: float, title: str) -> str:
    told = escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{told}">{inside}</svg>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
