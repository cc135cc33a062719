"""Dense products, normalisations, and attention of one token on a CPU, by the library of affine_native.py."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moepack.pack.spec import LOSSLESS, Version

from .affine_native import DTYPES, POINTER, WORD, fields, has_tiles, library, unknown_form, unpack_at
from .by_torch import multiply, of_matrix, of_packed
from .forms import UNPACKED, Form, kernel_of, whole_blocks
from .kv_rows import PLAIN, ROTATED, CodedRows, rotated

PLAIN_FORM = Form(LOSSLESS, Version.of(LOSSLESS).kernel, 0, 0, 0, 0, 0, 0, -1)  # of a plain BF16 tensor [rows, cols]


class _Rows(ctypes.Structure):
    _fields_ = [("at", POINTER), *fields(WORD, "cols bits batch head token")]


class _Attend(ctypes.Structure):
    _fields_ = [
        *fields(_Rows, "q q2 k k2 v"),
        *fields(POINTER, "mask sinks out"),
        *fields(WORD, "batch groups heads tokens length causal"),
        ("mask_at", WORD * 2),
        ("scale", ctypes.c_float),
    ]


class _Heads(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "x matrix out"),
        *fields(WORD, "heads tokens in out_cols sums"),
        *fields(WORD * 2, "x_at out_at matrix_at"),
        ("base", POINTER),
        ("form", POINTER),
        ("first", WORD),
    ]


class _Index(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "q k weights out"),
        *fields(WORD, "tokens heads cols length row"),
    ]


class _Dense(ctypes.Structure):
    _fields_ = [
        ("rows", WORD),
        *fields(POINTER, "base form bias"),
        ("most", WORD * 2),
    ]


library.moepack_affine_dense.argtypes = [POINTER, WORD, WORD, POINTER, POINTER, *[WORD] * 4]
library.moepack_affine_dense_kept.restype = WORD
_norm = library.moepack_affine_norm
_norm.argtypes = [POINTER] * 3 + [WORD] * 3 + [ctypes.c_double]
_norm.restype = None


@dataclass(frozen=True, slots=True)
class KernelMatrix:
    """One matrix by which `dense` multiplies, on the CPU."""

    form: Form  # the matrix's byte offsets in `data`, from `forms.make_forms`; `PLAIN_FORM` for a BF16 matrix
    rows: int
    cols: int
    data: Tensor  # uint8, the whole extent; or bfloat16 [rows, cols]. Contiguous
    bias: Tensor | None = None  # bfloat16 [rows], for a matrix whose form has no bias


class MatrixGroup:
    """Matrices that share an input, for `dense`, which returns results in the same order."""

    def __init__(
        self, matrices: Sequence[KernelMatrix], limits: Mapping[torch.dtype, Sequence[int]] | None = None
    ) -> None:
        """Check the matrices. `limits`, by the input's dtype, are tokens up to which each runs from its packed bytes.

        Default limits are in forms.py. Raises ValueError without matrices, or for unequal columns or unfit tensors.
        """
        self.matrices = tuple(matrices)
        self.cols = matrices[0].cols if matrices else 0
        kernels = [kernel_of(m.form.name) for m in matrices]
        floats = [k.float32 for k in kernels]
        shorts = [k.bfloat16 for k in kernels]
        self.limits = {torch.float32: floats, torch.bfloat16: shorts, **(limits or {})}
        for m in matrices:
            plain = m.form.bits == PLAIN_FORM.bits
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
        at = self._forms.ctypes.data
        each = self._forms.strides[0]
        calls = [
            _Dense(m.rows, m.data.data_ptr(), at + i * each, _bias_address(m), tuple(self.limits[d][i] for d in DTYPES))
            for i, m in enumerate(self.matrices)
        ]
        self._call = (_Dense * len(matrices))(*calls)
        self._rows = [m.rows for m in matrices]
        self._all = sum(self._rows)
        self._parts = [(r, sum(self._rows[:i])) for i, r in enumerate(self._rows)]
        self.address = ctypes.addressof(self._call)  # of the C array

    def unpack(self, number: int, out: Tensor, first: int, threads: int) -> None:
        """Unpack weights of matrix `number` as `affine_native.unpack` does."""
        m = self.matrices[number]
        if out.dtype not in DTYPES:
            raise ValueError(f"weights are unpacked to float32 or bfloat16, not {out.dtype}")
        form: int = self._call[number].form
        if unpack_at(m.cols, m.data, form, out, first, threads):
            raise unknown_form(m.form)


def _bias_address(m: KernelMatrix) -> int | None:
    if m.bias is not None:
        return m.bias.data_ptr()
    return m.data.data_ptr() + m.form.bias if m.form.bias >= 0 else None


def dense(of: MatrixGroup, x: Tensor, threads: int | None = None) -> tuple[Tensor, ...]:
    """Return y = W x + b for each of several matrices: few tokens straight from packed bytes, many in tiles.

    x is float32 or bfloat16 [..., cols]. Results are [..., rows] in x's dtype, contiguous parts of one tensor. Their
    bits depend neither on the number of threads (default: torch's) nor on the other matrices. If the processor has no
    tiles for x's dtype, torch multiplies many tokens by unpacked weights.

    Raises:
        ValueError: for an x of another dtype or number of columns; for a form that the library does not know, before
            anything is computed.
        MemoryError: when memory for activations is short.
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
        parts = made.split([tokens * r for r in of._rows])
        outs = tuple([p.view(*lead, r) for p, r in zip(parts, of._rows, strict=True)])
    threads = threads or torch.get_num_threads()
    bf16 = x.dtype is torch.bfloat16
    tiles = has_tiles(x.dtype)
    if tokens:
        failed = library.moepack_affine_dense(
            of.address, len(of.matrices), cols, x.data_ptr(), made.data_ptr(), tokens, bf16, tiles, threads
        )
        if failed == 1:
            raise MemoryError(f"no memory for {tokens} activations")
        if failed:
            raise unknown_form(of.matrices[failed - 2].form)
    if not tiles and tokens > 1:
        for i, (out, most) in enumerate(zip(outs, of.limits[x.dtype], strict=True)):
            if tokens > most:
                dense_by_torch(of, i, x.view(tokens, cols), out.view(tokens, -1), threads)
    return outs


def dense_by_torch(of: MatrixGroup, number: int, x: Tensor, out: Tensor, threads: int) -> None:
    """Write y = W x + b for matrix `number` into out [tokens, rows], for x [tokens, cols] of its dtype, by torch."""
    m = of.matrices[number]
    bias = m.bias
    if bias is None and m.form.bias >= 0:
        bias = m.data[m.form.bias : m.form.bias + 2 * m.rows].view(torch.bfloat16)
    plain = m.data.dtype == torch.bfloat16
    packed = of_packed(m.cols, lambda tile, first: of.unpack(number, tile, first, threads))
    multiply(x, of_matrix(m.data) if plain else packed, out, bias)


def dense_kept_bytes(shapes: Sequence[tuple[int, int]], tokens: int, threads: int) -> int:
    """The most bytes that `dense` keeps between calls, for matrices of these (rows, cols) with equal cols."""
    units = sum(-(-rows // 64) for rows, _ in shapes)
    sizes = (len(shapes), units, shapes[0][1], tokens, threads)
    return int(library.moepack_affine_dense_kept(*map(WORD, sizes)))


def norm(x: Tensor, weight: Tensor, form: int, epsilon: ctypes.c_double) -> Tensor:
    """Return rows of x [..., cols] over their root mean square, times weight [cols]; all BF16, contiguous, on the CPU.

    `form` says where results are rounded: 0 before the weight, 1 after it; 2 multiplies by 1 + weight in float32.
    `epsilon` is added to the mean square.
    """
    out = torch.empty_like(x)
    cols = x.shape[-1]
    if weight.shape != (cols,):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit rows of {cols}")
    _norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // cols, cols, form, epsilon)
    return out


Parts = tuple[Tensor, Tensor | None]  # queries or keys, in one part or in two that follow one another


def attend(
    query: Tensor | Parts,
    key: Tensor | Parts,
    value: Tensor,
    scale: float,
    threads: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a sequence's last tokens: softmax(scale * q k) v, with sums and scores in float32.

    A token sees the keys up to its own, or those that the mask gives it; a token that sees none gets zeros. Results
    have the same bits on any number of threads.

    Args:
        query: bfloat16 [batch, heads, tokens, cols], or two such parts of queries.
        key: bfloat16 [batch, groups, length, cols], or as many parts; each group serves heads / groups heads that
            follow one another.
        value: bfloat16 [batch, groups, length, out]. The last axis of all of these has stride 1. Keys and values may be
            `CodedRows`.
        mask: bool [batch, 1, tokens, length].
        sinks: [heads], logits that take up attention and belong to no key (gpt-oss).

    Returns:
        bfloat16 [batch, tokens, heads, out].

    Raises:
        ValueError: for tensors of other shapes or strides.
        MemoryError: when memory for scores is short.
    """
    q, q2 = query if isinstance(query, tuple) else (query, None)
    k, k2 = key if isinstance(key, tuple) else (key, None)
    batch, heads, tokens, cols = q.shape
    _, groups, length, out_cols = value.shape
    fits = k.shape == (batch, groups, length, cols) and value.shape[0] == batch and 0 < tokens <= length
    fits = fits and not heads % groups and (q2 is None) == (k2 is None)
    fits = fits and q.stride(3) == k.stride(3) == value.stride(3) == 1
    if q2 is not None and k2 is not None:
        fits = fits and q2.shape[:3] == q.shape[:3] and k2.shape == (*k.shape[:3], q2.shape[3])
        fits = fits and q2.stride(3) == k2.stride(3) == 1
    if mask is not None:
        fits = fits and mask.dtype == torch.bool and mask.shape == (batch, 1, tokens, length) and mask.stride(3) == 1
    if sinks is not None:
        sinks = sinks.float().contiguous()
        fits = fits and sinks.shape == (heads,)
    if not fits:
        shapes = [None if t is None else tuple(t.shape) for t in (q, q2, k, k2, value, mask, sinks)]
        raise ValueError(f"query, key, value, mask and sinks {shapes} do not fit")
    if _is_rotated(k):
        q = rotated(q)
    out = q.new_empty(batch, tokens, heads, out_cols)
    call = _Attend(  # by position: a short cache's attention takes no longer than names would
        _rows(q),
        NO_ROWS if q2 is None else _rows(q2),
        _rows(k),
        NO_ROWS if k2 is None else _rows(k2),
        _rows(value),
        None if mask is None else mask.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        batch,
        groups,
        heads // groups,
        tokens,
        length,
        mask is None,
        NOWHERE if mask is None else (mask.stride(0), mask.stride(2)),
        scale,
    )
    if library.moepack_affine_attend(ctypes.byref(call), WORD(threads or torch.get_num_threads())):
        raise MemoryError(f"no memory for the attention of {heads} heads")
    return rotated(out) if _is_rotated(value) else out


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return an indexer's scores: the sum over heads of weight * max(0, q k), float32 [batch, tokens, length].

    Args:
        query: bfloat16 [batch, tokens, heads, cols].
        key: bfloat16 [batch, length, cols], rows of stride 1.
        weights: float32 [batch, tokens, heads].

    Raises:
        ValueError: for tensors of other shapes or strides.
        MemoryError: when memory for scores is short.
    """
    batch, tokens, heads, cols = query.shape
    length = key.shape[1]
    fits = key.shape == (batch, length, cols) and key.stride(2) == 1 and weights.shape == query.shape[:3]
    if not fits or weights.dtype != torch.float32 or not query.dtype == key.dtype == torch.bfloat16:
        shapes = [(t.dtype, tuple(t.shape)) for t in (query, key, weights)]
        raise ValueError(f"query, key and weights {shapes} do not fit")
    query, weights = query.contiguous(), weights.contiguous()
    out = weights.new_empty(batch, tokens, length)
    for q, k, w, made in zip(query, key, weights, out, strict=True):
        at = (t.data_ptr() for t in (q, k, w, made))
        call = _Index(*at, tokens, heads, cols, length, k.stride(0))
        if library.moepack_affine_index(ctypes.byref(call), WORD(torch.get_num_threads())):
            raise MemoryError(f"no memory for the scores of {heads} heads")
    return out


def _is_rotated(x: Tensor) -> bool:
    return type(x) is CodedRows and x.bits in ROTATED


NO_ROWS = _Rows(bits=PLAIN)
NOWHERE = (0, 0)


def _rows(x: Tensor) -> _Rows:
    """Return where the kernel finds the rows of [batch, heads, tokens, cols], plain ones of BF16."""
    if type(x) is CodedRows:
        batch, head, token, _ = x.rows.stride()
        return _Rows(x.rows.data_ptr(), x.shape[3], x.bits, batch, head, token)
    batch, head, token, _ = x.stride()
    return _Rows(x.data_ptr(), x.shape[3], PLAIN, 2 * batch, 2 * head, 2 * token)


class HeadMatrices:
    """A linear map whose rows are, head after head, `first` rows of one matrix and `second` rows of another.

    `lift` multiplies by the first, transposed; `lower` by the second. Both read the map where it is.
    """

    def __init__(self, of: KernelMatrix, heads: int, first: int, second: int) -> None:
        """Check the sizes; raise ValueError for a matrix with a bias, or packed rows that are not whole blocks."""
        each = first + second
        packed = of.form.bits != PLAIN_FORM.bits
        if of.rows != heads * each or of.bias is not None or of.form.bias >= 0:
            raise ValueError(f"{heads} heads of {each} rows without a bias are not a matrix of {of.rows} rows")
        if packed and not whole_blocks(first, second):
            raise ValueError(f"heads of {first} and {second} rows: packed ones are unpacked {UNPACKED} at a time")
        self.of = of
        self.heads = heads
        self.first = first
        self.second = second
        self._packed = packed
        self._form = np.array(of.form.row(), np.int64)
        self._form_at = self._form.ctypes.data if packed else None

    def lift(self, x: Tensor) -> Tensor:
        """Return each head's M^T x, bfloat16 [tokens, heads, cols], for x [tokens, heads, first], rows of stride 1."""
        return self._run(x, True)

    def lower(self, x: Tensor) -> Tensor:
        """Return each head's M x, bfloat16 [tokens, heads, second], for x [tokens, heads, cols], rows of stride 1."""
        return self._run(x, False)

    def prepared(self, transposed: bool, tokens: int, x_at: tuple[int, int]) -> _Heads:
        """Return the call of `lift` if `transposed`, else of `lower`, without the addresses of x and the result.

        `x_at`: numbers between heads and between tokens of x.
        """
        cols = self.of.cols
        offset, rows = (0, self.first) if transposed else (self.first, self.second)
        given, made = (rows, cols) if transposed else (cols, rows)
        each = self.first + self.second
        at = self.of.data.data_ptr()
        call = _Heads(
            matrix=None if self._packed else at + 2 * offset * cols,
            heads=self.heads,
            tokens=tokens,
            out_cols=made,
            sums=transposed != self._packed,  # unpacked weights are transposed
            x_at=x_at,
            out_at=(made, self.heads * made),
            matrix_at=(each if self._packed else each * cols, cols),
            base=at if self._packed else None,
            form=self._form_at,
            first=offset,
        )
        setattr(call, "in", given)
        return call

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        tokens, heads, size = x.shape
        wanted = self.first if transposed else self.of.cols
        if x.dtype != torch.bfloat16 or heads != self.heads or size != wanted or x.stride(2) != 1:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: bfloat16 [tokens, {self.heads}, {wanted}] fits")
        out = x.new_empty(tokens, heads, self.of.cols if transposed else self.second)
        call = self.prepared(transposed, tokens, (x.stride(1), x.stride(0)))
        call.x = x.data_ptr()
        call.out = out.data_ptr()
        failed = library.moepack_affine_heads(ctypes.byref(call), WORD(torch.get_num_threads()))
        if failed == 1:
            raise MemoryError(f"no memory for the matrices of {heads} heads")
        if failed:
            raise unknown_form(self.of.form)
        return out
