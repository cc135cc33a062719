"""The manifest: the one document that makes a directory a bundle. What it says, and how it is written.

Canonical form (sorted keys, one-space indent, no floats) is part of the format: any changed byte changes either the
form or the digest, so a damaged manifest is found before anything it says is believed (parser.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..spec import (
    FORMAT_NAME,
    FORMAT_VERSION,
    DenseLayer,
    DenseMatrix,
    ExpertLayer,
    Matrix,
    Version,
    dense_file,
    dense_layers,
)

MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20
MAX_SIZE = 1 << 48  # of any file
MAX_FILE_HEADER = 100_000_000  # bytes of a layer file before its first extent
MAX_NAME = 255  # bytes of one part of a path, as file systems have it
MAX_PATH = 1024  # bytes of a path
# What every bundle has; the dense tensors are one file, or several with an index.
CONFIG, TABLES, DENSE, DENSE_INDEX = (
    "config.json", "calibration.safetensors", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
PACKED = ("experts/", "dense/")  # folders whose files' headers hold the digests of what is in them
CARD = ("README.md", "losses.png")  # what a page on the Hub shows; the manifest does not list it


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the bundle: its size and the SHA-256 of all of it."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExpertFileEntry:
    """A layer file, of experts or of dense matrices. Its header's digest stands here, and the header holds those of the
    extents.

    `payload` is the bytes of its extents without alignment padding.
    """

    size: int
    header_size: int
    header_sha256: str
    payload: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A version for every expert: `versions[layer position][expert]`, and how it came about; and where dense matrices
    were chosen with them, a version for each of those, else None."""

    name: str
    versions: tuple[tuple[str, ...], ...]
    dense: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds. `provenance` is free-form: strings, integers, lists and objects of them.

    `format_version` is that of a manifest that was read; what is written anew has the latest. `dense` are the matrices
    outside the experts that have versions, in model order, and `dense_versions` these; both are empty without any.
    `expert_files` are the layer files, those of dense matrices as well.
    """

    model: Mapping[str, Any]
    layers: tuple[ExpertLayer, ...]
    versions: tuple[Version, ...]
    files: Mapping[str, FileEntry]
    expert_files: Mapping[str, ExpertFileEntry]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    allocation: Allocation | None = None
    format_version: int = FORMAT_VERSION
    dense: tuple[DenseMatrix, ...] = ()
    dense_versions: tuple[Version, ...] = ()

    @property
    def dense_layers(self) -> tuple[DenseLayer, ...]:
        """`dense` by layer, in its order."""
        return dense_layers(self.dense)

    @property
    def calibration_tokens(self) -> int:
        """Tokens of calibration text by the provenance; 0 where it does not say, or nothing that can be."""
        found = self.provenance.get("calibration")
        parts = [found.get(k) if isinstance(found, Mapping) else 0 for k in ("samples", "length")]
        sizes = [n if isinstance(n, int) and 0 <= n < 1 << 48 else 0 for n in parts]
        return sizes[0] * sizes[1]

    def dense_files(self, version: str) -> tuple[str, ...]:
        """The files of a version of the dense matrices."""
        return tuple(dense_file(version, layer.index) for layer in self.dense_layers)

    def dense_version(self, name: str) -> Version:
        """The version of the dense matrices of that name; KeyError where there is none."""
        for v in self.dense_versions:
            if v.name == name:
                return v
        raise KeyError(name)

    def version(self, name: str) -> Version:
        """The version of that name; KeyError where the bundle does not describe it."""
        for v in self.versions:
            if v.name == name:
                return v
        raise KeyError(name)

    def to_json(self) -> bytes:
        """The canonical bytes of manifest.json."""
        files = {k: asdict(v) for k, v in self.files.items()} | {k: asdict(v) for k, v in self.expert_files.items()}
        document = {
            "format": FORMAT_NAME,
            "format_version": self.format_version,
            "model": dict(self.model),
            "layers": [asdict(layer) for layer in self.layers],
            "versions": [v.record() for v in self.versions],
            "files": files,
            "provenance": dict(self.provenance),
            "allocation": _document(self.allocation) if self.allocation else None,
        }
        if self.dense:
            matrices = [{"layer": d.layer, "module": d.module, **_shape(d.matrix)} for d in self.dense]
            document["dense"] = {"matrices": matrices, "versions": [v.record() for v in self.dense_versions]}
        document["sha256"] = hashlib.sha256(canonical(document)).hexdigest()
        return canonical(document)


def _document(allocation: Allocation) -> dict[str, Any]:
    return {k: v for k, v in asdict(allocation).items() if k != "dense" or v is not None}


def _shape(matrix: Matrix) -> dict[str, Any]:
    return {"rows": matrix.rows, "cols": matrix.cols, "bias": matrix.bias}


def canonical(document: Any) -> bytes:
    """The canonical bytes of a document, as FORMAT.md has them."""
    return (json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()
