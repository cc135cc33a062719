"""A checkpoint's files of tensors: whose tensors are known beforehand, and written in any order, whole or in parts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.manifest import DENSE, DENSE_INDEX
from moepack.pack.safetensors_file import DTYPES, Header, TensorEntry, make_header

from .filled import METADATA, FilledFile
from .layout import Entries

if TYPE_CHECKING:
    from torch import Tensor

SHARD = 5_000_000_000  # bytes of a file's tensors; a larger tensor has a file of its own


def tensor_bytes(entry: tuple[str, tuple[int, ...]]) -> int:
    """Bytes of a tensor of this dtype and shape."""
    return DTYPES[entry[0]][0] * math.prod(entry[1])


def total_bytes(entries: Entries) -> int:
    """Bytes of all tensors."""
    return sum(map(tensor_bytes, entries.values()))


def file_bytes(entries: Entries, most: int | None = None) -> int:
    """Bytes of the files of these tensors, with their headers."""
    return sum(len(make_header(part, METADATA)) + total_bytes(part) for part in shards(entries, most or SHARD))


def shards(entries: Entries, most: int) -> list[Entries]:
    """Cut tensors, in their order, into files of at most `most` bytes."""
    out, size = [Entries()], 0
    for name, entry in entries.items():
        size += tensor_bytes(entry)
        if out[-1] and size > most:
            out.append({})
            size = tensor_bytes(entry)
        out[-1][name] = entry
    return out


def write_index(folder: Path, total: int, file_of: Mapping[str, str]) -> None:
    """Write the index of a checkpoint in several files: the file of each tensor, and the bytes of all tensors."""
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    (folder / DENSE_INDEX).write_text(json.dumps(document, indent=2) + "\n")


class ShardedFiles:
    """The files of a checkpoint in a directory, at their full size from the start."""

    def __init__(self, folder: Path, entries: Entries, most: int | None = None) -> None:
        self._folder, self._total, parts = folder, total_bytes(entries), shards(entries, most or SHARD)
        self.names = (
            [DENSE]
            if len(parts) == 1
            else [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        )
        self._file_of = {name: file for file, part in zip(self.names, parts, strict=True) for name in part}
        self._files = {file: _filled(folder / file, part) for file, part in zip(self.names, parts, strict=True)}

    def put(self, name: str, values: Tensor, index: int = 0) -> None:
        """Write values of a tensor, from an index of its first axis on."""
        self._files[self._file_of[name]].put(name, index, values)

    def close(self) -> None:
        """Finish the files, and write their index if they are several."""
        for file in self._files.values():
            file.close()
        if len(self._files) > 1:
            write_index(self._folder, self._total, self._file_of)


def _filled(path: Path, entries: Entries) -> FilledFile:
    header = {name: TensorEntry(*entry, 0, tensor_bytes(entry)) for name, entry in entries.items()}
    return FilledFile(path, Header(0, header, {}), set(header))
