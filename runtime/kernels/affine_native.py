"""Experts' products on a CPU by the compiled library in c/. The import raises OSError if the library was not compiled.

The library is called through ctypes, which releases the GIL. Tensors must be on the CPU and contiguous; the library
checks neither addresses nor sizes. Work runs on torch's OpenMP threads if they are GNU's, because two sets of threads
on the same cores would wait for one another; else on the library's own. `threads` defaults to torch's number.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack import isa
from moepack.pack.spec import Matrix, Version
from moepack.pack.trials import open_library

from .forms import Form, make_forms

# Installing builds it where there is a compiler (setup.py); OSError if the file is missing.
PATH = Path(__file__).with_name("_affine.so")
library = open_library(PATH, PATH.parent / "c")  # dense_native.py calls it too
WORD = ctypes.c_int64
POINTER = ctypes.c_void_p
LEVELS = isa.LEVELS
HERE = int(library.moepack_affine_level(len(LEVELS) - 1))  # the best level of this machine
BEST = isa.bound(HERE)  # the level to use; backends.py lowers it where the kernels do not stand their trial
DTYPES = (torch.float32, torch.bfloat16)
level = 0  # set by `use_level`


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of a C structure that are of one type, by their names in a row."""
    return [(name, kind) for name in names.split()]


class Gemm(ctypes.Structure):
    """A product of all experts, as c/gemm.h describes it."""

    _fields_ = [
        *fields(WORD, "rows cols experts versions slots share"),
        *fields(WORD, "x_bf16 out_bf16 tiles threads"),
        *fields(POINTER, "x index out handles forms limits"),
    ]


class _Unpack(ctypes.Structure):
    _fields_ = [
        *fields(WORD, "cols first last ld out_bf16 threads"),
        *fields(POINTER, "base form out"),
    ]


class Combine(ctypes.Structure):
    """The weighted sum of each token's experts, as c/gemm.h describes it."""

    _fields_ = [
        *fields(WORD, "tokens top_k cols experts from_bf16 out_bf16 round threads"),
        *fields(POINTER, "source index gates out"),
    ]


def use_level(limit: int = BEST) -> int:
    """Let the library use instruction sets up to `limit` and BEST, indices into LEVELS; return the level in use."""
    global level
    level = int(library.moepack_affine_level(min(limit, BEST)))
    return level


def build() -> str:
    """Identity of this build of the library: the time and size of its file."""
    facts = PATH.stat()
    return f"{facts.st_mtime_ns:x}-{facts.st_size:x}"


def levels() -> tuple[str, ...]:
    """The names of the instruction sets that this machine has, lowest first: the values for MOEPACK_ISA."""
    return LEVELS[: HERE + 1]


def use_openmp(wanted: bool = True) -> bool:
    """Run on the GNU OpenMP threads of this process if `wanted`; return whether it has any."""
    start = None
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines() if wanted else []
        loaded = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}
        start = getattr(ctypes.CDLL(min(loaded)), "GOMP_parallel", None) if len(loaded) == 1 else None
    library.moepack_affine_threads(ctypes.cast(start, POINTER) if start is not None else None)
    return start is not None


library.moepack_affine_threads.argtypes = [POINTER]
library.moepack_affine_threads.restype = None
library.moepack_affine_kept.restype = library.moepack_affine_holds.restype = WORD
library.moepack_affine_release.restype = None
use_level()
openmp = use_openmp()


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether experts with many tokens of this dtype run in tiles: BF16, on a processor that multiplies BF16."""
    return dtype == torch.bfloat16 and level >= LEVELS.index("avx512-bf16")


class LayerForms:
    """The forms (byte offsets) of a layer's matrices in all versions, which kernels read beside handles."""

    def __init__(self, matrices: Sequence[Matrix], versions: Sequence[Version]) -> None:
        self.matrices = tuple(matrices)
        self.numbers = {v.name: i for i, v in enumerate(versions)}  # a version's number in a handle
        self._forms = [make_forms(self.matrices, v) for v in versions]
        self.unlimited = np.full(len(versions), 1 << 62, np.int64)  # `limits` so high that they include every expert
        self._rows = [np.array([f[i].row() for f in self._forms], np.int64) for i in range(len(self.matrices))]
        self._at = [(int(rows.ctypes.data), rows.strides[0]) for rows in self._rows]

    def address(self, matrix: int, version: int = 0) -> int:
        """The address of one matrix's form in a version."""
        first, each = self._at[matrix]
        return first + version * each

    def unknown(self, matrix: int, version: int) -> ValueError:
        """Return the error for a version whose form of this matrix the library does not know."""
        if version >= len(self._forms):
            return ValueError(f"a handle has version number {version}: this layer has {', '.join(self.numbers)}")
        return unknown_form(self._forms[version][matrix])


