"""Experts' products on a CPU by affine.c and its company, compiled when installed; OSError where they could not be.

Called through ctypes, which releases the GIL. Tensors must live on the CPU and be contiguous; addresses and sizes are
the caller's word. Work runs on torch's own OpenMP threads where they are GNU's, else on threads that the library keeps:
two sets of threads on the same cores would wait for one another.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack import isa
from moepack.pack.errors import CodecError
from moepack.pack.spec import Matrix, Version

from .forms import Form, kernel_of, make_forms

# One name for all Python versions that installing may have built it for; OSError where there is none.
_path = Path(__file__).with_name(f"_affine{sysconfig.get_config_var('EXT_SUFFIX')}")
_library = ctypes.CDLL(str(_path))
_word, _pointer = ctypes.c_int64, ctypes.c_void_p
LEVELS = isa.LEVELS
HERE = int(_library.moepack_affine_level(len(LEVELS) - 1))  # the most that this machine has
BEST = isa.bound(HERE)
DTYPES = (torch.float32, torch.bfloat16)
level = 0  # what `use_level` took


class _Gemm(ctypes.Structure):
    _fields_ = [
        *((name, _word) for name in ("rows", "cols", "experts", "versions", "slots", "share")),
        *((name, _word) for name in ("x_bf16", "out_bf16", "tiles", "threads")),
        *((name, _pointer) for name in ("x", "index", "out", "handles", "forms", "limits", "coded", "decode")),
        ("tile", _word),
        ("report", _pointer),
    ]


class _Unpack(ctypes.Structure):
    _fields_ = [
        *((name, _word) for name in ("cols", "first", "last", "ld", "out_bf16", "threads")),
        *((name, _pointer) for name in ("base", "form", "out")),
    ]


class _Combine(ctypes.Structure):
    _fields_ = [
        *(
            (name, _word)
            for name in ("tokens", "top_k", "cols", "experts", "from_bf16", "out_bf16", "round", "threads")
        ),
        *((name, _pointer) for name in ("source", "index", "gates", "out")),
    ]


def use_level(limit: int = BEST) -> int:
    """Let the library use instruction sets up to `limit`, an index into LEVELS; returns the one it took.

    Without a limit, and at the most, the best there is, or what MOEPACK_ISA asks for.
    """
    global level
    level = int(_library.moepack_affine_level(min(limit, BEST)))
    return level


def build() -> str:
    """Tells this build of the library from others: when its file was written, and its size."""
    facts = _path.stat()
    return f"{facts.st_mtime_ns:x}-{facts.st_size:x}"


def levels() -> tuple[str, ...]:
    """The levels that this machine has, lowest first: what MOEPACK_ISA may be here."""
    return LEVELS[: HERE + 1]


def use_openmp(wanted: bool = True) -> bool:
    """Run on the GNU OpenMP threads that this process already has; returns whether there are any."""
    start = None
    if wanted:
        try:
            maps = Path("/proc/self/maps").read_text().splitlines()
            loaded = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}
            start = getattr(ctypes.CDLL(min(loaded)), "GOMP_parallel", None) if len(loaded) == 1 else None
        except OSError:
            start = None
    _library.moepack_affine_threads(ctypes.cast(start, _pointer) if start is not None else None)
    return start is not None


class _Attend(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("q", "k", "v", "out")),
        *((name, _word) for name in ("batch", "groups", "heads", "length", "cols", "out_cols")),
        *((name, _word) for name in ("q_batch", "q_head")),
        *((name, _word) for name in ("k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row")),
        ("scale", ctypes.c_float),
        ("room", _pointer),
    ]


class _Dense(ctypes.Structure):
    _fields_ = [
        ("rows", _word), *((name, _pointer) for name in ("base", "form", "bias")), ("most", _word * 2),
    ]  # fmt: skip


_library.moepack_affine_dense.argtypes = [_pointer, _word, _word, _pointer, _pointer, *[_word] * 4]
_library.moepack_affine_dense_kept.restype = _word
_library.moepack_affine_threads.argtypes = [_pointer]
_library.moepack_affine_threads.restype = None
_norm = _library.moepack_affine_norm
_norm.argtypes = [_pointer] * 3 + [_word] * 3 + [ctypes.c_double]
_norm.restype = None
_library.moepack_affine_kept.restype = _library.moepack_affine_holds.restype = _word
_library.moepack_affine_release.restype = None
use_level()
openmp = use_openmp()


class Coded:
    """Matrices of a product that are to be decoded into their place first, and what came of it.

    Attributes:
        opened: uint64 [experts], what exponent_native.Opened has the address of, or 0 for one that is there.
        seconds: that threads spent on decoding, added up.
    """

    def __init__(self, experts: int) -> None:
        self.opened = np.zeros(experts, np.uint64)
        self._report = np.zeros(3, np.int64)

    @property
    def seconds(self) -> float:
        """That threads spent on decoding, added up."""
        return float(self._report[2]) / 1e9

    def bad(self) -> tuple[int, int]:
        """The expert whose bytes are not a coded matrix, and what decoding said."""
        return int(self._report[0]) - 1, int(self._report[1])

    def hand(self, gemm: _Gemm) -> None:
        """Let a product find them."""
        from moepack.pack import exponent_native

        gemm.coded, gemm.report = self.opened.ctypes.data, self._report.ctypes.data
        gemm.decode, gemm.tile = exponent_native.part_address(), exponent_native.TILE


class BadCodes(CodecError):
    """A matrix that was to be decoded is not well formed.

    Attributes:
        expert: whose it is.
    """

    def __init__(self, expert: int, status: int) -> None:
        self.expert = expert
        super().__init__(f"tile {status // 8}: bad codes")


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether experts with many tokens of that dtype run in tiles here: BF16, and a processor that multiplies it."""
    return dtype == torch.bfloat16 and level >= LEVELS.index("avx512-bf16")


