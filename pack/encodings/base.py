"""The interface of encodings: a version is an encoding with a group size. Standard library only."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import Kind
from ..sections import PAGE, SECTION, Matrix, Section, align

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..codec.bits import Buffer

Part = tuple[str, tuple[int, ...], int]  # a section that has no offset yet: kind, shape, bytes of an element
Stored = Any  # a matrix as a codec has it: an AffineMatrix, a ReleasedMatrix or a LosslessMatrix
SCALE_BITS = (16, 8)  # of a scale that a quantiser makes: BF16, or a byte (FORMAT.md, "Scales of a byte")


@dataclass(frozen=True)
class Version(ABC):
    """One version of a bundle's experts: how codes become bytes, and how bytes become weights.

    The manifest records `name`, `encoding`, `bits`, `group_size`, `zero` and `scale_bits`; versions are
    equal where these are. The other attributes follow from the name.
    """

    name: str  # the version's name, its folder in a bundle and its column in tables
    encoding: str  # the manifest's word for the family of encodings
    bits: int  # bits of a code, at most 8; 16 for BF16
    kernel: int = field(compare=False)  # the version's number in kernels (runtime/kernels/forms.py)
    # Bits of a code (1, 2, 4 or 8) by plane, least significant first; none where codes have no planes.
    planes: tuple[int, ...] = field(default=(), compare=False)
    # The zero points of codes: "stored", one a group; or not stored: "symmetric" (2^(bits-1)), "midpoint" (half the
    # greatest code) or "none".
    zero: str = "none"
    group_sizes: tuple[int, ...] = field(default=(), compare=False)  # the numbers of columns that may share a scale
    group_size: int = 0  # columns that share a scale; 0 without groups
    scale_bits: int = 16  # of an affine version's scale, one of SCALE_BITS

    holds: ClassVar[
        Mapping[str, str]
    ] = {}  # a lossless version's contents, by the checkpoint's dtype; empty for others
    released: ClassVar[bool] = False  # whether it holds a checkpoint's codes and scales as they are
    scale_dtype: ClassVar[str] = "BF16"  # of the scales, where there are some
    # Whether the stored size depends on the values. Such a version is decoded on its device, or stays as it is stored.
    entropy_coded: ClassVar[bool] = False
    by_matrix: ClassVar[bool] = False  # whether an expert's matrices differ in bits (`at`); no dense matrix has it
    # Whether a weight depends on the codes before it. No dense matrix has such a version.
    trellis: ClassVar[bool] = False
    plain: ClassVar[bool] = False  # whether memory holds BF16 matrices (section "weight") that torch can use
    matrix_boundary: ClassVar[int] = SECTION  # alignment of a matrix's begin in memory
    extent_boundary: ClassVar[int] = PAGE  # alignment of an extent's end in memory

    @staticmethod
    def of(
        name: str,
        group_size: int = 0,
        scale_bits: int = 16,
        symmetric: bool = False,
    ) -> Version:
        """Find a version by name. Encodings without groups ignore the size; 0 stands for the largest.

        With `symmetric` zero points are the middle code, and an encoding that would store them stores none.
        Encodings that hold a checkpoint ignore `scale_bits`. Raises ValueError for an unknown name, or a
        group size that the encoding does not have.
        """
        e = encoding_of(name)
        if scale_bits not in SCALE_BITS:
            raise ValueError(f"{name}: scales are of 16 or 8 bits, not {scale_bits}")
        if not e.holds:
            e = replace(e, scale_bits=scale_bits)
        if symmetric and e.stores_zeros:
            e = replace(e, zero="symmetric")
        if not e.group_sizes:
            return e
        group_size = group_size or max(e.group_sizes)
        if group_size not in e.group_sizes:
            raise ValueError(f"{name}: groups are of {', '.join(map(str, e.group_sizes))}, not {group_size}")
        return replace(e, group_size=group_size)

    @staticmethod
    def read(record: Mapping[str, Any]) -> Version:
        """Find the version of a record in the manifest. Raises ValueError if no version has this record."""
        scale_bits = record.get("scale_bits", SCALE_BITS[0])
        name = str(record.get("name"))
        group_size = record.get("group_size") or 0
        made = Version.of(name, group_size, scale_bits, record.get("zero") == "symmetric")
        if made.record() != record:
            raise ValueError(f"this moepack does not know this form of {made.name}")
        return made

    def record(self) -> dict[str, object]:
        """The version's record in the manifest."""
        found = {k: getattr(self, k) for k in ("name", "encoding", "bits", "group_size", "zero")}
        if self.scale_bits != SCALE_BITS[0]:
            found["scale_bits"] = self.scale_bits
        return found

    @property
    def stores_zeros(self) -> bool:
        """Whether groups have zero points of their own."""
        return self.zero == "stored"

    @property
    def precision(self) -> float:
        """What orders versions: bits of a code on average; a trellis' are worth 0.4 more (docs/design/quantiser.md)."""
        return self.bits + self.by_matrix / 3 + 0.4 * self.trellis

    def at(self, matrix: int) -> Version:
        """The version of one matrix of an expert, by its index: this one, unless matrices differ in bits."""
        return self

    @abstractmethod
    def parts(self, matrix: Matrix) -> Iterable[Part]:
        """The sections of one matrix in memory, in order."""

    def sections(self, matrices: Iterable[Matrix]) -> tuple[Section, ...]:
        """The places of all sections in memory: the same for every expert of a layer, so an extent needs no header."""
        out: list[Section] = []
        at = 0
        for i, matrix in enumerate(matrices):
            for n, (kind, shape, item) in enumerate(self.at(i).parts(matrix)):
                out.append(Section(i, kind, at if n else align(at, self.matrix_boundary), shape, item))
                at = align(out[-1].end, SECTION)
        return tuple(out)

    def resident_size(self, matrices: Iterable[Matrix]) -> int:
        """Bytes of an extent in memory."""
        return align(self.sections(matrices)[-1].end, self.extent_boundary)

    def stored_sizes(self, matrices: Sequence[Matrix]) -> tuple[int, int] | None:
        """Bytes of an extent in its file, and of its payload, which is the extent without padding.

        None where they depend on the values. By default an extent is stored as it is in memory.
        """
        return self.resident_size(matrices), sum(s.size for s in self.sections(matrices))

    @abstractmethod
    def encode(
        self, matrices: Sequence[Matrix], values: Sequence[Stored], threads: int | None = None
    ) -> tuple[Buffer, int]:
        """The extent of an expert, padding included, and its payload in bytes.

        `values` has one entry a matrix, of the type that `decode` returns. `threads` defaults to all cores.
        """

    @abstractmethod
    def decode(self, matrices: Sequence[Matrix], extent: Buffer) -> Sequence[Stored]:
        """The matrices of a stored extent, each with `bias`: BF16 bits [rows] or None.

        Raises CodecError where the extent is not well formed.
        """

    @abstractmethod
    def dequantise(self, value: Stored) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
        """The reference for every kernel: the weights [rows, cols] of a matrix that `decode` gave, as stored.

        Values are exact: float32, or the bits of BF16 (uint16) where BF16 holds them.
        """

    def restore(
        self,
        matrices: Sequence[Matrix],
        extent: Buffer,
        out: Buffer,
        threads: int | None = None,
        before: Callable[[int], None] = lambda matrix: None,
    ) -> None:
        """Write a stored extent to `out` in its form in memory. `before` gets each matrix's index before it is decoded.

        Raises CodecError where the extent is not well formed.
        """
        out[: len(extent)] = extent

    @abstractmethod
    def check(self, matrices: Sequence[Matrix], extent: Buffer) -> Iterator[tuple[Kind, str]]:
        """Yield the format's rules that a stored extent of the right size breaks.

        Raises CodecError where the extent is not well formed.
        """

    def payload(self, matrices: Sequence[Matrix], extent: Buffer) -> int:
        """The payload of a stored extent that passes `check`, in bytes."""
        sizes = self.stored_sizes(matrices)
        assert sizes is not None
        return sizes[1]


