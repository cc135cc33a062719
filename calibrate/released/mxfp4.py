"""MXFP4 of gpt-oss: `_blocks` and `_scales` beside each other, experts stacked and in the orientation of a Linear."""

from __future__ import annotations

from collections.abc import Iterator

from moepack.pack.errors import InputError

from .encoded import Encoded
from .fp8 import E8M0, MX
from .parts import Document, Scheme, Tensors, need, part


def read(document: Document, quantization: Document) -> Scheme:
    """The reader; the configuration says nothing else of use."""
    return find


def find(tensors: Tensors) -> Iterator[tuple[str, Encoded]]:
    """Weights whose codes are U8 [..., rows, groups, 16]; unquantised they are transposed, [..., cols, rows]."""
    for name, entry in tensors.items():
        if not name.endswith("_blocks") or entry.dtype != "U8":
            continue
        if len(entry.shape) < 3 or entry.shape[-1] != MX // 2:
            raise InputError(f"{name} has shape {list(entry.shape)}, not [..., rows, groups, 16]")
        weight = name.removesuffix("_blocks")
        codes = part(tensors, name, (3, 4))
        scales = need(tensors, f"{weight}_scales", E8M0, [codes.shape[:-1]], codes)
        shape = (*codes.shape[:-2], codes.shape[-2] * MX)
        yield weight, Encoded("mxfp4", MX, shape, "blocks", codes, scales, transposed=True)