class LayerForms:
    """The matrices of a layer's experts in all versions that the layer may use: what kernels read beside handles.

    Attributes:
        matrices: the experts' matrices.
        numbers: each version's number in a handle.
        unlimited: the `limits` of a product that leaves no expert out.
    """

    def __init__(self, matrices: Sequence[Matrix], versions: Sequence[Version]) -> None:
        self.matrices = tuple(matrices)
        self.numbers = {v.name: i for i, v in enumerate(versions)}
        forms = [make_forms(self.matrices, v) for v in versions]
        self.unlimited = np.full(len(versions), 1 << 62, np.int64)
        self._rows = [np.array([f[i].row() for f in forms], np.int64) for i in range(len(self.matrices))]
        self._at = [(int(rows.ctypes.data), rows.strides[0]) for rows in self._rows]

    def address(self, matrix: int, version: int = 0) -> int:
        """Where the forms of one matrix begin, at that of a version."""
        first, each = self._at[matrix]
        return first + version * each

    def unknown(self, matrix: int, version: int) -> ValueError:
        """What to raise where the library has no kernel for a version's form of a matrix."""
        names = list(self.numbers)
        if version >= len(names):
            return ValueError(f"a handle has version number {version}: this layer has {', '.join(names)}")
        bits, group = (int(n) for n in self._rows[matrix][version, :2])
        form = f"number {bits}, groups of {group}"
        return ValueError(f"{names[version]}: the compiled kernels do not know its encoding ({form})")


