"""The tensors outside the experts that have no versions, by name, to NumPy or torch.

Headers are checked when the files are opened, and a file's digest before its first tensor is given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .codec.bits import bf16_to_float32
from .errors import BundleError, InputError
from .files import digest_of, open_file, read_file
from .manifest import DENSE, DENSE_INDEX, Manifest, strict_json
from .safetensors_file import TensorEntry, read_open_header
from .spec import HINT

if TYPE_CHECKING:
    from torch import Tensor

MAX_INDEX = 64 << 20
_NUMPY = {
    "BOOL": "?", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2", "U32": "<u4",
    "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    entry: TensorEntry


class DenseTensors(Mapping[str, tuple[int, ...]]):
    """The dense tensors of a bundle: a mapping of names to shapes, and the tensors themselves on request."""

    def __init__(self, root: Path, manifest: Manifest, check_digests: bool = True) -> None:
        """Read the headers.

        Raises:
            BundleError: when a file is not whole, or index and files do not agree.
        """
        self._root, self._manifest, self._checks = root, manifest, check_digests
        self._places: dict[str, _Place] = {}
        self._checked: set[str] = set()
        tripwire = f"{manifest.layers[0].module}.down_proj"
        for file, names in dense_files(root, manifest).items():
            with os.fdopen(open_file(root, file), "rb") as f:
                tensors = read_open_header(f, f"{root}/{file}").tensors
            if names is not None and names != tensors.keys():
                odd = min(names ^ tensors.keys())
                raise self._bad(DENSE_INDEX, f"{odd} is in the index or in {file}, and not in both")
            self._places |= {name: _Place(file, entry) for name, entry in tensors.items()}
        found = self._places.pop(tripwire, None)
        if found is None or (found.entry.dtype, found.entry.shape) != ("BF16", (1,)):
            raise self._bad(DENSE, f"has no tensor {tripwire}, BF16 [1]: plain transformers would load it")
        self._places.pop(HINT, None)
        for name in (f"{d.module}.{part}" for d in manifest.dense for part in ("weight", "bias")):
            if name in self._places:
                raise self._bad(self._places[name].file, f"has {name}, which has versions and stands with them")

    def _bad(self, name: str, message: str) -> BundleError:
        return BundleError.single(f"{self._root}/{name}", "tables", message)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._places[name].entry.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def dtype(self, name: str) -> str:
        """A tensor's dtype, by its name in safetensors: "BF16", "F32" ..."""
        return self._places[name].entry.dtype

    def numpy(self, name: str) -> NDArray[Any]:
        """A tensor, in memory of its own; BF16 as float32 of the same values, which NumPy has no type for.

        Raises:
            InputError: for a dtype that NumPy does not have, nor an equal.
            BundleError: when its file is damaged.
        """
        place = self._places[name]
        if place.entry.dtype not in _NUMPY:
            raise InputError(f"{self._root}/{place.file}: {name} is {place.entry.dtype}, which NumPy does not have")
        array = np.frombuffer(self._bytes(name), _NUMPY[place.entry.dtype]).reshape(place.entry.shape)
        return bf16_to_float32(array) if place.entry.dtype == "BF16" else array

    def torch(self, name: str) -> Tensor:
        """A tensor as it is stored, on the CPU.

        Raises:
            BundleError: when its file is damaged.
        """
        import torch

        place = self._places[name]
        dtype = getattr(torch, _TORCH[place.entry.dtype])
        data = self._bytes(name)
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(place.entry.shape)

    def _bytes(self, name: str) -> bytearray:
        place = self._places[name]
        location = f"{self._root}/{place.file}"
        if self._checks and place.file not in self._checked:
            if digest_of(self._root, place.file) != self._manifest.files[place.file].sha256:
                raise BundleError.single(location, "digest", "its bytes do not match their digest")
            self._checked.add(place.file)
        data = bytearray(place.entry.end - place.entry.begin)
        with os.fdopen(open_file(self._root, place.file), "rb") as f:
            f.seek(place.entry.begin)
            if f.readinto(data) != len(data):
                raise BundleError.single(location, "truncated", f"ends inside tensor {name}")
        return data


def dense_files(root: Path, manifest: Manifest) -> dict[str, set[str] | None]:
    """The files of dense tensors, each with the tensors that the index says are in it; None where there is no index.

    Raises:
        BundleError: for an index that is not one.
    """
    if DENSE_INDEX not in manifest.files:
        return {DENSE: None}
    location = f"{root}/{DENSE_INDEX}"
    try:
        document = strict_json.loads(read_file(root, DENSE_INDEX, MAX_INDEX))
    except ValueError as error:
        raise BundleError.single(location, "json", f"cannot be parsed: {error}") from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise BundleError.single(location, "tables", "has no weight_map of tensors' names to files")
    out: dict[str, set[str] | None] = {}
    for name, file in found.items():
        if file not in manifest.files or not file.endswith(".safetensors"):
            raise BundleError.single(location, "tables", f"names {file!r}, which is no file of tensors in the manifest")
        names = out.setdefault(file, set())
        assert names is not None
        names.add(name)
    return out
