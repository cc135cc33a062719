"""What a decoding token needs in one call each, by c/layer.c: queries, keys and values; experts; or a whole layer.

Between a layer's products stand operations on a few thousand numbers, each of which takes longer to call from Python
than to compute. Results have the bits of the separate calls (dense_native.py, affine_native.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .affine_native import POINTER, WORD, Combine, Gemm, LayerForms, fields, has_tiles, library, unknown_form
from .delta_native import DeltaRule
from .dense_native import NO_ROWS, NOWHERE, HeadMatrices, MatrixGroup, _Attend, _rows, dense
from .forms import Norm, Routing


class _Normal(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("form", WORD), ("epsilon", ctypes.c_double)]


class _Project(ctypes.Structure):
    _fields_ = [
        ("of", POINTER),
        *fields(WORD, "cols tokens tiles threads"),
        *fields(POINTER, "x out"),
        *fields(WORD, "head turned angles"),
        *fields(POINTER, "cos sin"),
        ("norm", _Normal * 2),
        ("norm_cols", WORD * 2),
    ]


class _ProjectLatent(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "of second"),
        *fields(WORD, "cols tokens tiles threads"),
        *fields(POINTER, "x query latent turned"),
        *fields(WORD, "heads head rank rotated way"),
        *fields(POINTER, "cos sin"),
        ("middle", _Normal),
        ("norm", _Normal),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [("of", POINTER), ("count", WORD), *fields(POINTER, "made rule")]


class _Experts(ctypes.Structure):
    _fields_ = [
        *(("up", Gemm), ("down", Gemm), ("sum", Combine)),
        *(("pairs", WORD), ("limit", ctypes.c_float), ("alpha", ctypes.c_float)),
    ]


class _Route(ctypes.Structure):
    _fields_ = [
        *fields(WORD, "tokens experts top_k scores normed sorted groups kept two"),
        ("scale", ctypes.c_float),
        *fields(WORD, "logits_bf16 gates_bf16"),
        *fields(POINTER, "logits bias index gates"),
    ]


SCORES = ("softmax", "sigmoid", "top")  # of `Routing`, by number
TOP_K = 16  # the most experts of a token that `choose` finds in the order of torch's `topk`
RARE = 64  # of so many experts and more for each chosen one, `topk` chooses by another algorithm
library.moepack_route.argtypes = [POINTER]
library.moepack_affine_project.argtypes = library.moepack_affine_experts.argtypes = [POINTER]
library.moepack_silu_gate.argtypes = [POINTER, POINTER, WORD, WORD]
library.moepack_silu_gate.restype = None


class _Layer(ctypes.Structure):
    _fields_ = [
        *fields(WORD, "tokens hidden tiles threads"),
        ("x", POINTER),
        *fields(_Normal, "before after"),
        *fields(POINTER, "project latent linear lift lower attend attended"),
        ("attended_cols", WORD),
        *fields(POINTER, "last h normed"),
        *fields(POINTER, "wide router route experts"),
        *fields(POINTER, "shared shared_down shared_gate out"),
    ]


library.moepack_affine_latent.argtypes = [POINTER]
library.moepack_affine_layers.argtypes = [POINTER, WORD]


def _normal(norm: Norm | None) -> _Normal:
    return _Normal() if norm is None else _Normal(norm.weight.data_ptr(), norm.form, norm.epsilon)


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
        self.head = head
        self._norms = tuple(norms)
        self.rows = rows
        self._shared = shared
        self._call = _Project(
            of=of.address,
            cols=of.cols,
            head=head,
            norm=tuple(map(_normal, norms)),
            norm_cols=tuple(0 if n is None else len(n.weight) for n in norms),
        )

    def prepared(self, tokens: int, cos: Tensor | None, sin: Tensor | None, threads: int) -> _Project:
        """Return the call for these tokens, without the addresses of input and results; raise as `run` does."""
        angles = 0 if cos is None else cos.shape[-1]
        turned = angles * (1 + self._shared)
        if turned > self.head or turned % 2 or (cos is not None and cos.numel() != tokens * angles):
            raise ValueError(f"{turned} rotated numbers do not fit {tokens} tokens with heads of {self.head}")
        call = _Project.from_buffer_copy(self._call)
        call.tokens = tokens
        call.tiles = has_tiles(torch.bfloat16)
        call.threads = threads
        call.turned = turned
        call.angles = angles
        if cos is not None and sin is not None:
            call.cos = cos.data_ptr()
            call.sin = sin.data_ptr()
        return call

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
        head = self.head
        if cols != self._of.cols:
            raise ValueError(f"x {tuple(x.shape)} and matrices of {self._of.cols} columns: they do not fit")
        made = x.new_empty(n * sum(self.rows))
        call = self.prepared(n, cos, sin, threads or torch.get_num_threads())
        call.x = x.data_ptr()
        call.out = made.data_ptr()
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

    def fits(self, x: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Whether a layer's call takes tensors of these shapes."""
        batch, groups, _, head = keys.shape
        alike = values.shape == keys.shape and batch == len(x) and x.shape[1] == 1
        return alike and groups * head == self.rows[1] and head == self.head

    def enter(
        self, call: _Layer, turn: Any, keys: Tensor, values: Tensor, sinks: Tensor | None, scale: float
    ) -> object:
        """Set the parts of a layer's call that attend, as of `DecoderLayer.attends`; return what must outlive it."""
        batch, groups, length, head = keys.shape
        cos, sin = turn
        project = self.prepared(batch, cos, sin, torch.get_num_threads())
        sinks = None if sinks is None else sinks.float().contiguous()
        attend = _attention(keys, values, groups, self.rows[0] // head // groups, length, scale)
        attend.sinks = None if sinks is None else sinks.data_ptr()
        call.project = ctypes.addressof(project)
        call.attend = ctypes.addressof(attend)
        return project, attend, sinks


def _attention(keys: Tensor, values: Tensor, groups: int, heads: int, length: int, scale: float) -> _Attend:
    """Return the call of one token's attention over all rows of a cache, whose queries a layer's call sets."""
    k = _rows(keys)
    v = _rows(values)
    return _Attend(
        NO_ROWS, NO_ROWS, k, NO_ROWS, v, None, None, None, len(keys), groups, heads, 1, length, 1, NOWHERE, scale
    )


def is_turn(x: object, dtype: torch.dtype, tokens: int, angles: int) -> bool:
    """Whether x has `angles` numbers of each token, one after another in memory."""
    if not isinstance(x, Tensor) or x.dtype != dtype or x.is_conj():
        return False
    return x.is_contiguous() and x.shape[-1] == angles and x.numel() == tokens * angles


WAYS = ("none", "halves", "pairs", "complex")  # of rotation (c/layer.c), by number
COMPLEX = 32  # rotated numbers of which torch makes whole vectors


class LatentProjection:
    """The matrices of a latent layer's queries and latents, and what is done to their results.

    A head of a query has numbers that meet its part of `maps`, and behind them numbers that are rotated.
    """

    def __init__(
        self,
        of: MatrixGroup,
        second: MatrixGroup | None,
        norms: Sequence[Norm | None],
        maps: HeadMatrices,
        way: str,
    ) -> None:
        """Check the sizes.

        Args:
            of: the matrix of queries, or of what `second` makes queries from; and that of latents and rotated keys.
            second: makes queries of the first's normalised results.
            norms: of what `second` takes, and of latents.
            maps: from latents to keys and values of all heads.
            way: of rotation: "halves" turns halves of the rotated numbers against each other, with an angle for each
                number, "pairs" does so after it put neighbours into the halves, "complex" turns neighbours in place, in
                float32; "none" turns nothing.

        Raises:
            ValueError: for matrices or norms that do not fit.
        """
        rows = [m.rows for m in of.matrices]
        queries = rows[0] if second is None else second.matrices[0].rows
        rank = maps.of.cols
        rotated = rows[1] - rank if len(rows) == 2 else 0
        head = maps.first + rotated
        middle, norm = norms
        # Behind whole vectors, torch multiplies complex numbers with one rounding less
        fits = rotated > 0 and not rotated % (COMPLEX if way == "complex" else 2) and queries == maps.heads * head
        fits = fits and (second is None or (len(second.matrices) == 1 and second.cols == rows[0]))
        for found, n in ((middle, rows[0]), (norm, rank)):
            fits = fits and (found is None or (len(found.weight) == n and found.weight.dtype == torch.bfloat16))
        if not fits:
            raise ValueError(f"matrices of {rows} rows for {maps.heads} heads of latents of {rank}")
        self._kept = of, second, middle, norm
        self.maps = maps
        self.rotated = rotated
        self.way = way
        self._call = _ProjectLatent(
            of=of.address,
            second=None if second is None else second.address,
            cols=of.cols,
            heads=maps.heads,
            head=head,
            rank=rank,
            rotated=rotated,
            way=WAYS.index(way),
            middle=_normal(middle),
            norm=_normal(norm),
        )

    def takes(self, turn: object, tokens: int) -> bool:
        """Whether so many tokens can be rotated by `turn`: cosines and sines, BF16; for "complex", complex64.

        Without a rotation anything is taken.
        """
        if self.way == "none":
            return True
        if self.way == "complex":
            return is_turn(turn, torch.complex64, tokens, self.rotated // 2)
        if not isinstance(turn, tuple) or len(turn) != 2:
            return False
        return all(is_turn(t, torch.bfloat16, tokens, self.rotated) for t in turn)

    def _prepared(self, tokens: int, turn: Any) -> _ProjectLatent:
        if not self.takes(turn, tokens):
            raise ValueError(f"a rotation of other sizes than {tokens} tokens with {self.rotated} numbers")
        call = _ProjectLatent.from_buffer_copy(self._call)
        call.tokens = tokens
        call.tiles = has_tiles(torch.bfloat16)
        call.threads = torch.get_num_threads()
        if self.way == "complex":
            call.cos = turn.data_ptr()
        elif self.way != "none":
            call.cos, call.sin = (t.data_ptr() for t in turn)
        return call

    def run(self, x: Tensor, turn: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [batch, heads, tokens, head], latents and rotated keys [batch, 1, tokens, ...], bfloat16.

        Args:
            x: bfloat16 [batch, tokens, cols], contiguous.
            turn: what `takes` says.

        Raises:
            ValueError: for tensors of other sizes.
            MemoryError: when memory for activations is short.
        """
        batch, tokens, cols = x.shape
        call = self._prepared(batch * tokens, turn)
        if cols != call.cols:
            raise ValueError(f"x {tuple(x.shape)} and matrices of {call.cols} columns: they do not fit")
        query = x.new_empty(batch, tokens, call.heads, call.head)
        latent = x.new_empty(batch, 1, tokens, call.rank)
        turned = x.new_empty(batch, 1, tokens, call.rotated)
        call.x, call.query, call.latent, call.turned = (t.data_ptr() for t in (x, query, latent, turned))
        failed = library.moepack_affine_latent(ctypes.addressof(call))
        if failed == 1:
            raise MemoryError(f"no memory for {batch * tokens} activations")
        if failed:
            raise ValueError("a matrix is in a form that the library does not know")
        return query.transpose(1, 2), latent, turned

    def fits(self, x: Tensor, latents: Tensor, turned: Tensor) -> bool:
        """Whether a layer's call takes tensors of these shapes."""
        held = (len(x), 1, latents.shape[2])
        alike = latents.shape == (*held, self._call.rank) and turned.shape == (*held, self.rotated)
        return alike and x.shape[1] == 1

    def enter(
        self, call: _Layer, turn: Any, latents: Tensor, turned: Tensor, sinks: Tensor | None, scale: float
    ) -> object:
        """Set the parts of a layer's call that attend, as `Projection.enter` does."""
        tokens = len(latents)
        project = self._prepared(tokens, turn)
        head = project.head
        heads = project.heads
        lift = self.maps.prepared(True, tokens, (head, heads * head))
        lower = self.maps.prepared(False, tokens, (project.rank, heads * project.rank))
        attend = _attention(latents, latents, 1, heads, latents.shape[2], scale)
        attend.k2 = _rows(turned)
        call.latent, call.lift, call.lower, call.attend = map(ctypes.addressof, (project, lift, lower, attend))
        return project, lift, lower, attend


class Choices:
    """A router's choice of experts by its logits, for few tokens: `choose` makes what `form` says."""

    def __init__(self, form: Routing, experts: int, logits: torch.dtype, gates: torch.dtype) -> None:
        """Check the sizes; `logits` and `gates` are bfloat16 or float32.

        Raises ValueError for more than TOP_K experts a token or fewer than one in RARE, which torch's `topk` finds in
        another order; for groups of unequal sizes, and other dtypes.
        """
        found = experts < RARE * form.top_k and 0 < form.top_k <= min(TOP_K, experts)
        if not found or experts % form.groups or not 0 < form.kept <= form.groups:
            raise ValueError(f"a choice of {form.top_k} among {experts} experts in {form.groups} groups")
        if not {logits, gates} <= {torch.bfloat16, torch.float32}:
            raise ValueError(f"logits of {logits} and gates of {gates}")
        self._form = form
        self.experts = experts
        self.top_k = form.top_k
        self.logits = logits
        self.gates = gates
        self._call = _Route(
            experts=experts,
            top_k=form.top_k,
            scores=SCORES.index(form.scores),
            normed=form.normed,
            sorted=form.ordered,
            groups=form.groups,
            kept=form.kept,
            two=form.by == "two",
            scale=form.scale,
            logits_bf16=logits == torch.bfloat16,
            gates_bf16=gates == torch.bfloat16,
        )

    def choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return experts, int64, and their gates, [tokens, top_k] each, of logits [tokens, experts], contiguous.

        `bias` is float32 [experts], contiguous, for a form that is `biased`.

        Raises:
            ValueError: for tensors of other sizes or dtypes.
            MemoryError: when memory for scores is short.
        """
        if logits.dtype != self.logits or logits.shape[1] != self.experts:
            raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} do not fit {self._form}")
        call, index, gates = self.prepared(len(logits), bias)
        call.logits = logits.data_ptr()
        if library.moepack_route(ctypes.addressof(call)):
            raise MemoryError(f"no memory for the scores of {self.experts} experts")
        return index, gates

    def prepared(self, tokens: int, bias: Tensor | None) -> tuple[_Route, Tensor, Tensor]:
        """Return the call for so many tokens, without the address of logits; and the memory of experts and gates."""
        if self._form.biased != (bias is not None) or not (
            bias is None or (bias.dtype == torch.float32 and bias.shape == (self.experts,) and bias.is_contiguous())
        ):
            raise ValueError(f"a bias of {None if bias is None else tuple(bias.shape)} does not fit {self._form}")
        shape = tokens, self.top_k
        index = torch.empty(shape, dtype=torch.int64)
        gates = torch.empty(shape, dtype=self.gates)
        call = _Route.from_buffer_copy(self._call)
        call.tokens = tokens
        call.bias = None if bias is None else bias.data_ptr()
        call.index = index.data_ptr()
        call.gates = gates.data_ptr()
        return call, index, gates


def silu_gate(x: Tensor) -> Tensor:
    """Return silu(x[:, :cols]) * x[:, cols:] of bfloat16 x [rows, 2 * cols], contiguous: the gate of `GatedExperts`."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: bfloat16 [rows, 2 * cols] is gated")
    out = x.new_empty(len(x), x.shape[1] // 2)
    library.moepack_silu_gate(x.data_ptr(), out.data_ptr(), *out.shape)
    return out


library.moepack_pair_gate.argtypes = [POINTER, POINTER, WORD, ctypes.c_float, ctypes.c_float]
library.moepack_pair_gate.restype = None
library.moepack_rows.argtypes = [POINTER] * 3 + [WORD] * 4
library.moepack_rows.restype = None


@dataclass(frozen=True, slots=True)
class PairGate:
    """The gate of pairs of neighbours (gate, up): (up + 1) * gate * sigmoid(alpha * gate), both cut at `limit`."""

    limit: float
    alpha: float

    def run(self, x: Tensor) -> Tensor:
        """Return the gated numbers of bfloat16 x [rows, 2 * cols], contiguous, rounded after each step as torch's."""
        out = x.new_empty(len(x), x.shape[1] // 2)
        library.moepack_pair_gate(x.data_ptr(), out.data_ptr(), out.numel(), self.limit, self.alpha)
        return out


def rows_by(weight: Tensor, x: Tensor) -> Tensor:
    """Return x times weight [rows, cols], [tokens, rows], for x [tokens, cols]; all float32, contiguous."""
    rows, cols = weight.shape
    fits = x.dim() == 2 and x.shape[1] == cols and x.dtype == weight.dtype == torch.float32
    if not fits or not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)} do not fit")
    out = x.new_empty(len(x), rows)
    threads = torch.get_num_threads()
    library.moepack_rows(weight.data_ptr(), x.data_ptr(), out.data_ptr(), len(x), rows, cols, threads)
    return out


class GatedExperts:
    """A layer's two matrices with gates between them, for few tokens."""

    def __init__(self, forms: LayerForms, pairs: PairGate | None = None) -> None:
        """Take a layer whose second matrix has half as many columns as the first has rows.

        The gate is `silu_gate`'s, or `pairs`.
        """
        up, down = forms.matrices
        if up.rows != 2 * down.cols or up.cols != down.rows:
            raise ValueError(f"[{up.rows}, {up.cols}] and [{down.rows}, {down.cols}] do not make gated experts")
        self._forms = forms
        count = len(forms.numbers)
        each = (
            Gemm(rows=m.rows, cols=m.cols, versions=count, x_bf16=1, out_bf16=1, forms=forms.address(i))
            for i, m in enumerate(forms.matrices)
        )
        gate = (0, 0.0, 0.0) if pairs is None else (1, pairs.limit, pairs.alpha)
        self._call = _Experts(*each, Combine(cols=down.rows, from_bf16=1, out_bf16=1), *gate)

    def prepared(
        self,
        tokens: int,
        top_k: int,
        handles: npt.NDArray[np.uint64],
        rounded: bool,
        limits: npt.NDArray[np.int64],
        threads: int,
    ) -> _Experts:
        """Return the call for these tokens, without the addresses of the choice, the input and the result.

        `rounded` says whether weighted rows are rounded before they are added; other arguments are `run`'s.
        """
        call = _Experts.from_buffer_copy(self._call)
        tiles = has_tiles(torch.bfloat16)
        # Without tiles none is skipped: an expert that a token chooses twice has more slots than there are tokens
        limits = limits if tiles else self._forms.unlimited
        table = handles.ctypes.data
        most = limits.ctypes.data
        for gemm in (call.up, call.down):
            gemm.experts = len(handles)
            gemm.slots = tokens * top_k
            gemm.tiles = tiles
            gemm.threads = threads
            gemm.handles = table
            gemm.limits = most
        call.up.share = top_k
        call.down.share = 1
        add = call.sum
        add.tokens = tokens
        add.top_k = top_k
        add.experts = len(handles)
        add.threads = threads
        add.round = rounded
        return call

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
        if x.shape != (tokens, self._call.up.cols) or gates.shape != index.shape or not tokens:
            raise ValueError(f"x {tuple(x.shape)}, index {tuple(index.shape)}, gates {tuple(gates.shape)} do not fit")
        out = torch.empty_like(x)
        wide = gates.float().contiguous()
        rounded = gates.dtype == torch.bfloat16
        call = self.prepared(tokens, top_k, handles, rounded, limits, threads or torch.get_num_threads())
        chosen = index.data_ptr()
        call.up.index = chosen
        call.down.index = chosen
        call.up.x = x.data_ptr()
        call.sum.index = chosen
        call.sum.gates = wide.data_ptr()
        call.sum.out = out.data_ptr()
        failed = library.moepack_affine_experts(ctypes.addressof(call))
        if failed == 1:
            raise MemoryError(f"no memory for {tokens} activations")
        if failed:
            raise self._forms.unknown(0, failed - 2)
        return out


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert of all tokens: down(silu(gate(x)) * up(x)), times the sigmoid of `weight`'s one row if there is one.

    It is beside a layer's other experts, or all of a dense layer's MLP.
    """

    up: MatrixGroup  # the matrices `gate` and `up`
    down: MatrixGroup
    weight: MatrixGroup | None = None

    @property
    def addresses(self) -> tuple[int, int, int | None]:
        """Where a layer's call finds the matrices."""
        return self.up.address, self.down.address, None if self.weight is None else self.weight.address

    @property
    def most(self) -> int:
        """The most tokens that all matrices multiply from their packed bytes."""
        parts = (self.up, self.down, self.weight)
        return min(n for part in parts if part is not None for n in part.limits[torch.bfloat16])

    def run(self, x: Tensor) -> Tensor:
        """Return the result for x, bfloat16 [tokens, cols], by the calls that a layer's call joins."""
        gate, up = dense(self.up, x)
        made = dense(self.down, silu_gate(torch.cat((gate, up), -1)))[0]
        return made if self.weight is None else dense(self.weight, x)[0].sigmoid() * made


class ExpertsBlock:
    """A router, and the experts among which it chooses for some tokens; one serves any number of calls."""

    def __init__(
        self,
        matrix: MatrixGroup | Tensor,
        choices: Choices,
        experts: GatedExperts,
        handles: npt.NDArray[np.uint64],
        limits: npt.NDArray[np.int64],
        tokens: int,
        bias: Tensor | None = None,
        shared: SharedExpert | None = None,
    ) -> None:
        """Prepare a call.

        Args:
            matrix: the router's; float32 [experts, hidden], contiguous, for float32 weights.
            choices: what it makes of logits, which are of the dtype of its product's input.
            experts: the experts' kernel.
            handles: the handle table, uint64 [experts]; an expert with 0 is skipped.
            limits: as of `GatedExperts.run`.
            tokens: of each call.
            bias: float32 [experts], for choices that are biased.
            shared: an expert of all tokens beside these.
        """
        self._kept = matrix, choices, experts, handles, limits, bias, shared
        self.choices = choices
        self.wide = matrix.data_ptr() if isinstance(matrix, Tensor) else None
        self.router = None if isinstance(matrix, Tensor) else matrix.address
        self.bias = bias
        rounded = choices.gates == torch.bfloat16
        threads = torch.get_num_threads()
        self.experts = experts.prepared(tokens, choices.top_k, handles, rounded, limits, threads)
        self.shared = None if shared is None else shared.addresses


Block = ExpertsBlock | SharedExpert  # or one expert of all tokens, without a router


@dataclass(frozen=True, slots=True)
class Ready:
    """A layer's call, for `run_layers`.

    Attributes:
        call: what the kernel is given.
        out: where the layer's result will be.
        choice: where experts, int64, and their gates will be, [tokens, top_k] each; a block without a router has none.
        kept: what must outlive the call.
    """

    call: _Layer
    out: Tensor
    choice: tuple[Tensor, Tensor] | None
    kept: object


def run_layers(ready: Sequence[Ready]) -> None:
    """Run layers one after another, in one call. The input of each but the first is the result of the one before.

    Raises:
        MemoryError: when memory for activations is short.
    """
    calls = (POINTER * len(ready))(*(ctypes.addressof(one.call) for one in ready))
    failed = library.moepack_affine_layers(ctypes.addressof(calls), len(ready))
    if failed == 1:
        raise MemoryError(f"no memory for a layer's {ready[0].call.tokens} activations")
    if failed:
        raise ValueError("a matrix of the layer is in a form that the library does not know")


class LinearProjection:
    """The matrices of a layer of linear attention whose results a rule reads."""

    def __init__(self, of: MatrixGroup, rule: DeltaRule) -> None:
        """Take them; the results of `of` are the rule's projections, in order."""
        self._of = of
        self._rule = rule

    def enter(
        self, call: _Layer, x: Tensor, first: Sequence[int], windows: Sequence[Tensor], states: Sequence[Tensor]
    ) -> object:
        """Set the parts of a layer's call that attend, as `DeltaRule.run` says; return what must outlive it."""
        rows = [m.rows for m in self._of.matrices]
        tokens = len(x)
        made = x.new_empty(tokens * sum(rows))
        projections = made.split([tokens * n for n in rows])
        parts = [part.view(tokens, n) for part, n in zip(projections, rows, strict=True)]
        rule, out = self._rule.prepared(parts, first, windows, states)
        linear = _Linear(self._of.address, len(rows), made.data_ptr(), ctypes.addressof(rule))
        call.linear = ctypes.addressof(linear)
        call.attended = out.data_ptr()
        return made, rule, out, linear, windows, states


class DecoderLayer:
    """A decoder layer for one token of each sequence: h = x + attention(norm(x)), then h + experts(norm(h)).

    Where attention or the experts are other code's, the call begins after the one, and ends before the other.
    """

    def __init__(
        self,
        before: Norm,
        after: Norm,
        projection: Projection | LatentProjection | LinearProjection | None = None,
        last: MatrixGroup | None = None,
        scale: float = 0.0,
    ) -> None:
        """Take the layer's norms, and of attention what the kernels compute.

        Args:
            before, after: of attention's input, and of the experts'.
            projection: makes queries, keys and values, or what a rule reads. None: attention is other code's.
            last: attention's last matrix. None: what other code hands on is attention's whole result.
            scale: of scores.
        """
        self._kept = before, after, last
        self.projection = projection
        self._scale = scale
        self._call = _Layer(
            hidden=len(after.weight),
            before=_normal(before),
            after=_normal(after),
            last=None if last is None else last.address,
            attended_cols=0 if last is None else last.cols,
        )

    def attends(
        self,
        x: Tensor,
        turn: Any,
        keys: Tensor,
        values: Tensor,
        block: Block,
        sinks: Tensor | None,
        out: Tensor,
    ) -> Ready:
        """Return the call that runs all of the layer.

        Args:
            x: bfloat16 [sequences, 1, hidden], contiguous.
            turn: cosines and sines, as of the projection's `run`.
            keys, values: bfloat16 [sequences, groups, length, head], rows of stride 1. The last row of each is written.
            block: the experts.
            sinks: [heads], logits that take up attention and belong to no key.
            out: as x; where the result is written.

        Raises:
            ValueError: for tensors of other sizes.
        """
        of = self.projection
        if not isinstance(of, Projection | LatentProjection) or not of.fits(x, keys, values):
            raise ValueError(
                f"x {tuple(x.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit"
            )
        call = self._begun(x)
        kept = of.enter(call, turn, keys, values, sinks, self._scale)
        return _with_block(call, x, block, out, kept)

    def attends_linearly(
        self,
        x: Tensor,
        first: Sequence[int],
        windows: Sequence[Tensor],
        states: Sequence[Tensor],
        block: Block,
        out: Tensor,
    ) -> Ready:
        """Return the call that runs all of a layer of linear attention, and moves its states on.

        Args:
            x: bfloat16 [sequences, 1, hidden], contiguous.
            first, windows, states: as of `DeltaRule.run`.
            block: the experts.
            out: as x; where the result is written.

        Raises:
            ValueError: for tensors of other sizes.
        """
        of = self.projection
        if not isinstance(of, LinearProjection) or first[-1] != len(x):
            raise ValueError(f"x {tuple(x.shape)} for {first[-1]} tokens: they do not fit")
        call = self._begun(x)
        kept = of.enter(call, x, first, windows, states)
        return _with_block(call, x, block, out, kept)

    def goes_on(self, x: Tensor, attended: Tensor, block: Block, out: Tensor) -> Ready:
        """Return the call from attention's result on: `attended` [tokens, ...]; both bfloat16, contiguous."""
        call = self._begun(x)
        call.attended = attended.data_ptr()
        return _with_block(call, x, block, out, attended)

    def up_to_experts(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and norm(h), as x [..., hidden] each, from attention's `attended` as in `goes_on`."""
        h = torch.empty_like(x)
        normed = torch.empty_like(x)
        call = self._begun(x)
        call.attended = attended.data_ptr()
        call.h = h.data_ptr()
        call.normed = normed.data_ptr()
        run_layers([Ready(call, h, None, attended)])
        return h, normed

    def _begun(self, x: Tensor) -> _Layer:
        if x.shape[-1] != self._call.hidden or x.dtype != torch.bfloat16 or not x.is_contiguous():
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: contiguous bfloat16 [..., {self._call.hidden}] fits")
        call = _Layer.from_buffer_copy(self._call)
        call.tokens = x.numel() // x.shape[-1]
        call.tiles = has_tiles(torch.bfloat16)
        call.threads = torch.get_num_threads()
        call.x = x.data_ptr()
        return call


def _with_block(call: _Layer, x: Tensor, block: Block, out: Tensor, kept: object) -> Ready:
    """Set what follows attention in a layer's call."""
    call.out = out.data_ptr()
    if isinstance(block, SharedExpert):
        call.shared, call.shared_down, call.shared_gate = block.addresses
        return Ready(call, out, None, (x, kept, block))
    route, index, gates = block.choices.prepared(call.tokens, block.bias)
    experts = _Experts.from_buffer_copy(block.experts)
    call.wide = block.wide
    call.router = block.router
    call.route = ctypes.addressof(route)
    call.experts = ctypes.addressof(experts)
    if block.shared is not None:
        call.shared, call.shared_down, call.shared_gate = block.shared
    return Ready(call, out, (index, gates), (x, kept, block, route, experts))
