"""Frozen descriptors of what a bundle holds and where each byte of an extent stands. Standard library only.

Pure arithmetic: nothing here reads a file, and nothing infers a format from a dtype. `Manifest` (manifest.py) is the
document that carries these descriptors. Every size is in bytes, every offset counts from the extent's first byte.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

FORMAT_NAME = "moepack"
FORMAT_VERSION = 3  # what is written
READABLE = (2, 3)  # what is read: 2 has neither all encodings nor versions of dense matrices
DENSE_SINCE = 3  # the first version of the format in which dense matrices have versions
PAGE = 4096  # extents start on it: direct I/O, host registration and file mapping all work in pages
SECTION = 64  # sections start on it: one cache line, and the widest vector load there is
BLOCK_ROWS = 16  # rows of a packed matrix that stand side by side: the lanes of the widest vector there is
GROUPS = (128, 64, 32)
HINT = "import moepack first: this is a moepack bundle"  # a tensor's name, for transformers' report of what it misses
LOSSLESS = "bf16"  # the version that holds the checkpoint's bits
# Of the checkpoint, with what the `bf16` version holds of it.
EXPERT_DTYPES = {
    "BF16": "the checkpoint's own bits",
    "F16": "the checkpoint's FP16 weights rounded to BF16",
    "F32": "the checkpoint's FP32 weights rounded to BF16",
    "F8_E4M3": "the bits of the checkpoint's FP8 codes times their blocks' scales, rounded to BF16",
    "MXFP4": "the checkpoint's MXFP4 values, which BF16 holds exactly",
}
MAX_DIM = 1 << 24  # rows or columns of a matrix
MAX_EXPERTS = 1 << 16
MAX_LAYERS = 1 << 12
MAX_DENSE = 1 << 16  # dense matrices that have versions
MAX_EXTENT = (1 << 32) - PAGE  # offsets inside an extent are 32 bits wide


def align(value: int, to: int) -> int:
    """The least multiple of `to` that is not below `value`."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a version's name stands for, but for the size of its groups.

    Attributes:
        name: of the version, its folder and its column in tables.
        encoding: "exponent-huffman" (lossless BF16) or "affine" (value = scale * (code - zero), by group).
        bits: bits of a code, at most 8; 16 for the lossless encoding.
        planes: bits of a code (1, 2, 4 or 8) by plane, least significant first; none for the lossless encoding.
        zero: "stored", "midpoint" (half the greatest code, not stored), or "none" for the lossless encoding.
        group_sizes: how many columns may share a scale and a zero point; none for the lossless encoding.
        since: the first version of the format that has it.
    """

    name: str
    encoding: str
    bits: int
    planes: tuple[int, ...]
    zero: str
    group_sizes: tuple[int, ...]
    since: int = FORMAT_VERSION


# From the most to the least precise. One bit has no room for a zero point: its levels are -scale/2 and +scale/2.
ENCODINGS: tuple[Encoding, ...] = (
    Encoding(LOSSLESS, "exponent-huffman", 16, (), "none", (), 2),
    Encoding("w8", "affine", 8, (8,), "stored", GROUPS),
    Encoding("w4", "affine", 4, (4,), "stored", GROUPS, 2),
    Encoding("w3", "affine", 3, (2, 1), "stored", GROUPS, 2),
    Encoding("w2", "affine", 2, (2,), "stored", GROUPS, 2),
    Encoding("w1", "affine", 1, (1,), "midpoint", GROUPS, 2),
)


def version_names(format_version: int = FORMAT_VERSION) -> tuple[str, ...]:
    """The names in ENCODINGS that a version of the format has, from the most to the least precise."""
    return tuple(e.name for e in ENCODINGS if e.since <= format_version)


def encoding_of(name: str) -> Encoding:
    """The entry of ENCODINGS of that name.

    Raises:
        ValueError: for another name, with those there are.
    """
    for entry in ENCODINGS:
        if entry.name == name:
            return entry
    raise ValueError(f"version {name!r} is unknown: there are {', '.join(version_names())}")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of an expert: y = W x + b, with W of shape [rows, cols].

    Rows stand in the order in which the model's gate activation reads them (FORMAT.md, "Matrices").
    """

    name: str
    rows: int
    cols: int
    bias: bool = False

    @property
    def weights(self) -> int:
        """How many weights it has, its bias not counted."""
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one decoder layer; all of them have the same matrices.

    Attributes:
        index: the decoder layer's index in the model.
        module: the experts module's name in the transformers model.
        experts: how many.
        matrices: first the input projection ("gate_up", or "up" where there is no gate), then "down".
    """

    index: int
    module: str
    experts: int
    matrices: tuple[Matrix, ...]

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return sum(m.weights for m in self.matrices)

    kind = "experts"  # of its files: their folder, and the format that their metadata name

    @property
    def extents(self) -> int:
        """Extents of one of its files: one an expert."""
        return self.experts

    @property
    def label(self) -> str:
        """What metadata of its files call it."""
        return str(self.index)

    def extent_matrices(self, extent: int) -> tuple[Matrix, ...]:
        """What an extent holds."""
        return self.matrices

    def extent_name(self, extent: int) -> str:
        """An extent's name in its file."""
        return extent_name(extent)

    def place(self, extent: int) -> str:
        """An extent in words."""
        return f"layer {self.index}, expert {extent}"


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A weight matrix outside the experts that has versions: y = W x + b, as torch's Linear has it.

    Attributes:
        layer: the decoder layer's index; None for one outside the layers.
        module: the Linear's name in the transformers model.
        matrix: its shape; `name` is "weight".
    """

    layer: int | None
    module: str
    matrix: Matrix


LEAST_DENSE = 64  # rows and columns: what is narrower is a gate, or too small to gain by
ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of names of what decides, and does not compute


def is_dense(module: str, rows: int, cols: int) -> bool:
    """Whether a Linear of this name and shape, outside the experts, is a dense matrix."""
    return min(rows, cols) >= LEAST_DENSE and module.rpartition(".")[2] not in ROUTERS


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The dense matrices of one decoder layer, or of all that is outside them: what one file holds of a version.

    Attributes:
        index: the decoder layer's; None outside.
        first: the number of its first matrix in the manifest's list.
        matrices: they follow one another in that list.
    """

    index: int | None
    first: int
    matrices: tuple[DenseMatrix, ...]

    kind = "dense"

    @property
    def extents(self) -> int:
        """Extents of one of its files: one a matrix."""
        return len(self.matrices)

    @property
    def label(self) -> str:
        """What its files and their metadata call it."""
        return "head" if self.index is None else str(self.index)

    def extent_matrices(self, extent: int) -> tuple[Matrix, ...]:
        """What an extent holds."""
        return (self.matrices[extent].matrix,)

    def extent_name(self, extent: int) -> str:
        """An extent's name in its file."""
        return f"dense.{self.first + extent:05d}"

    def place(self, extent: int) -> str:
        """An extent in words."""
        return self.matrices[extent].module


