"""The kernels' table of encodings, and the forms and handles that kernels read. Pure arithmetic.

A form gives the byte offsets of a matrix's parts (codes, scales, zero points, bias) in an extent. A handle is a 64-bit
number: an extent's address, with the version's number in the low bits. So one store publishes another version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.spec import Matrix, Version, encoding_of, version_names

if TYPE_CHECKING:
    from torch import Tensor

SLICE = 32 << 20  # bytes of a dense matrix's weights that are made at a time, in BF16, for products of many tokens
UNPACKED = 16  # rows of a packed matrix that are unpacked together
ZEROS = {"midpoint": 0, "stored": 1, "symmetric": 2}  # the zero points of codes, as kernels know them
SMALL = 32  # is added to an encoding's number where scales have a byte
VERSION_BITS = 6  # low bits of a handle: 0 in the address, because extents begin on a multiple of 64


@dataclass(frozen=True, slots=True)
class Kernel:
    """An encoding's CPU limits: the most tokens for which an expert runs straight from its bytes."""

    float32: int = 0  # with activations in float32
    bfloat16: int = 0
    beside_amx: int = 0  # in bfloat16, if AMX runs experts with more tokens
    integers: bool = True  # whether BF16 activations are multiplied as integers; else as floats
    compiled: bool = True  # whether C and Triton have a case for the encoding; else torch dequantises the layer, slowly


# By `Version.kernel`, a number that C and Triton know too. Limits were measured on one AVX-512 core: against torch's
# product, and for `beside_amx` against AMX tiles. Those of FP8 and FP4 codes on a Sapphire Rapids: in float32 torch's
# product overtakes FP8 at 4 tokens, and AMX tiles, for which FP8 is unpacked as numbers, overtake it only at 48.
# Those of trellis codes in float32 on a Zen 3 with AVX2; in bfloat16 they are w3's.
KERNELS = {
    30: Kernel(4, 12, 2),  # t2d3
    29: Kernel(4, 12, 2),  # t3
    28: Kernel(4, 12, 2),  # t2
    27: Kernel(128, 12, 2),  # w4d5: forms name the bits of each matrix; w3's limits, whose codes have two planes, too
    26: Kernel(128, 12, 2),  # w3d4: of 3 and 4 the lower
    25: Kernel(128, 12, 2),  # w2d3
    24: Kernel(128, 24, 2),  # w1d2
    16: Kernel(64, 4, 4, integers=False),
    23: Kernel(128, 24, 4),  # as 8 and 4, but with FP16 scales
    22: Kernel(128, 16, 4),
    21: Kernel(2, 16, 32, integers=False),  # FP8 with a scale for each row; 20: for each group of 16 rows' columns
    20: Kernel(2, 16, 32, integers=False),
    19: Kernel(2, 16, 32, integers=False),  # MXFP8
    18: Kernel(64, 16, 4),  # NVFP4
    17: Kernel(64, 16, 4),  # MXFP4
    8: Kernel(128, 24, 4),
    4: Kernel(128, 16, 4),
    3: Kernel(128, 12, 2),
    2: Kernel(128, 24, 2),
    1: Kernel(128, 24, 4),
}


def whole_blocks(*rows: int) -> bool:
    """Whether the kernels read each of several parts of a packed matrix apart, of so many rows."""
    return not any(n % UNPACKED for n in rows)


def kernel_of(name: str) -> Kernel:
    """Return the entry of KERNELS for an encoding's name.

    Raises InputError for an encoding without an entry.
    """
    encoding = encoding_of(name)
    if encoding.kernel not in KERNELS:
        known = ", ".join(n for n in version_names() if encoding_of(n).kernel in KERNELS)
        raise InputError(f"no kernel knows the encoding {name}: the kernels know {known}")
    return KERNELS[encoding.kernel]


def compiled(versions: Iterable[Version]) -> bool:
    """Whether C and Triton have a case for every one of these versions."""
    return all(kernel_of(v.name).compiled for v in versions)


