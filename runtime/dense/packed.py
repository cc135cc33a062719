"""A linear map whose weights are the packed bytes of a version. It replaces `nn.Linear` in a model.

The kernels that run experts multiply by the packed bytes. Where there are none, and where the input is to have a
gradient, torch dequantises the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moepack.pack.errors import InputError
from moepack.pack.spec import Matrix, Version
from moepack.runtime.experts import backends
from moepack.runtime.experts.op import enter
from moepack.runtime.kernels.by_torch import FLOATS, ROWS, TOKENS
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.forms import Form, compiled, form_at
from moepack.runtime.kernels.reference import Sections, dequantise, section, sections_of

if TYPE_CHECKING:
    from moepack.runtime.kernels.dense_native import MatrixGroup


class PackedLinear(nn.Module):
    """The linear map y = W x + b, with packed W."""

    packed: Tensor  # uint8, the extent with W and b; empty until weights are loaded

    def __init__(self, matrix: Matrix, version: Version) -> None:
        super().__init__()
        self.matrix = matrix
        self.version = version
        self.in_features = matrix.cols
        self.out_features = matrix.rows
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        (self._sections,) = sections_of((matrix,), version)
        self._form: Form | None = None  # as kernels of a GPU read it
        self.group: Any = None  # a linears.Group; `which` is the number of this map in it
        self.which, self._number = 0, enter(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b for x [..., cols], in the dtype of x."""
        if torch.compiler.is_compiling():
            made: Tensor = torch.ops.moepack.dense(x, self._number, self.out_features)
            return made
        learns = x.requires_grad and torch.is_grad_enabled()
        if not learns and backends.backend(x.device) == "triton" and compiled([self.version]):
            return self._on_gpu(x)
        if self.group is None or learns or x.device.type != "cpu":
            weights = self.weights(x.dtype)
            bias = section(self.packed, self._sections["bias"]).to(x.dtype) if self.matrix.bias else None
            return nn.functional.linear(x, weights, bias)
        if x.dtype not in FLOATS:
            return self._in_float32(x)
        out: Tensor = self.group.run(self.which, x)
        return out

    def _in_float32(self, x: Tensor) -> Tensor:
        """`forward` of an x that the kernels do not take, in no more memory than `multiply` has beside it."""
        from moepack.runtime.kernels.dense_native import dense, dense_by_torch

        of = self.group.matrices((self.which,))
        rows = x.detach().reshape(-1, self.in_features)
        out = rows.new_empty(len(rows), self.out_features)
        if len(rows) > of.limits[torch.float32][0]:
            dense_by_torch(of, 0, rows, out, torch.get_num_threads())
        else:
            some = max(1, min(TOKENS, ROWS * self.in_features // self.out_features))
            for start in range(0, len(rows), some):
                part = slice(start, start + some)
                out[part] = dense(of, rows[part].float())[0]
        return out.view(*x.shape[:-1], self.out_features)

    def _on_gpu(self, x: Tensor) -> Tensor:
        """`forward` by kernels that read the packed bytes (affine_triton.py, `dense`)."""
        from moepack.runtime.kernels.affine_triton import TERMS, dense

        form = self._read_on_gpu()
        rows = x.detach().reshape(-1, self.in_features)
        rows = (rows if x.dtype in TERMS else rows.float()).contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        if len(rows):
            with current(x.device):
                dense(self.matrix, form, self.packed, rows, out)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _read_on_gpu(self) -> Form:
        """Return how kernels of a GPU read the packed bytes."""
        self._check_loaded()
        ends = {kind: s.offset for kind, s in self._sections.items()}
        form = self._form = self._form or form_at(self.version, 0, ends)
        return form

    def unpacked(self) -> Tensor:
        """Return W in BF16, [rows, cols], by a launch on a GPU."""
        from moepack.runtime.kernels.affine_triton import unpacked

        form = self._read_on_gpu()
        with current(self.packed.device):
            return unpacked(self.matrix, form, self.packed)

    def lie_at(self, extent: Tensor, sections: Sections) -> None:
        """Read the weights from another extent, where they are already."""
        self.packed = extent
        self._sections = sections
        self._form = None

    def _check_loaded(self) -> None:
        if not self.packed.numel():
            raise InputError("a packed linear map was called before its weights were loaded")

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised W, [rows, cols]."""
        self._check_loaded()
        return dequantise(self.packed, self._sections, self.matrix, self.version, dtype)

    def extra_repr(self) -> str:
        """Add the version to torch's own text."""
        name = self.version.name
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.matrix.bias}, {name}"


def joined(maps: Sequence[PackedLinear]) -> PackedLinear | None:
    """Move maps of one input into one extent, of which each keeps its rows; return the map of all rows.

    None, and nothing moves, if the maps differ in more than rows, or kernels could not read a map's rows there.
    """
    if len({(m.version, m.in_features, m.matrix.bias, m.packed.device) for m in maps}) != 1:
        return None
    first = maps[0]
    matrix = replace(first.matrix, rows=sum(m.out_features for m in maps))
    whole = PackedLinear(matrix, first.version)
    ends = {kind: s.offset for kind, s in whole._sections.items()}
    moved: list[Sections] = []
    for m in maps:
        moved.append({kind: replace(s, offset=ends[kind]) for kind, s in m._sections.items()})
        ends = {kind: s.end for kind, s in moved[-1].items()}
    apart = all(s.offset % 16 == 0 for sections in moved for s in sections.values())
    if not apart or any(end != whole._sections[kind].end for kind, end in ends.items()):
        return None
    extent = first.packed.new_zeros(first.version.resident_size((matrix,)))
    for m, sections in zip(maps, moved, strict=True):
        for kind, s in sections.items():
            extent[s.offset : s.end] = m.packed[m._sections[kind].offset : m._sections[kind].end]
        m.lie_at(extent, sections)
    whole.lie_at(extent, whole._sections)
    return whole


def matrices_of(owner: nn.Module, *names: str) -> MatrixGroup | None:
    """Return the matrices of linear maps that share an input with no others, as kernels read them; else None."""
    modules = [owner._modules.get(name) for name in names]
    places: list[Any] = [m if isinstance(m, PackedLinear) else getattr(m, "_moepack_place", None) for m in modules]
    group = getattr(places[0], "group", None)
    if group is None or group.size != len(places) or any(p is None or p.group is not group for p in places):
        return None
    made: MatrixGroup = group.matrices(tuple(p.which for p in places))
    return made