def dense_layers(matrices: tuple[DenseMatrix, ...]) -> tuple[DenseLayer, ...]:
    """The manifest's list by layer, in its order."""
    out: list[DenseLayer] = []
    for index, group in itertools.groupby(matrices, key=lambda m: m.layer):
        first = out[-1].first + out[-1].extents if out else 0
        out.append(DenseLayer(index, first, tuple(group)))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a bundle's experts, as the manifest records it: an encoding and the size of its groups.

    Attributes:
        name, encoding, bits, zero: the Encoding's.
        group_size: columns that share a scale and a zero point; 0 for the lossless encoding.
    """

    name: str
    encoding: str
    bits: int
    group_size: int
    zero: str

    @staticmethod
    def of(name: str, group_size: int = GROUPS[0]) -> Version:
        """The version of an encoding's name; the lossless one has no groups, whatever size is given.

        Raises:
            ValueError: for a name that is not in ENCODINGS, or a size of groups that its encoding does not have.
        """
        e = encoding_of(name)
        if e.group_sizes and group_size not in e.group_sizes:
            raise ValueError(f"{name}: groups are of {', '.join(map(str, e.group_sizes))}, not {group_size}")
        return Version(e.name, e.encoding, e.bits, group_size if e.group_sizes else 0, e.zero)

    @property
    def is_lossless(self) -> bool:
        """Whether decoding gives the checkpoint's own bits."""
        return self.encoding == "exponent-huffman"

    @property
    def stores_zeros(self) -> bool:
        """Whether groups have zero points of their own."""
        return self.zero == "stored"

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of a code by plane, least significant first."""
        return encoding_of(self.name).planes


@dataclass(frozen=True, slots=True)
class Section:
    """A run of bytes inside an extent: an array of `shape` with elements of `item` bytes, row-major."""

    matrix: int
    kind: str
    offset: int
    shape: tuple[int, ...]
    item: int

    @property
    def size(self) -> int:
        """Its bytes."""
        n = self.item
        for d in self.shape:
            n *= d
        return n

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.size


def groups(matrix: Matrix, group_size: int) -> int:
    """Groups of a row; the last one may be partial."""
    return -(-matrix.cols // group_size)


def row_blocks(matrix: Matrix) -> int:
    """Blocks of BLOCK_ROWS rows; the last one may be filled up."""
    return -(-matrix.rows // BLOCK_ROWS)


def plane_words(cols: int, bits: int) -> int:
    """32-bit words of one row of a plane that holds `bits` bits of every code."""
    return -(-cols * bits // 32)


def affine_sections(matrices: tuple[Matrix, ...], version: Version) -> tuple[Section, ...]:
    """Where everything stands in an extent of an affine version (FORMAT.md, "Affine extents").

    The layout is the same for every expert of a layer, so a reader computes it once and an extent needs no header.
    """
    if version.encoding != "affine":
        raise ValueError(f"{version.name} is not an affine version")
    out: list[Section] = []
    at = 0

    def add(matrix: int, kind: str, shape: tuple[int, ...], item: int) -> None:
        nonlocal at
        section = Section(matrix, kind, at, shape, item)
        out.append(section)
        at = align(section.end, SECTION)

    for i, m in enumerate(matrices):
        blocks, by_group = row_blocks(m), groups(m, version.group_size)
        for p, bits in enumerate(version.planes):
            add(i, f"plane{p}", (blocks, plane_words(m.cols, bits), BLOCK_ROWS), 4)
        add(i, "scale", (blocks, by_group, BLOCK_ROWS), 2)
        if version.stores_zeros:
            add(i, "zero", (blocks, by_group, BLOCK_ROWS), 1)
        if m.bias:
            add(i, "bias", (m.rows,), 2)
    return tuple(out)


def affine_payload(matrices: tuple[Matrix, ...], version: Version) -> int:
    """Bytes of an affine extent that carry something: its sections without the gaps between them."""
    return sum(s.size for s in affine_sections(matrices, version))


def affine_extent_size(matrices: tuple[Matrix, ...], version: Version) -> int:
    """Bytes of an affine extent in its file, padding included."""
    return align(affine_sections(matrices, version)[-1].end, PAGE)


def expert_file(version: str, layer: int) -> str:
    """The path of a layer file inside the bundle."""
    return f"experts/{version}/layer-{layer:03d}.safetensors"


def extent_name(expert: int) -> str:
    """The name of an expert's extent inside its layer file."""
    return f"expert.{expert:05d}"


def dense_file(version: str, layer: int | None) -> str:
    """The path inside the bundle of a file of dense matrices; `layer` None is what is outside the decoder layers."""
    return f"dense/{version}/{'head' if layer is None else f'layer-{layer:03d}'}.safetensors"
