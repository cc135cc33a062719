"""The GGUF file format, version 3: keys and values, tensors of ggml's types, written in any order. No value is changed.

Numbers are little-endian; a tensor's shape stands with its columns first; data begin at multiples of ALIGNMENT.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.sections import align

ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of values

Metadata = Mapping[str, int | float | bool | str | Sequence[str] | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Type:
    """One of ggml's types: its name and number, weights of a block, bytes of a block."""

    name: str
    number: int
    block: int
    size: int


F32, Q4_0, Q8_0, BF16, MXFP4 = (
    Type("F32", 0, 1, 4), Type("Q4_0", 2, 32, 18), Type("Q8_0", 8, 32, 34), Type("BF16", 30, 1, 2),
    Type("MXFP4", 39, 32, 17),
)  # fmt: skip


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
    at, infos = 0, []
    for name, t in tensors.items():
        dims = t.shape[::-1]
        infos.append(_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.type.number, at))
        at += align(t.bytes, ALIGNMENT)
    out += b"".join(infos)
    return out + bytes(-len(out) % ALIGNMENT)


def size_of(metadata: Metadata, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the whole file."""
    return len(header(metadata, tensors)) + sum(align(t.bytes, ALIGNMENT) for t in tensors.values())


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    strings = all(isinstance(item, str) for item in value)
    data = b"".join(map(_text, value)) if strings else struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", _ARRAY, _STRING if strings else _INT32, len(value)) + data


class File:
    """A file that has its header and its size from the start."""

    def __init__(self, path: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
        self._file, head = path.open("wb"), header(metadata, tensors)
        self._file.write(head)
        self._places, at = dict[str, int](), len(head)
        for name, t in tensors.items():
            self._places[name] = at
            at += align(t.bytes, ALIGNMENT)
        self._file.truncate(at)
        self._left = {name: t.bytes for name, t in tensors.items()}

    def put(self, name: str, data: npt.NDArray[np.uint8], at: int = 0) -> None:
        """Write bytes of a tensor, from a byte of it on."""
        self._file.seek(self._places[name] + at)
        self._file.write(np.ascontiguousarray(data).data)
        self._left[name] -= data.size

    def close(self) -> None:
        """Finish the file. Raises InputError if bytes of a tensor were not written."""
        self._file.close()
        for name, left in self._left.items():
            if left:
                raise InputError(f"{self._file.name}: {name}: {left} bytes are not in the bundle: it is damaged")