def unknown_form(of: Form) -> ValueError:
    """Return the error for an encoding that the library does not know."""
    encoding = f"number {of.bits}, groups of {of.group}"
    return ValueError(f"{of.name}: the compiled kernels do not know its encoding ({encoding})")


def product(
    forms: LayerForms,
    matrix: int,
    handles: npt.NDArray[np.uint64],
    x: Tensor,
    index: Tensor,
    out: Tensor,
    limits: npt.NDArray[np.int64] | None = None,
    threads: int | None = None,
) -> None:
    """Compute out[s] = W x + b for every slot s, by expert index[s], of the activation x[s // (slots / activations)].

    Args:
        matrix: the number of the matrix in each expert.
        handles: the handle table, uint64 [experts].
        x: float32 or bfloat16 [activations, cols]; the number of slots is a multiple of the number of activations.
        index: int64 [slots] or [activations, slots / activations]; a slot whose index is past the last is skipped.
        out: float32 or bfloat16 [slots, rows]; rows of skipped slots are not written.
        limits: int64 [versions]. An expert with more slots than its version's limit runs in tiles if `has_tiles` holds
            for x's dtype (weights are rounded to BF16 if slots are many), and is skipped otherwise.

    Raises:
        ValueError: for tensors of other shapes or dtypes, or that are not contiguous; for a form that the library does
            not know, before anything is written.
        MemoryError: when memory for activations is short.
    """
    m = forms.matrices[matrix]
    slots = index.numel()
    rows = x.shape[0]
    if x.shape[-1] != m.cols or out.shape != (slots, m.rows) or not slots or slots % max(1, rows):
        raise ValueError(f"{m.name}: x {tuple(x.shape)}, out {tuple(out.shape)} and {slots} slots do not fit")
    if x.dtype not in DTYPES or out.dtype not in DTYPES or index.dtype != torch.int64 or handles.dtype != np.uint64:
        raise ValueError(f"{m.name}: x {x.dtype}, out {out.dtype}, index {index.dtype}")
    if not (x.is_contiguous() and out.is_contiguous() and index.is_contiguous() and handles.flags.c_contiguous):
        raise ValueError(f"{m.name}: a tensor is not contiguous")
    gemm = Gemm(
        m.rows,
        m.cols,
        len(handles),
        len(forms.numbers),
        slots,
        slots // rows,
        x.dtype == torch.bfloat16,
        out.dtype == torch.bfloat16,
        has_tiles(x.dtype),
        threads or torch.get_num_threads(),
        x.data_ptr(),
        index.data_ptr(),
        out.data_ptr(),
        handles.ctypes.data,
        forms.address(matrix),
        (forms.unlimited if limits is None else limits).ctypes.data,
    )
    failed = int(library.moepack_affine_product(ctypes.byref(gemm)))
    if failed == 1:
        raise MemoryError(f"no memory for {rows} activations")
    if failed:
        raise forms.unknown(matrix, failed - 2)