@dataclass(frozen=True, eq=False)
class EntropyCoded(Version):
    """A version whose stored size depends on the values."""

    entropy_coded = True
    coder: ClassVar[str]  # the module of codec/ that codes it

    def stored_sizes(self, matrices: Sequence[Matrix]) -> None:
        """Return None: the sizes depend on the values."""

    def encode(
        self, matrices: Sequence[Matrix], values: Sequence[Stored], threads: int | None = None
    ) -> tuple[Buffer, int]:
        """See Version."""
        return codec(self.coder).encode_coded(matrices, self, values, threads)  # type: ignore[no-any-return]

    def decode(self, matrices: Sequence[Matrix], extent: Buffer) -> Sequence[Stored]:
        """See Version. Biases are views of the extent, or of a copy."""
        return codec(self.coder).decode_coded(matrices, self, extent)  # type: ignore[no-any-return]

    def restore(
        self,
        matrices: Sequence[Matrix],
        extent: Buffer,
        out: Buffer,
        threads: int | None = None,
        before: Callable[[int], None] = lambda matrix: None,
    ) -> None:
        """See Version. Bytes between sections stay as they are: nothing reads them."""
        codec(self.coder).restore_coded(matrices, self, extent, out, threads, before)

    def payload(self, matrices: Sequence[Matrix], extent: Buffer) -> int:
        """See Version."""
        return int(codec("lossless").payload(len(matrices), extent))


KNOWN: tuple[Version, ...] = ()  # from the most to the least precise; without group sizes


def codec(name: str) -> ModuleType:
    """Import a module of codec/ when it is first needed, so that naming a version needs no NumPy."""
    return importlib.import_module(f"moepack.pack.codec.{name}")


def version_names(dense: bool = False) -> tuple[str, ...]:
    """The versions' names, from the most to the least precise. With `dense`, those that a dense matrix may have."""
    return tuple(e.name for e in KNOWN if not (dense and (e.by_matrix or e.trellis)))


def encoding_of(name: str) -> Version:
    """The entry of KNOWN with this name. Raises ValueError, which lists the known names, for an unknown name."""
    for entry in KNOWN:
        if entry.name == name:
            return entry
    raise ValueError(f"version {name!r} is unknown: there are {', '.join(version_names())}")


def lossless(versions: Iterable[Version]) -> Version | None:
    """The version among these that holds the checkpoint's bits; None without one."""
    return next((v for v in versions if v.holds), None)


def lossy(versions: Iterable[Version]) -> tuple[Version, ...]:
    """The versions among these that quantisers make, in order."""
    return tuple(v for v in versions if not v.holds)
