"""MXFP4 of gpt-oss: `_blocks` and `_scales` beside each other, experts stacked and in the orientation of a Linear."""

from __future__ import annotations

from collections.abc import Iterator

from moepack.pack.errors import InputError

from .encoded import Encoded
from .parts import Document, Scheme, Tensors, need, part

GROUP = 32


def read(document: Document, quantization: Document) -> Scheme:
    """The reader; the configuration says nothing else of use."""
    return find


def find(tensors: Tensors) -> Iterator[tuple[str, Encoded]]:
    """Weights whose codes are U8 [..., rows, groups, 16]; unquantised they are transposed, [..., cols, rows]."""
    for name, entry in tensors.items():
        if not name.endswith("_blocks") or entry.dtype != "U8":
            continue
        if len(entry.shape) < 3 or entry.shape[-1] != GROUP // 2:
            raise InputError(f"{name} has shape {list(entry.shape)}, not [..., rows, groups, 16]")
        weight = name.removesuffix("_blocks")
        codes = part(tensors, name, (3, 4))
        scales = need(tensors, f"{weight}_scales", ("U8", "F8_E8M0"), [codes.shape[:-1]], codes)
        shape = (*codes.shape[:-2], codes.shape[-2] * GROUP)
        yield weight, Encoded("mxfp4", GROUP, shape, "blocks", codes, scales, transposed=True)
