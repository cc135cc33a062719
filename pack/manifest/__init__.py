"""The manifest: the one document that makes a directory a bundle.

Canonical form (sorted keys, one-space indent, no floats) is part of the format: any changed byte changes the form or
the digest, so the parser finds a damaged manifest before it reads any field.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..spec import FORMAT_NAME, FORMAT_VERSION, DenseLayer, DenseMatrix, ExpertLayer, Version, dense_layers

MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20
MAX_SIZE = 1 << 48  # of any file
MAX_FILE_HEADER = 100_000_000  # bytes of a layer file before its first extent
MAX_NAME = 255  # bytes of one part of a path: the limit of file systems
MAX_PATH = 1024  # bytes of a path
# Files of every bundle; the dense tensors are one file, or several with an index.
CONFIG = "config.json"
TABLES = "calibration.safetensors"
DENSE = "model.safetensors"
DENSE_INDEX = "model.safetensors.index.json"
LEFTOVERS = "released.safetensors"  # tensors that are kept as they were in the checkpoint, and not served
PACKED = ("experts/", "dense/")  # folders of layer files, whose headers hold the digests of their extents
CARD = ("README.md", "losses.png")  # shown by a page on the Hub; the manifest does not list them


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the bundle: its size and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExpertFileEntry:
    """A layer file, of experts or dense matrices. Its digest is that of its header, which holds the extents' digests.

    `payload` is the bytes of its extents without alignment padding.
    """

    size: int
    header_size: int
    header_sha256: str
    payload: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A version for every expert: `versions[layer][expert]`, layers by position. `name` says how they were chosen.

    `dense` is a version for each dense matrix; None if only the experts' versions were chosen.
    """

    name: str
    versions: tuple[tuple[str, ...], ...]
    dense: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a bundle."""

    model: Mapping[str, Any]
    layers: tuple[ExpertLayer, ...]
    versions: tuple[Version, ...]
    files: Mapping[str, FileEntry]
    expert_files: Mapping[str, ExpertFileEntry]  # the layer files, of experts and of dense matrices
    provenance: Mapping[str, Any] = field(default_factory=dict)  # strings, integers, lists and objects of them
    allocation: Allocation | None = None
    dense: tuple[DenseMatrix, ...] = ()  # the matrices outside the experts that have versions, in model order
    dense_versions: tuple[Version, ...] = ()

    @property
    def dense_layers(self) -> tuple[DenseLayer, ...]:
        """The dense matrices grouped by layer, in the order of `dense`."""
        return dense_layers(self.dense)

    @property
    def calibration_tokens(self) -> int:
        """Tokens of calibration text by the provenance; 0 where it has no such number."""
        found = self.provenance.get("calibration")
        parts = [found.get(k) if isinstance(found, Mapping) else 0 for k in ("samples", "length")]
        sizes = [n if isinstance(n, int) and 0 <= n < 1 << 48 else 0 for n in parts]
        return sizes[0] * sizes[1]

    def layer_files(
        self, versions: Iterable[Version], dense: Iterable[Version]
    ) -> dict[str, tuple[Version, ExpertLayer | DenseLayer]]:
        """Map paths to version and layer: the layer files of these expert versions, then of these dense versions."""
        pairs: list[tuple[Version, ExpertLayer | DenseLayer]] = list(itertools.product(versions, self.layers))
        pairs += itertools.product(dense, self.dense_layers)
        return {layer.file(version.name): (version, layer) for version, layer in pairs}

    def dense_files(self, version: str) -> tuple[str, ...]:
        """The files of a version of the dense matrices."""
        return tuple(layer.file(version) for layer in self.dense_layers)

    def dense_version(self, name: str) -> Version:
        """The version of the dense matrices with this name; raises KeyError for an unknown name."""
        return {v.name: v for v in self.dense_versions}[name]

    def version(self, name: str) -> Version:
        """The version with this name; raises KeyError for an unknown name."""
        return {v.name: v for v in self.versions}[name]

    def to_json(self) -> bytes:
        """The canonical bytes of manifest.json."""
        files = {k: asdict(v) for k, v in self.files.items()} | {k: asdict(v) for k, v in self.expert_files.items()}
        document: dict[str, Any] = {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "model": dict(self.model),
            "layers": [asdict(layer) for layer in self.layers],
            "versions": [v.record() for v in self.versions],
            "files": files,
            "provenance": dict(self.provenance),
            "allocation": asdict(self.allocation) if self.allocation else None,
        }
        if self.allocation and self.allocation.dense is None:
            del document["allocation"]["dense"]
        if self.dense:
            matrices = [{"layer": d.layer, "module": d.module, **asdict(d.matrix)} for d in self.dense]
            for matrix in matrices:
                del matrix["name"]
            document["dense"] = {"matrices": matrices, "versions": [v.record() for v in self.dense_versions]}
        document["sha256"] = hashlib.sha256(canonical(document)).hexdigest()
        return canonical(document)


def canonical(document: object) -> bytes:
    """The canonical bytes of a document, as FORMAT.md defines them."""
    return (json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()
