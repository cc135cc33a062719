"""Frozen descriptors of a bundle's contents. Standard library only; every size is in bytes.

Versions and sections are defined in encodings/ and sections.py, and may be imported from here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .encodings.base import KNOWN, SCALE_BITS, Version, encoding_of, lossless, lossy, version_names
from .encodings.bf16 import EXPERT_DTYPES
from .sections import BLOCK_ROWS, GROUPS, MAX_EXTENT, MEMORY_PAGE, PAGE, SECTION, Matrix, Section, align

__all__ = [
    "BLOCK_ROWS",
    "EXPERT_DTYPES",
    "GROUPS",
    "KNOWN",
    "MAX_EXTENT",
    "MEMORY_PAGE",
    "PAGE",
    "SCALE_BITS",
    "SECTION",
    "Matrix",
    "Section",
    "Version",
    "align",
    "encoding_of",
    "lossless",
    "lossy",
    "version_names",
]

FORMAT_NAME = "moepack"
FORMAT_VERSION = 6  # the one version that is written and read
HINT = "import moepack first: this is a moepack bundle"  # a tensor's name that plain transformers reports as unknown
LOSSLESS = next(v.name for v in KNOWN if v.holds and not v.released)  # holds BF16 checkpoints
MAX_DIM = 1 << 24  # rows or columns of a matrix
MAX_EXPERTS = 1 << 16
MAX_LAYERS = 1 << 12
MAX_DENSE = 1 << 16  # dense matrices that have versions


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one decoder layer; all of them have matrices of the same shapes."""

    index: int  # the decoder layer's index in the model
    module: str  # the experts module's name in the transformers model
    experts: int  # their number
    matrices: tuple[Matrix, ...]  # first the input projection ("gate_up", or "up" without a gate), then "down"

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return sum(m.weights for m in self.matrices)

    kind = "experts"  # the folder of the layer's files, and part of the format's name in their metadata

    def file(self, version: str) -> str:
        """The layer file's path in a bundle."""
        return expert_file(version, self.index)

    @property
    def extents(self) -> int:
        """Number of extents in each of the layer's files: one per expert."""
        return self.experts

    @property
    def label(self) -> str:
        """The layer's name in the metadata of its files."""
        return str(self.index)

    def extent_matrices(self, extent: int) -> tuple[Matrix, ...]:
        """The matrices in an extent."""
        return self.matrices

    def extent_name(self, extent: int) -> str:
        """An extent's name in its file."""
        return f"expert.{extent:05d}"

    def place(self, extent: int) -> str:
        """The expert of an extent, in words for messages."""
        return f"layer {self.index}, expert {extent}"


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A weight matrix outside the experts that has versions: y = W x + b, as in torch's Linear."""

    layer: int | None  # the decoder layer's index; None for a matrix outside the layers
    module: str  # the Linear's name in the transformers model
    matrix: Matrix  # its shape; `name` is "weight"


LEAST_DENSE = 64  # fewest rows and columns: a narrower matrix is a gate, or too small for versions to pay
_ROUTERS = {"gate", "router", "shared_expert_gate"}


def is_router(module: str) -> bool:
    """Whether a Linear is a layer's router, by the last two parts of its name, such as `router.proj`."""
    return not _ROUTERS.isdisjoint(module.split(".")[-2:])


def is_dense(module: str, rows: int, cols: int) -> bool:
    """Whether a Linear outside the experts counts as a dense matrix, by its name and shape."""
    return min(rows, cols) >= LEAST_DENSE and not is_router(module)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The dense matrices of one decoder layer, or all those outside the layers. Each version has one file of them."""

    index: int | None  # the decoder layer's index; None for matrices outside the layers
    first: int  # the number of the layer's first matrix in the manifest's `dense`
    matrices: tuple[DenseMatrix, ...]  # they follow one another in that list

    kind = "dense"

    def file(self, version: str) -> str:
        """The layer file's path in a bundle."""
        return dense_file(version, self.index)

    @property
    def extents(self) -> int:
        """Number of extents in each of the layer's files: one per matrix."""
        return len(self.matrices)

    @property
    def label(self) -> str:
        """The layer's name in the paths and metadata of its files."""
        return "head" if self.index is None else str(self.index)

    def extent_matrices(self, extent: int) -> tuple[Matrix, ...]:
        """The matrices in an extent."""
        return (self.matrices[extent].matrix,)

    def extent_name(self, extent: int) -> str:
        """An extent's name in its file."""
        return f"dense.{self.first + extent:05d}"

    def place(self, extent: int) -> str:
        """The one matrix of an extent, by name, for messages."""
        return self.matrices[extent].module


def dense_layers(matrices: tuple[DenseMatrix, ...]) -> tuple[DenseLayer, ...]:
    """Group dense matrices by layer, in order."""
    out: list[DenseLayer] = []
    for index, group in itertools.groupby(matrices, key=lambda m: m.layer):
        first = out[-1].first + out[-1].extents if out else 0
        out.append(DenseLayer(index, first, tuple(group)))
    return tuple(out)


def expert_file(version: str, layer: int) -> str:
    """The path of a layer file inside the bundle."""
    return f"experts/{version}/layer-{layer:03d}.safetensors"


def dense_file(version: str, layer: int | None) -> str:
    """The path inside the bundle of a file of dense matrices; `layer` is None outside the decoder layers."""
    return f"dense/{version}/{'head' if layer is None else f'layer-{layer:03d}'}.safetensors"
