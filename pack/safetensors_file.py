"""Headers of safetensors files: read with every field checked, written with control over alignment.

Extents and truncation checks need the tensors' offsets in a file, and control over the first byte of data; the
safetensors library gives neither. The format: the header's length as a little-endian 64-bit number, the header as JSON,
then the data without holes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import BundleError, Kind
from .manifest import strict_json
from .spec import align

_bad = BundleError.single
MAX_HEADER = 100_000_000  # the limit of the safetensors format
MAX_RANK = 64  # dimensions of a tensor
# dtype -> bytes of an element, and the dtype's name in torch and in NumPy, empty where NumPy has none.
DTYPES = {
    "BOOL": (1, "bool", "?"), "U8": (1, "uint8", "<u1"), "I8": (1, "int8", "<i1"), "F8_E5M2": (1, "float8_e5m2", ""),
    "F8_E4M3": (1, "float8_e4m3fn", ""), "F8_E8M0": (1, "float8_e8m0fnu", ""), "U16": (2, "uint16", "<u2"),
    "I16": (2, "int16", "<i2"), "F16": (2, "float16", "<f2"), "BF16": (2, "bfloat16", "<u2"),
    "U32": (4, "uint32", "<u4"), "I32": (4, "int32", "<i4"), "F32": (4, "float32", "<f4"), "U64": (8, "uint64", "<u8"),
    "I64": (8, "int64", "<i8"), "F64": (8, "float64", "<f8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: dtype by its name in the format, shape, and bytes [begin, end) counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. `size` counts from the start of the file to the first byte of data."""

    size: int
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of `path` against the file's size.

    Raises BundleError with one problem, when the file is not a whole, well-formed safetensors file, and OSError when it
    cannot be read.
    """
    with path.open("rb") as f:
        return read_open_header(f, str(path))


def read_open_header(file: BinaryIO, location: str) -> Header:
    """Read and check an open file's header, like `read_header`; leaves the file's position after the header."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise _bad(location, "truncated", f"{size} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER or 8 + length > size:
        raise _bad(location, "truncated", f"its header claims {length} bytes, the file has {size}")
    return parse_header(prefix + file.read(length), size, location)


def parse_header(head: bytes, file_size: int, location: str) -> Header:
    """Check a header (length prefix included) against the size of its file; see `read_header`."""
    try:
        if head[8:9] != b"{":
            raise ValueError("it does not begin with {")
        document = strict_json.loads(head[8:])
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair, which other readers refuse
    except ValueError as error:
        raise _bad(location, "header", f"its header cannot be parsed: {error}") from None
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(location, "header", "__metadata__ does not map names to strings")
    tensors = {name: _entry(location, name, value, len(head)) for name, value in document.items()}
    at = len(head)
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if t.begin != at:
            raise _bad(location, "offsets", f"tensor {name} begins at {t.begin}, the one before it ends at {at}")
        at = t.end
    if at != file_size:
        kind: Kind = "truncated" if at > file_size else "trailing"
        raise _bad(location, kind, f"the file has {file_size} bytes, its header describes {at}")
    return Header(len(head), tensors, metadata)


def _entry(location: str, name: str, value: object, base: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(location, "header", f"tensor {name} has not exactly dtype, shape and data_offsets")
    dtype = value["dtype"]
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise _bad(location, "header", f"tensor {name} has a shape or data_offsets that are not lists of numbers")
    begin, end = offsets
    numbers = (*shape, begin, end)
    in_range = all(type(v) is int and 0 <= v < 1 << 48 for v in numbers) and len(shape) <= MAX_RANK
    if not in_range or not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad(location, "header", f"tensor {name} has a dtype, shape or offset out of range")
    expected = DTYPES[dtype][0] * math.prod(shape)
    if end - begin != expected:
        raise _bad(location, "offsets", f"tensor {name} of {expected} bytes spans {end - begin}")
    return TensorEntry(dtype, tuple(shape), base + begin, base + end)


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], alignment: int = 8
) -> bytes:
    """The header of a file with these tensors (name -> dtype, shape) in this order, padded so that data are aligned."""
    document: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPES[dtype][0] * math.prod(shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (align(8 + len(text), alignment) - 8 - len(text))
    return struct.pack("<Q", len(text)) + text


def merge(
    parts: Sequence[tuple[Path, str]], out: Path, metadata: Mapping[str, str], leave_out: Container[str] = ()
) -> dict[str, TensorEntry]:
    """Copy the tensors of several files into one, `out`, and return its tensors.

    Each part is a file and a prefix for its tensors' names; prefixed names must not collide. The files' own metadata
    are dropped, and so are tensors whose prefixed names are in `leave_out`.
    """
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for path, prefix in parts:
        for name, entry in read_header(path).tensors.items():
            if prefix + name in found:
                raise ValueError(f"{prefix + name} is in two files")
            if prefix + name not in leave_out:
                found[prefix + name] = (path, entry)
    # Wide elements first: every tensor then begins on a multiple of its element size, as the format advises.
    order = sorted(found, key=lambda name: (-DTYPES[found[name][1].dtype][0], name))
    header = make_header({name: (found[name][1].dtype, found[name][1].shape) for name in order}, metadata)
    with out.open("wb") as target:
        target.write(header)
        for name in order:
            path, entry = found[name]
            with path.open("rb") as source:
                source.seek(entry.begin)
                left = entry.end - entry.begin
                while left:
                    chunk = source.read(min(left, 1 << 24))
                    if not chunk:
                        raise _bad(f"{path}", "truncated", f"ends inside tensor {name}")
                    target.write(chunk)
                    left -= len(chunk)
    return dict(parse_header(header, out.stat().st_size, str(out)).tensors)
