"""Read a bundle's dense tensors that have no versions, by name, as NumPy arrays or torch tensors.

Headers are checked when the files are opened, and a file's digest before its first tensor is read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .codec.bits import bf16_to_float32
from .errors import BundleError, InputError
from .files import digest_of, opened, read_file
from .manifest import DENSE, DENSE_INDEX, Manifest, strict_json
from .safetensors_file import DTYPES, TensorEntry, read_open_header
from .spec import HINT

if TYPE_CHECKING:
    from torch import Tensor

MAX_INDEX = 64 << 20


class DenseTensors(Mapping[str, tuple[int, ...]]):
    """The dense tensors of a bundle: a mapping of names to shapes, and the tensors themselves on request."""

    def __init__(self, root: Path, manifest: Manifest, check_digests: bool = True) -> None:
        """Read the headers. Raises BundleError when a file is incomplete, or the index and the files disagree."""
        self._root = root
        self._manifest = manifest
        self._checks = check_digests
        self._places: dict[str, tuple[str, TensorEntry]] = {}  # name -> file, and place in it
        self._checked: set[str] = set()
        tripwire = f"{manifest.layers[0].module}.down_proj"
        for file, names in dense_files(root, manifest).items():
            with opened(root, file) as f:
                tensors = read_open_header(f, f"{root}/{file}").tensors
            if names is not None and names != tensors.keys():
                odd = min(names ^ tensors.keys())
                raise self._bad(DENSE_INDEX, f"{odd} is in the index or in {file}, and not in both")
            self._places |= {name: (file, entry) for name, entry in tensors.items()}
        found = self._places.pop(tripwire, None)
        if found is None or (found[1].dtype, found[1].shape) != ("BF16", (1,)):
            raise self._bad(DENSE, f"has no tensor {tripwire}, BF16 [1]: plain transformers would load it")
        self._places.pop(HINT, None)
        for name in (f"{d.module}.{part}" for d in manifest.dense for part in ("weight", "bias")):
            if name in self._places:
                raise self._bad(self._places[name][0], f"has {name}, which has versions and stands with them")

    def _bad(self, name: str, message: str) -> BundleError:
        return BundleError.single(f"{self._root}/{name}", "tables", message)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._places[name][1].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def dtype(self, name: str) -> str:
        """A tensor's dtype, by its name in safetensors: "BF16", "F32" ..."""
        return self._places[name][1].dtype

    def numpy(self, name: str) -> NDArray[Any]:
        """Read a tensor into a new array. BF16, which NumPy lacks, becomes float32 of the same values.

        Raises InputError for any other dtype that NumPy lacks, and BundleError when the tensor's file is damaged.
        """
        file, entry = self._places[name]
        if not (kind := DTYPES[entry.dtype][2]):
            raise InputError(f"{self._root}/{file}: {name} is {entry.dtype}, which NumPy does not have")
        array = np.frombuffer(self._bytes(name), kind).reshape(entry.shape)
        return bf16_to_float32(array) if entry.dtype == "BF16" else array

    def torch(self, name: str, mapped: bool = False) -> Tensor:
        """Read a tensor in its stored dtype, to the CPU. Raises BundleError when its file is damaged.

        With `mapped` it stays in the file until it is read or written; what is written to it is its own.
        """
        import torch

        entry = self._places[name][1]
        data = self._mapped(name) if mapped else self._bytes(name)
        dtype = getattr(torch, DTYPES[entry.dtype][1])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(entry.shape)

    def _checked_place(self, name: str) -> tuple[str, TensorEntry]:
        file, entry = self._places[name]
        if self._checks and file not in self._checked:
            if digest_of(self._root, file) != self._manifest.files[file].sha256:
                raise BundleError.single(f"{self._root}/{file}", "digest", "its bytes do not match their digest")
            self._checked.add(file)
        return file, entry

    def _mapped(self, name: str) -> memoryview:
        file, entry = self._checked_place(name)
        if entry.begin == entry.end:
            return memoryview(b"")
        start = entry.begin - entry.begin % mmap.ALLOCATIONGRANULARITY
        with opened(self._root, file) as f:
            whole = mmap.mmap(f.fileno(), entry.end - start, access=mmap.ACCESS_COPY, offset=start)
        return memoryview(whole)[entry.begin - start :]

    def _bytes(self, name: str) -> bytearray:
        file, entry = self._checked_place(name)
        location = f"{self._root}/{file}"
        data = bytearray(entry.end - entry.begin)
        with opened(self._root, file) as f:
            f.seek(entry.begin)
            if f.readinto(data) != len(data):
                raise BundleError.single(location, "truncated", f"ends inside tensor {name}")
        return data


def dense_files(root: Path, manifest: Manifest) -> dict[str, set[str] | None]:
    """Map each file of dense tensors to the names that the index lists for it, or to None without an index.

    Raises BundleError for a malformed index.
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
    out: dict[str, set[str]] = {}
    for name, file in found.items():
        if file not in manifest.files or not file.endswith(".safetensors"):
            raise BundleError.single(location, "tables", f"names {file!r}, not a file of tensors in the manifest")
        out.setdefault(file, set()).add(name)
    return dict(out)
