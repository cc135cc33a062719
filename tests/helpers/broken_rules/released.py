"""Edits of released extents: numbers that are none, and padding. Each is of a bundle with that version."""

from typing import Any

import numpy as np
from hostile_edits import Victim

from benchmarks.hostile.small_bundle import MATRICES
from moepack.pack.spec import Version

from .names import Do


def _edit(version: str, group: int, kind: str, place: int, value: int, dtype: str) -> Do:
    sections = Version.of(version, group).sections(MATRICES)
    s = next(s for s in sections if (s.matrix, s.kind) == (0, kind))

    def change(room: np.ndarray[Any, Any]):
        room[s.offset : s.end].view(dtype)[place] = value

    def do(v: Victim):
        v.extent(f"experts/{version}/layer-001.safetensors", 1, change)

    return do


# The first matrix has 18 rows and 37 columns. Words of rows past the last are counted from the end.
NUMBERS = {
    ("mxfp4", 32): [("scale", 3, 255, "u1")],
    ("nvfp4", 16): [
        ("scale", 0, 0x7F, "u1"), ("scale", 1, 0xFF, "u1"), ("outer", 0, 0x7FC00000, "<u4"),
        ("outer", 1, 0x7F800000, "<u4"),
    ],
    ("int8", 32): [("scale", 0, 0x7FC0, "<u2")],
    ("int4fp16", 32): [("scale", 0, 0x7C00, "<u2"), ("scale", 1, 0xFE00, "<u2")],
    ("int8fp16", 32): [("scale", 0, 0x7E00, "<u2")],
}  # fmt: skip
PADDING = {
    ("mxfp4", 32): [("plane0", -1, 0x1, "<u4"), ("plane0", 4 * 16, 1 << 20, "<u4"), ("scale", -1, 1, "u1")],
    ("nvfp4", 16): [("scale", -1, 1, "u1")],
    ("int4fp16", 32): [("zero", -1, 0x80, "u1"), ("scale", -1, 1, "<u2")],
}  # fmt: skip
RELEASED: dict[str, tuple[tuple[str, int], Do, str]] = {
    f"{of[0]}: {kind} {place} is {value:#x}": (of, _edit(*of, kind, place, value, dtype), problem)
    for table, problem in ((NUMBERS, "number"), (PADDING, "padding"))
    for of, edits in table.items()
    for kind, place, value, dtype in edits
}
