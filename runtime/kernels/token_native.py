"""What a decoding token needs of a layer in one call each, by c/product.c: queries, keys and values; and the experts.

Between a layer's products stand operations on a few thousand numbers, each of which takes longer to call from Python
than to compute. Results have the bits of the separate calls (dense_native.py, affine_native.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .affine_native import POINTER, WORD, Combine, Gemm, LayerForms, has_tiles, library, unknown_form
from .dense_native import MatrixGroup
from .forms import Norm


class _Project(ctypes.Structure):
    _fields_ = [
        ("of", POINTER), *((name, WORD) for name in ("cols", "tokens", "tiles", "threads")),
        *((name, POINTER) for name in ("x", "out")), *((name, WORD) for name in ("head", "turned", "angles")),
        *((name, POINTER) for name in ("cos", "sin")), ("weight", POINTER * 2),
        ("norm_cols", WORD * 2), ("norm_form", WORD * 2), ("epsilon", ctypes.c_double * 2),
    ]  # fmt: skip


class _Experts(ctypes.Structure):
    _fields_ = [("up", Gemm), ("down", Gemm), ("sum", Combine)]


library.moepack_affine_project.argtypes = library.moepack_affine_experts.argtypes = [POINTER]
library.moepack_silu_gate.argtypes = [POINTER, POINTER, WORD, WORD]
library.moepack_silu_gate.restype = None


class Projection:
    """The matrices of an attention module's queries, keys and values, and what is done to their results."""

    def __init__(self, of: MatrixGroup, head: int, norms: Sequence[Norm | None], shared: bool = False) -> None:
        """Check the sizes. `of` has three matrices; `norms` are those of queries and keys.

        With `shared` angles, one turns a number of each half of a head; else a number has an angle of its own.

        Raises ValueError for matrices that are not whole heads, or norms of other rows than a head's or all heads'.
        """
        rows = [m.rows for m in of.matrices]
        for norm, n in zip(norms, rows, strict=False):
            if norm is not None and (len(norm.weight) not in (head, n) or norm.weight.dtype != torch.bfloat16):
                raise ValueError(f"a norm of {len(norm.weight)} numbers for rows of {n} in heads of {head}")
        if len(rows) != 3 or rows[1] % head or rows[0] % head or rows[1] != rows[2]:
            raise ValueError(f"matrices of {rows} rows for heads of {head}")
        self._of = of
        self._head = head
        self._norms = tuple(norms)
        self.rows = rows
        self._shared = shared
        found = [norm or Norm(torch.empty(0), 0, 0.0) for norm in norms]
        self._call = _Project(
            of=of.address,
            cols=of.cols,
            head=head,
            weight=tuple(n and n.weight.data_ptr() for n in norms),
            norm_cols=tuple(len(n.weight) for n in found),
            norm_form=tuple(n.form for n in found),
            epsilon=tuple(n.epsilon for n in found),
        )

    def run(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, threads: int | None = None) -> list[Tensor]:
        """Return queries, keys and values, bfloat16 [batch, heads, tokens, head] each.

        Args:
            x: bfloat16 [batch, tokens, cols], contiguous.
            cos, sin: bfloat16 [batch, tokens, angles], contiguous: so many numbers of a head of queries and keys are
                rotated, halves against halves; with `shared` angles, twice as many. None: nothing is rotated.

        Raises:
            ValueError: for tensors of other sizes.
            MemoryError: when memory for activations is short.
        """
        batch, tokens, cols = x.shape
        n = batch * tokens
        head = self._head
        angles = 0 if cos is None else cos.shape[-1]
        turned = angles * (1 + self._shared)
        if cols != self._of.cols or turned > head or turned % 2 or (cos is not None and cos.numel() != n * angles):
            raise ValueError(f"x {tuple(x.shape)} and {turned} rotated numbers do not fit")
        made = x.new_empty(n * sum(self.rows))
        call = _Project.from_buffer_copy(self._call)
        call.tokens = n
        call.tiles = has_tiles(torch.bfloat16)
        call.threads = threads or torch.get_num_threads()
        call.x = x.data_ptr()
        call.out = made.data_ptr()
        call.turned = turned
        call.angles = angles
        if cos is not None and sin is not None:
            call.cos = cos.data_ptr()
            call.sin = sin.data_ptr()
        failed = library.moepack_affine_project(ctypes.addressof(call))
        if failed == 1:
            raise MemoryError(f"no memory for {n} activations")
        if failed:
            raise unknown_form(self._of.matrices[failed - 2].form)
        out = []
        at = 0
        for rows in self.rows:
            heads = rows // head
            out.append(made.as_strided((batch, heads, tokens, head), (tokens * rows, head, rows, 1), at))
            at += n * rows
        return out