def compiled_names() -> tuple[str, ...]:
    """The names of all encodings for which C and Triton have a case."""
    return tuple(n for n in version_names() if (k := KERNELS.get(encoding_of(n).kernel)) and k.compiled)


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of one matrix in one version: byte offsets into an extent; a `bias` or `outer` of -1 means none.

    In a plain version the BF16 matrix [rows, cols] begins at `low`, row-major. `bits` is the encoding's number in
    KERNELS, and SMALL more where scales have a byte; `zeros` is one of ZEROS. The kernels read all fields but the name,
    in this order.
    """

    name: str
    bits: int
    group: int
    zeros: int
    low: int
    high: int
    scale: int
    zero: int
    bias: int
    outer: int = -1

    def row(self) -> tuple[int, ...]:
        """The fields that kernels read, in their order."""
        return astuple(self)[1:]


def make_forms(matrices: Sequence[Matrix], version: Version) -> tuple[Form, ...]:
    """The forms of all matrices of an expert in one version. Raises InputError if `kernel_of` does."""
    at: list[dict[str, int]] = [{} for _ in matrices]
    for s in version.sections(matrices):
        at[s.matrix][s.kind] = s.offset
    return tuple(form_at(version, i, of) for i, of in enumerate(at))


def form_at(version: Version, matrix: int, of: Mapping[str, int]) -> Form:
    """The form of an expert's matrix whose sections are at these offsets. Raises InputError if `kernel_of` does."""
    kernel_of(version.name)
    own = version.at(matrix)
    return Form(
        version.name,
        own.kernel + SMALL * (own.scale_bits == 8),
        version.group_size,
        ZEROS.get(own.zero, 0),
        of.get("weight", of.get("plane0", 0)),
        of.get("plane1", 0),
        of.get("scale", 0),
        of.get("zero", 0),
        of.get("bias", -1),
        of.get("outer", -1),
    )


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation of rows by their root mean square."""

    weight: Tensor  # [cols]: of a head, or of all heads at once
    form: int  # where results are rounded: 0 before the weight, 1 after it; 2 multiplies by 1 + weight in float32
    epsilon: float


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router makes experts and gates of logits [tokens, experts].

    Of equal scores a GPU takes the lower expert first, a CPU the one that torch's `topk` takes.
    """

    top_k: int
    scores: str = "softmax"  # "softmax" of all logits, "sigmoid", or "top": softmax of the chosen logits alone
    normed: bool = False  # whether a token's gates are divided by their sum
    scale: float = 1.0  # a factor of gates
    biased: bool = False  # whether a bias [experts], float32, is added to scores for the choice alone
    # Groups of experts, of which `kept` are chosen by their greatest score ("max") or the sum of their two greatest
    # ("two"). Other groups' experts come last; their gates are 0 with "max" (DeepSeek-V2), and their own with "two".
    groups: int = 1
    kept: int = 1
    by: str = "max"
    ordered: bool = True  # whether a token's experts come in the order of their scores; a GPU orders them always


def slice_rows(rows: int, cols: int) -> int:
    """The rows of a slice of a dense matrix: a multiple of 16, or all."""
    return min(rows, max(1, SLICE // (32 * cols)) * 16)


def slice_bytes(rows: int, cols: int, tokens: int) -> int:
    """Return the GPU bytes that a product allocates, without the packed matrix, its BF16 activations and its result."""
    some = slice_rows(rows, cols)
    return 2 * some * cols + (2 * some * tokens if some < rows else 0)


def handle(address: int, version: int) -> int:
    """The handle of an extent at `address`; `version` is the number of its version in the layer.

    Raises ValueError when the low bits of the address are not 0, or the number does not fit into them.
    """
    if address % (1 << VERSION_BITS) or not 0 <= version < 1 << VERSION_BITS:
        raise ValueError(f"an extent begins on a multiple of 64 and has a version below 64, not {address}, {version}")
    return address | version
