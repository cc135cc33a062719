"""The GGUF file format, version 3: keys and values, tensors of ggml's types, in one file or split as llama.cpp does.

Numbers are little-endian; a tensor's shape stands with its columns first; data begin at multiples of ALIGNMENT. Of a
split model the first file has the model's keys, and every one has its number, their count, and that of all tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moepack.pack.sections import align

from ..files import ExportDirectory, Files, cut

ALIGNMENT = 32
# types of values
_UINT16 = 2
_UINT32 = 4
_INT32 = 5
_FLOAT32 = 6
_BOOL = 7
_STRING = 8
_ARRAY = 9
FILE = "model"

Metadata = Mapping[str, int | float | bool | str | np.uint16 | np.int32 | Sequence[str] | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Type:
    """One of ggml's types: its name and number, weights of a block, bytes of a block."""

    name: str
    number: int
    block: int
    size: int


F32 = Type("F32", 0, 1, 4)
Q4_0 = Type("Q4_0", 2, 32, 18)
Q8_0 = Type("Q8_0", 8, 32, 34)
BF16 = Type("BF16", 30, 1, 2)
MXFP4 = Type("MXFP4", 39, 32, 17)
Q1_0 = Type("Q1_0", 41, 128, 18)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file: its type, and its shape with the columns last."""

    type: Type
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its data. A row is whole blocks."""
        return math.prod(self.shape) // self.type.block * self.type.size


def header(metadata: Metadata, tensors: Mapping[str, Tensor]) -> bytes:
    """All bytes before the data, padded."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    out += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    at = 0
    infos = []
    for name, t in tensors.items():
        dims = t.shape[::-1]
        infos.append(_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.type.number, at))
        at += align(t.bytes, ALIGNMENT)
    out += b"".join(infos)
    return out + bytes(-len(out) % ALIGNMENT)


def size_of(metadata: Metadata, tensors: Mapping[str, Tensor], most: int) -> int:
    """Bytes of the files of a model, each of at most `most`, but for one tensor that is larger."""
    heads = sum(len(header(*part)) for part in _parts(metadata, tensors, most).values())
    return heads + sum(align(t.bytes, ALIGNMENT) for t in tensors.values())


def open_files(
    work: ExportDirectory, folder: str, metadata: Metadata, tensors: Mapping[str, Tensor], most: int
) -> Files:
    """The files of a model, to be filled in a folder of a working directory."""
    parts = _parts(metadata, tensors, most)
    sizes = {file: {name: t.bytes for name, t in part.items()} for file, (_, part) in parts.items()}
    return Files(work, folder, sizes, lambda file: header(*parts[file]), ALIGNMENT)


def _parts(
    metadata: Metadata, tensors: Mapping[str, Tensor], most: int
) -> dict[str, tuple[Metadata, dict[str, Tensor]]]:
    parts = cut(tensors, lambda t: align(t.bytes, ALIGNMENT), most)
    if len(parts) == 1:
        return {f"{FILE}.gguf": (metadata, parts[0])}
    out: dict[str, tuple[Metadata, dict[str, Tensor]]] = {}
    for i, part in enumerate(parts):
        own: dict[str, Any] = {} if i else dict(metadata)
        own |= {"split.no": np.uint16(i), "split.count": np.uint16(len(parts))}
        own |= {"split.tensors.count": np.int32(len(tensors))}
        out[f"{FILE}-{i + 1:05d}-of-{len(parts):05d}.gguf"] = own, part
    return out


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, np.uint16):
        return struct.pack("<IH", _UINT16, value)
    if isinstance(value, np.int32):
        return struct.pack("<Ii", _INT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    strings = all(isinstance(item, str) for item in value)
    data = b"".join(map(_text, value)) if strings else struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", _ARRAY, _STRING if strings else _INT32, len(value)) + data