def silu_gate(x: Tensor) -> Tensor:
    """Return silu(x[:, :cols]) * x[:, cols:] of bfloat16 x [rows, 2 * cols], contiguous: the gate of `GatedExperts`."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: bfloat16 [rows, 2 * cols] is gated")
    out = x.new_empty(len(x), x.shape[1] // 2)
    library.moepack_silu_gate(x.data_ptr(), out.data_ptr(), *out.shape)
    return out


class GatedExperts:
    """A layer's two matrices with silu gates between them, for few tokens."""

    def __init__(self, forms: LayerForms) -> None:
        """Take a layer whose second matrix has half as many columns as the first has rows."""
        up, down = forms.matrices
        if up.rows != 2 * down.cols or up.cols != down.rows:
            raise ValueError(f"[{up.rows}, {up.cols}] and [{down.rows}, {down.cols}] do not make gated experts")
        self._forms = forms
        count = len(forms.numbers)
        each = (
            Gemm(rows=m.rows, cols=m.cols, versions=count, x_bf16=1, out_bf16=1, forms=forms.address(i))
            for i, m in enumerate(forms.matrices)
        )
        self._call = _Experts(*each, Combine(cols=down.rows, from_bf16=1, out_bf16=1))

    def run(
        self,
        handles: npt.NDArray[np.uint64],
        x: Tensor,
        index: Tensor,
        gates: Tensor,
        limits: npt.NDArray[np.int64],
        threads: int | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, bfloat16 [tokens, hidden].

        Args:
            handles: the handle table, uint64 [experts].
            x: bfloat16 [tokens, hidden], contiguous.
            index: int64 [tokens, top_k], contiguous; a slot whose index is past the last expert is skipped.
            gates: [tokens, top_k]. If they are bfloat16, weighted rows are rounded before they are added.
            limits: int64 [versions], as `affine_native.product` takes them; without tiles all run from packed bytes.

        Raises:
            ValueError: for tensors of other sizes, or a form that the library does not know.
            MemoryError: when memory for activations is short.
        """
        tokens, top_k = index.shape
        call = _Experts.from_buffer_copy(self._call)
        if x.shape != (tokens, call.up.cols) or gates.shape != index.shape or not tokens:
            raise ValueError(f"x {tuple(x.shape)}, index {tuple(index.shape)}, gates {tuple(gates.shape)} do not fit")
        threads = threads or torch.get_num_threads()
        tiles = has_tiles(torch.bfloat16)
        out = torch.empty_like(x)
        wide = gates.float().contiguous()
        # Without tiles none is skipped: an expert that a token chooses twice has more slots than there are tokens
        limits = limits if tiles else self._forms.unlimited
        table = handles.ctypes.data
        chosen = index.data_ptr()
        most = limits.ctypes.data
        for gemm in (call.up, call.down):
            gemm.experts = len(handles)
            gemm.slots = tokens * top_k
            gemm.tiles = tiles
            gemm.threads = threads
            gemm.index = chosen
            gemm.handles = table
            gemm.limits = most
        call.up.x = x.data_ptr()
        call.up.share = top_k
        call.down.share = 1
        add = call.sum
        add.tokens = tokens
        add.top_k = top_k
        add.experts = len(handles)
        add.threads = threads
        add.round = gates.dtype == torch.bfloat16
        add.index = chosen
        add.gates = wide.data_ptr()
        add.out = out.data_ptr()
        failed = library.moepack_affine_experts(ctypes.addressof(call))
        if failed == 1:
            raise MemoryError(f"no memory for {tokens} activations")
        if failed:
            raise self._forms.unknown(0, failed - 2)
        return out
