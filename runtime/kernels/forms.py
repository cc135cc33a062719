"""What a kernel is told of a layer: where each part of a matrix begins in an extent of each version; handles.

KERNELS is what the kernels know of each encoding: one that is not in it is refused here, by name. The rest is pure
arithmetic over `pack.spec`, plus the layout of a lossless expert once decoded: its own matter, for it is never a file.
A handle is one 64-bit number, the extent's address with the version's number below it, so that publishing another
version of an expert is one store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moepack.pack.errors import InputError
from moepack.pack.spec import LOSSLESS, PAGE, SECTION, Matrix, Version, affine_extent_size, affine_sections, align

VERSION_BITS = 6  # extents begin on a multiple of 64, so the address leaves these free
FIELDS = ("bits", "group", "stored", "low", "high", "scale", "zero", "bias")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernels know of one encoding.

    Attributes:
        number: by which C (c/gemm.h) and Triton know it: the bits of a code, 16 for BF16 weights.
        float32, bfloat16: tokens up to which an expert runs straight from its bytes, by the dtype of activations.
        beside_amx: the same of bfloat16 where AMX runs the others.
    """

    number: int
    float32: int
    bfloat16: int
    beside_amx: int


# Limits measured on one AVX-512 core: of BF16 beside torch, and beside AMX tiles.
KERNELS = {
    LOSSLESS: Kernel(16, 64, 4, 4),
    "w8": Kernel(8, 128, 24, 4),
    "w4": Kernel(4, 128, 16, 4),
    "w3": Kernel(3, 128, 12, 2),
    "w2": Kernel(2, 128, 24, 2),
    "w1": Kernel(1, 128, 24, 4),
}


def kernel_of(name: str) -> Kernel:
    """The entry of KERNELS of an encoding's name.

    Raises:
        InputError: for an encoding that the kernels do not know, with those they do.
    """
    if name not in KERNELS:
        raise InputError(f"no kernel knows the encoding {name}: the kernels know {', '.join(KERNELS)}")
    return KERNELS[name]


@dataclass(frozen=True, slots=True)
class Form:
    """One matrix in one version: byte offsets into an extent, as the kernels read them; -1 where there is no bias.

    Of the lossless version `low` is where the BF16 matrix [rows, cols] begins, row-major. `bits` is the encoding's
    number in KERNELS.
    """

    name: str
    bits: int
    group: int
    stored: int
    low: int
    high: int
    scale: int
    zero: int
    bias: int

    def row(self) -> tuple[int, ...]:
        """The fields in the order in which kernels read them."""
        return tuple(getattr(self, name) for name in FIELDS)


def resident_size(matrices: Sequence[Matrix], version: Version) -> int:
    """Bytes that an expert takes on its device: an extent as it is stored, or the lossless version decoded."""
    if not version.is_lossless:
        return affine_extent_size(tuple(matrices), version)
    return _decoded(matrices)[1]


def _decoded(matrices: Sequence[Matrix]) -> tuple[list[tuple[int, int]], int]:
    """Of a lossless expert once decoded: where each matrix and its bias begin, -1 without one; and its bytes.

    Matrices begin on pages of their own, so that each can be bound to memory, and given back, alone (paging/).
    """
    at, places = 0, []
    for m in matrices:
        weight = align(at, PAGE)
        at = align(weight + 2 * m.weights, SECTION)
        places.append((weight, at if m.bias else -1))
        at = align(at + 2 * m.rows, SECTION) if m.bias else at
    return places, at


def make_forms(matrices: Sequence[Matrix], version: Version) -> tuple[Form, ...]:
    """The form of every matrix of an expert in one version.

    Raises:
        InputError: for a version whose encoding the kernels do not know.
    """
    out, number = [], kernel_of(version.name).number
    if version.is_lossless:
        return tuple(Form(version.name, number, 0, 0, at, 0, 0, 0, bias) for at, bias in _decoded(matrices)[0])
    by_matrix: list[dict[str, int]] = [{} for _ in matrices]
    for s in affine_sections(tuple(matrices), version):
        by_matrix[s.matrix][s.kind] = s.offset
    for at_of in by_matrix:
        out.append(
            Form(
                version.name,
                number,
                version.group_size,
                int(version.stores_zeros),
                at_of["plane0"],
                at_of.get("plane1", 0),
                at_of["scale"],
                at_of.get("zero", 0),
                at_of.get("bias", -1),
            )
        )
    return tuple(out)


def handle(address: int, version: int) -> int:
    """The entry of a handle table for an extent at `address` in the layer's version number `version`.

    Raises:
        ValueError: when the address does not leave the low bits free, or the number does not fit them.
    """
    if address % (1 << VERSION_BITS) or not 0 <= version < 1 << VERSION_BITS:
        raise ValueError(f"an extent begins on a multiple of 64 and has a version below 64, not {address}, {version}")
    return address | version