def kept_bytes(m: Matrix, experts: int, slots: int, activations: int, most: int, threads: int) -> int:
    """The most bytes that products of these sizes keep between calls, for any versions, limits and instruction sets.

    `most` is the greatest number of slots of one expert.
    """
    gemm = Gemm(rows=m.rows, cols=m.cols, experts=experts, slots=slots, share=slots // activations, threads=threads)
    return int(library.moepack_affine_kept(ctypes.byref(gemm), WORD(most)))


def holds() -> int:
    """Bytes of memory that the library keeps now for later calls."""
    return int(library.moepack_affine_holds())


def release() -> None:
    """Free the memory that the library keeps between calls."""
    library.moepack_affine_release()


def unpack(
    forms: LayerForms,
    matrix: int,
    version: int,
    extent: Tensor,
    out: Tensor,
    first: int = 0,
    threads: int | None = None,
) -> None:
    """Unpack weights of an affine (quantised) version, transposed: out[c, r] is the weight of row first + r, column c.

    Args:
        matrix, version: the numbers of the expert's matrix and version.
        extent: uint8, the whole extent.
        out: float32 or bfloat16 [cols, n], contiguous, n a multiple of 16; rows past the matrix's last become zeros.
        first: the first row, a multiple of 16.

    Raises ValueError for an `out` that does not fit, or a form that the library cannot unpack.
    """
    m = forms.matrices[matrix]
    last = first + out.shape[1]
    if first % 16 or last % 16 or last >= m.rows + 16 or len(out) != m.cols or not out.is_contiguous():
        raise ValueError(f"{m.name}: rows {first} to {last} do not fit {tuple(out.shape)}")
    if out.dtype not in DTYPES:
        raise ValueError(f"{m.name}: weights come in float32 or bfloat16, not {out.dtype}")
    if unpack_at(m.cols, extent, forms.address(matrix, version), out, first, threads):
        raise forms.unknown(matrix, version)


def unpack_at(cols: int, extent: Tensor, form: int, out: Tensor, first: int, threads: int | None) -> bool:
    """Unpack as `unpack` does, but by the address of a form and unchecked; return True if the library cannot."""
    call = _Unpack(
        cols,
        first,
        first + out.shape[1],
        out.shape[1],
        out.dtype == torch.bfloat16,
        threads or torch.get_num_threads(),
        extent.data_ptr(),
        form,
        out.data_ptr(),
    )
    return bool(library.moepack_affine_unpack(ctypes.byref(call)))


def combine(y: Tensor, index: Tensor, gates: Tensor, experts: int, out: Tensor, threads: int | None = None) -> None:
    """Add up gate times y over each token's slots, in order and in float32, into out[token].

    If y and the gates are both bfloat16, a weighted row is rounded to bfloat16 before it is added, as in a model's own
    forward. Without that rounding, a token with nearly equal router scores could choose other experts than there.

    Args:
        y: float32 or bfloat16 [tokens * top_k, hidden].
        index: int64 [tokens, top_k].
        gates: float32 or bfloat16 [tokens, top_k].
        experts: the number of experts; slots with an index past the last expert are skipped.
        out: float32 or bfloat16 [tokens, hidden].
    """
    tokens, top_k = index.shape
    if y.shape != (tokens * top_k, out.shape[1]) or gates.shape != index.shape or len(out) != tokens:
        raise ValueError(f"y {tuple(y.shape)}, index {tuple(index.shape)} and out {tuple(out.shape)} do not fit")
    wide = gates.float()
    if gates.dtype not in DTYPES or y.dtype not in DTYPES or out.dtype not in DTYPES or index.dtype != torch.int64:
        raise ValueError(f"y {y.dtype}, index {index.dtype}, gates {gates.dtype}, out {out.dtype}")
    if not all(t.is_contiguous() for t in (y, index, gates, out)):
        raise ValueError("a tensor is not contiguous")
    call = Combine(
        tokens,
        top_k,
        out.shape[1],
        experts,
        y.dtype == torch.bfloat16,
        out.dtype == torch.bfloat16,
        y.dtype == gates.dtype == torch.bfloat16,
        threads or torch.get_num_threads(),
        y.data_ptr(),
        index.data_ptr(),
        wide.data_ptr(),
        out.data_ptr(),
    )
    library.moepack_affine_combine(ctypes.byref(call))


def read(addresses: npt.NDArray[np.uint64], size: int, threads: int | None = None) -> None:
    """Read `size` bytes at each address: a lower bound of time to which benchmarks compare kernels."""
    count = threads or torch.get_num_threads()
    library.moepack_affine_read(ctypes.c_void_p(addresses.ctypes.data), WORD(len(addresses)), WORD(size), WORD(count))
