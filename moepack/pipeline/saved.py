"""Safetensors files of the work directory that carry a checksum, by which a later run sees damage.

A CRC-32, because every byte that a build saves goes through it, and it takes a small part of the time of writing.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from moepack.pack.errors import BundleError
from moepack.pack.safetensors_file import DTYPES, make_header, read_header

if TYPE_CHECKING:
    import torch

_CHECKSUM = "crc32"  # in the metadata: of the file, with UNKNOWN in the checksum's place
_UNKNOWN = "0" * 8
_AT_ONCE = 1 << 24  # bytes written or read at once; no more of a mapped tensor is in memory
_NAMES = {f"torch.{in_torch}": name for name, (_, in_torch, _) in DTYPES.items()}


def write_saved(file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to an empty file."""
    import torch

    from moepack.calibrate.held import release

    # Wide elements first, as the format advises.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    described = {n: (_NAMES[str(tensors[n].dtype)], tuple(tensors[n].shape)) for n in order}
    header = make_header(described, {**metadata, _CHECKSUM: _UNKNOWN})
    checksum = zlib.crc32(header)
    file.write(header)
    for name in order:
        whole = tensors[name].detach().cpu().contiguous()
        for part in whole.view(-1).view(torch.uint8).split(_AT_ONCE):
            data = part.numpy().data
            checksum = zlib.crc32(data, checksum)
            file.write(data)
            release(whole)
    file.seek(0)
    file.write(make_header(described, {**metadata, _CHECKSUM: f"{checksum:08x}"}))


def is_as_saved(path: Path) -> bool:
    """Whether a file has the bytes that `write_saved` wrote."""
    try:
        header = read_header(path)
        said = header.metadata.get(_CHECKSUM, "")
        before, after = (f'"{_CHECKSUM}":"{text}"'.encode() for text in (said, _UNKNOWN))
        with path.open("rb") as file:
            found = zlib.crc32(file.read(header.size).replace(before, after, 1))
            while data := file.read(_AT_ONCE):
                found = zlib.crc32(data, found)
    except (OSError, BundleError):
        return False
    return said == f"{found:08x}"
