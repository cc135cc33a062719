"""A safetensors file whose tensors are written in any order, whole or in parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.safetensors_file import DTYPES, Header, make_header

if TYPE_CHECKING:
    from torch import Tensor

METADATA = {"format": "pt"}  # of every file


class FilledFile:
    """A file that has its header and its size from the start."""

    def __init__(self, path: Path, header: Header, wanted: set[str]) -> None:
        """Write the header of the tensors of `header` that are in `wanted`, and make room for them."""
        entries = {n: (e.dtype, e.shape) for n, e in header.tensors.items() if n in wanted}
        head = make_header(entries, METADATA)
        self._file, at = path.open("wb"), len(head)
        self._places: dict[str, tuple[int, int]] = {}  # offset and bytes
        for name, (dtype, shape) in entries.items():
            self._places[name] = at, DTYPES[dtype][0] * math.prod(shape)
            at += self._places[name][1]
        self._dtypes = {name: DTYPES[dtype][1] for name, (dtype, _) in entries.items()}
        self._left = {name: size for name, (_, size) in self._places.items()}
        self._file.write(head)
        self._file.truncate(at)

    def put(self, name: str, index: int, values: Tensor) -> None:
        """Write values of a tensor, from an index of its first axis on. Raises InputError if they do not fit it."""
        import torch

        if str(values.dtype) != f"torch.{self._dtypes[name]}":
            raise InputError(f"{self._file.name}: {name} is {values.dtype}, not as described: the bundle is damaged")
        data = values.contiguous().reshape(-1).view(torch.uint8).numpy()
        at, size = self._places[name]
        begin = index * (len(data) // max(1, values.shape[0])) if values.ndim else 0
        if begin + len(data) > size:
            raise InputError(f"{self._file.name}: {name} has more bytes than its description: the bundle is damaged")
        self._file.seek(at + begin)
        self._file.write(data.data)
        self._left[name] -= len(data)

    def close(self) -> None:
        """Finish the file. Raises InputError if bytes of a tensor were not written."""
        self._file.close()
        for name, left in self._left.items():
            if left:
                raise InputError(f"{self._file.name}: {name}: {left} bytes are not in the bundle: it is damaged")