def product(
    forms: LayerForms,
    matrix: int,
    handles: npt.NDArray[np.uint64],
    x: Tensor,
    index: Tensor,
    out: Tensor,
    limits: npt.NDArray[np.int64] | None = None,
    threads: int | None = None,
    coded: Coded | None = None,
) -> None:
    """y = W x + b of every slot: out[s] is the product of expert index[s] and x[s // (slots / activations)].

    Args:
        forms: the layer's.
        matrix: which of an expert's matrices.
        handles: the handle table, uint64 [experts].
        x: float32 or bfloat16 [activations, cols]; slots are a multiple of activations.
        index: int64 [slots] or [activations, slots / activations]; an expert past the last is left out.
        out: float32 or bfloat16 [slots, rows]; rows of slots that are left out are not written.
        limits: int64 [versions]: an expert with more slots than its version has there runs in tiles where `has_tiles`
            says so of x (of many slots, its weights are rounded to BF16 there), and is left out where not.
        threads: how many; torch's number without it.
        coded: BF16 matrices that are decoded to where their handles point before they are multiplied by.

    Raises:
        BadCodes: for one of `coded` that is not well formed; `out` is then partly written.
        ValueError: for tensors of other shapes or dtypes, or that are not contiguous; for a form that the library does
            not know, before anything is written.
        MemoryError: when there is no room for activations.
    """
    m = forms.matrices[matrix]
    slots, rows = index.numel(), x.shape[0]
    if x.shape[-1] != m.cols or out.shape != (slots, m.rows) or not slots or slots % max(1, rows):
        raise ValueError(f"{m.name}: x {tuple(x.shape)}, out {tuple(out.shape)} and {slots} slots do not fit")
    if x.dtype not in DTYPES or out.dtype not in DTYPES or index.dtype != torch.int64 or handles.dtype != np.uint64:
        raise ValueError(f"{m.name}: x {x.dtype}, out {out.dtype}, index {index.dtype}")
    if not (x.is_contiguous() and out.is_contiguous() and index.is_contiguous() and handles.flags.c_contiguous):
        raise ValueError(f"{m.name}: a tensor is not contiguous")
    gemm = _Gemm(
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
    if coded is not None:
        coded.hand(gemm)
    failed = int(_library.moepack_affine_product(ctypes.byref(gemm)))
    if failed < 0:
        assert coded is not None
        raise BadCodes(*coded.bad())
    if failed == 1:
        raise MemoryError(f"no memory for {rows} activations")
    if failed:
        raise forms.unknown(matrix, failed - 2)


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """One matrix that `dense` multiplies by, on the CPU.

    Attributes:
        form: where its parts begin in `data`, as `forms.make_forms` says of an extent; `plain_form` of a BF16 matrix.
        rows, cols: its shape.
        data: uint8, the whole extent; or bfloat16 [rows, cols]. Contiguous.
        bias: bfloat16 [rows], of a matrix whose form has none; an extent's own bias needs no mention.
    """

    form: Form
    rows: int
    cols: int
    data: Tensor
    bias: Tensor | None = None


def plain_form() -> Form:
    """The form of a BF16 matrix [rows, cols] as it is."""
    return Form("bf16", kernel_of("bf16").number, 0, 0, 0, 0, 0, 0, -1)


class Dense:
    """Matrices that share an input, for `dense`: addresses and forms, written down once.

    Attributes:
        matrices: in the order of the results.
        limits: tokens up to which each matrix is read straight from its bytes, by dtype of the input.
        cols: of every matrix.
    """

    def __init__(self, matrices: Sequence[DenseMatrix], limits: dict[torch.dtype, Sequence[int]] | None = None) -> None:
        """Limits that are not given are those of the table in forms.py; backends.dense_limits measures them.

        Raises:
            ValueError: for matrices of different columns, of none, or tensors that are not as DenseMatrix says.
        """
        self.matrices, self.cols = tuple(matrices), matrices[0].cols if matrices else 0
        kernels = [kernel_of(m.form.name) for m in matrices]
        floats, shorts = [k.float32 for k in kernels], [k.bfloat16 for k in kernels]
        self.limits = {torch.float32: floats, torch.bfloat16: shorts, **(limits or {})}
        for m in matrices:
            plain = m.form.bits == kernel_of("bf16").number
            fits = m.data.dtype == torch.bfloat16 and m.data.shape == (m.rows, m.cols) if plain else m.data.ndim == 1
            alike = m.data.is_contiguous() and m.data.device.type == "cpu" and m.cols == self.cols
            if m.bias is not None:
                fits = fits and m.bias.dtype == torch.bfloat16 and m.bias.shape == (m.rows,) and m.bias.is_contiguous()
            if not (fits and alike):
                raise ValueError(
                    f"{m.form.name} [{m.rows}, {m.cols}]: {m.data.dtype} {tuple(m.data.shape)} does not fit"
                )
        if not matrices:
            raise ValueError("no matrices")
        self._forms = np.array([m.form.row() for m in matrices], np.int64)
        at, each = self._forms.ctypes.data, self._forms.strides[0]
        self._call = (_Dense * len(matrices))(
            *(
                _Dense(
                    m.rows,
                    m.data.data_ptr(),
                    at + i * each,
                    _bias_address(m),
                    (self.limits[DTYPES[0]][i], self.limits[DTYPES[1]][i]),
                )
                for i, m in enumerate(self.matrices)
            )
        )
        self._rows = [m.rows for m in matrices]
        self._all = sum(self._rows)
        self._parts = [(r, sum(self._rows[:i])) for i, r in enumerate(self._rows)]
        self._at, self._count = ctypes.addressof(self._call), len(matrices)

    def unpack(self, number: int, out: Tensor, first: int, threads: int) -> None:
        """As `unpack` below, of one of the matrices."""
        m = self.matrices[number]
        call = _Unpack(
            m.cols, first, first + out.shape[1], out.shape[1], out.dtype == torch.bfloat16, threads,
            m.data.data_ptr(), self._forms.ctypes.data + number * self._forms.strides[0], out.data_ptr(),
        )  # fmt: skip
        if _library.moepack_affine_unpack(ctypes.byref(call)):
            raise self.unknown(number)

    def unknown(self, number: int) -> ValueError:
        """What to raise where the library has no kernel for a matrix's form."""
        f = self.matrices[number].form
        return ValueError(
            f"{f.name}: the compiled kernels do not know its encoding (number {f.bits}, groups of {f.group})"
        )


def _bias_address(m: DenseMatrix) -> int | None:
    if m.bias is not None:
        return m.bias.data_ptr()
    return m.data.data_ptr() + m.form.bias if m.form.bias >= 0 else None


def dense(of: Dense, x: Tensor, threads: int | None = None) -> tuple[Tensor, ...]:
    """y = W x + b for each of several matrices, in one call: few tokens straight from their bytes, many in tiles.

    Results have the same bits on however many threads, and beside whatever matrices. Where tokens are many and this
    processor has no tiles for them, torch multiplies by unpacked weights.

    Args:
        of: the matrices.
        x: float32 or bfloat16 [..., cols].
        threads: how many; torch's number without it.

    Returns:
        [..., rows] for each matrix, in x's dtype, contiguous; parts of one tensor.

    Raises:
        ValueError: for an x of another dtype or number of columns; for a form that the library does not know, before
            anything is computed.
        MemoryError: when there is no room for activations.
    """
    cols = of.cols
    if x.shape[-1] != cols or x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: these matrices take float32 or bfloat16 [..., {cols}]")
    x = x if x.is_contiguous() else x.contiguous()
    lead = x.shape[:-1]
    tokens = x.numel() // cols
    made = x.new_empty(tokens * of._all)
    if tokens == 1:  # splitting and viewing would take longer than a small product
        ones = len(lead)
        outs = tuple([made.as_strided((*lead, r), (*(r,) * ones, 1), at) for r, at in of._parts])
    else:
        outs = tuple(
            [p.view(*lead, r) for p, r in zip(made.split([tokens * r for r in of._rows]), of._rows, strict=True)]
        )
    threads = threads or torch.get_num_threads()
    bf16, tiles = x.dtype is torch.bfloat16, has_tiles(x.dtype)
    if tokens:
        failed = _library.moepack_affine_dense(
            of._at, of._count, cols, x.data_ptr(), made.data_ptr(), tokens, bf16, tiles, threads
        )
        if failed == 1:
            raise MemoryError(f"no memory for {tokens} activations")
        if failed:
            raise of.unknown(failed - 2)
    if not tiles and tokens > 1:
        for i, (out, most) in enumerate(zip(outs, of.limits[x.dtype], strict=True)):
            if tokens > most:
                _dense_by_torch(of, i, x.view(tokens, cols), out.view(tokens, -1), threads)
    return outs


_SLICE = 256  # rows unpacked for torch at a time: what stays in a core's second-level cache


def _dense_by_torch(of: Dense, number: int, x: Tensor, out: Tensor, threads: int) -> None:
    m = of.matrices[number]
    bias = m.bias
    if bias is None and m.form.bias >= 0:
        bias = m.data[m.form.bias : m.form.bias + 2 * m.rows].view(torch.bfloat16)
    for first in range(0, m.rows, _SLICE):
        last = min(first + _SLICE, m.rows)
        if m.data.dtype == torch.bfloat16:
            made = torch.nn.functional.linear(x, m.data[first:last].to(x.dtype))
        else:
            tile = torch.empty(m.cols, -(-(last - first) // 16) * 16, dtype=x.dtype)
            of.unpack(number, tile, first, threads)
            made = torch.mm(x, tile[:, : last - first])
        out[:, first:last] = made if bias is None else made.add_(bias[first:last].to(x.dtype))


def dense_kept_bytes(shapes: Sequence[tuple[int, int]], tokens: int, threads: int) -> int:
    """The most bytes that `dense` keeps between calls, for matrices of these [rows, cols]; the cols are equal."""
    units = sum(-(-rows // 64) for rows, _ in shapes)
    sizes = (len(shapes), units, shapes[0][1], tokens, threads)
    return int(_library.moepack_affine_dense_kept(*map(_word, sizes)))


def kept_bytes(m: Matrix, experts: int, slots: int, activations: int, most: int, threads: int) -> int:
    """The most bytes that products of these sizes keep between calls; the same for all versions, limits and levels.

    Args:
        m: the matrix.
        experts: how many there are.
        slots, activations: of one product.
        most: slots that one expert can have.
        threads: on which products run.
    """
    gemm = _Gemm(rows=m.rows, cols=m.cols, experts=experts, slots=slots, share=slots // activations, threads=threads)
    return int(_library.moepack_affine_kept(ctypes.byref(gemm), _word(most)))


def holds() -> int:
    """Bytes that the library keeps between calls now."""
    return int(_library.moepack_affine_holds())


def release() -> None:
    """Give back what the library keeps between calls."""
    _library.moepack_affine_release()


def unpack(
    forms: LayerForms,
    matrix: int,
    version: int,
    extent: Tensor,
    out: Tensor,
    first: int = 0,
    threads: int | None = None,
) -> None:
    """Weights of an affine version, transposed: out[c, r] is that of row first + r and column c.

    Args:
        forms: the layer's.
        matrix: which of an expert's matrices.
        version: its number.
        extent: uint8, the whole extent.
        out: float32 or bfloat16 [cols, n], contiguous, n a multiple of 16; rows past the matrix come as zeros.
        first: a multiple of 16.
        threads: how many; torch's number without it.

    Raises:
        ValueError: for an `out` that does not fit, or a form that the library cannot unpack.
    """
    m = forms.matrices[matrix]
    last = first + out.shape[1]
    if first % 16 or last % 16 or last >= m.rows + 16 or len(out) != m.cols or not out.is_contiguous():
        raise ValueError(f"{m.name}: rows {first} to {last} do not fit {tuple(out.shape)}")
    if out.dtype not in DTYPES:
        raise ValueError(f"{m.name}: weights come in float32 or bfloat16, not {out.dtype}")
    call = _Unpack(
        m.cols,
        first,
        last,
        out.shape[1],
        out.dtype == torch.bfloat16,
        threads or torch.get_num_threads(),
        extent.data_ptr(),
        forms.address(matrix, version),
        out.data_ptr(),
    )
    if _library.moepack_affine_unpack(ctypes.byref(call)):
        raise forms.unknown(matrix, version)


def combine(y: Tensor, index: Tensor, gates: Tensor, experts: int, out: Tensor, threads: int | None = None) -> None:
    """out[t] = sum over a token's slots, in order and in float32, of gate times y; other ranks' experts add nothing.

    Where y and the gates are both bfloat16 a weighted row is rounded to it before it is added, as a model's own forward
    does: without that, tokens near two experts would go to the other than in the plain model.

    Args:
        y: float32 or bfloat16 [tokens * top_k, hidden].
        index: int64 [tokens, top_k].
        gates: float32 or bfloat16 [tokens, top_k].
        experts: how many there are; slots of an index past them are left out.
        out: float32 or bfloat16 [tokens, hidden].
        threads: how many; torch's number without it.
    """
    tokens, top_k = index.shape
    tensors = (y, index, gates, out)
    if y.shape != (tokens * top_k, out.shape[1]) or gates.shape != index.shape or len(out) != tokens:
        raise ValueError(f"y {tuple(y.shape)}, index {tuple(index.shape)} and out {tuple(out.shape)} do not fit")
    wide = gates.float()
    if gates.dtype not in DTYPES or y.dtype not in DTYPES or out.dtype not in DTYPES or index.dtype != torch.int64:
        raise ValueError(f"y {y.dtype}, index {index.dtype}, gates {gates.dtype}, out {out.dtype}")
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("a tensor is not contiguous")
    call = _Combine(
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
    _library.moepack_affine_combine(ctypes.byref(call))


def norm(x: Tensor, weight: Tensor, form: int, epsilon: ctypes.c_double) -> Tensor:
    """x [..., cols] over its root mean square by row, times weight [cols]; all BF16, contiguous, on the CPU.

    Args:
        x: the rows.
        weight: by column.
        form: 0: rounded before the weight; 1: after it; 2: the weight is 1 + weight, in float32.
        epsilon: added to the mean square.
    """
    out, cols = torch.empty_like(x), x.shape[-1]
    if weight.shape != (cols,):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit rows of {cols}")
    _norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // cols, cols, form, epsilon)
    return out


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, threads: int | None = None) -> Tensor:
    """Attention of one new token of each sequence, every key seen: softmax(scale * q k) v in float32.

    Args:
        query: bfloat16 [batch, heads, 1, cols].
        key: bfloat16 [batch, groups, length, cols]; heads are a multiple of groups, and follow one another in each.
        value: bfloat16 [batch, groups, length, out]. The last axes of all three are dense.
        scale: of the products.
        threads: how many; torch's number without it.

    Returns:
        bfloat16 [batch, 1, heads, out].

    Raises:
        ValueError: for tensors that are not so.
        MemoryError: when there is no room for scores.
    """
    batch, heads, _, cols = query.shape
    groups, length, out_cols = value.shape[1:]
    wrong = key.shape != (batch, groups, length, cols) or value.shape[0] != batch or query.shape[2] != 1 or not length
    if wrong or heads % groups or query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")
    out = query.new_empty(batch, 1, heads, out_cols)
    call = _Attend(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), batch, groups, heads // groups, length,
        cols, out_cols, query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3], scale,
    )  # fmt: skip
    if _library.moepack_affine_attend(ctypes.byref(call), _word(threads or torch.get_num_threads())):
        raise MemoryError(f"no memory for {length} scores of {heads} heads")
    return out


def read(addresses: npt.NDArray[np.uint64], size: int, threads: int | None = None) -> None:
    """Read `size` bytes at each address and do nothing with them: what benchmarks hold a kernel's time against."""
    count = threads or torch.get_num_threads()
    _library.moepack_affine_read(
        ctypes.c_void_p(addresses.ctypes.data), _word(len(addresses)), _word(size), _word(count)
    )
