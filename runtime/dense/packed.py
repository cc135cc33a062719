"""A linear map whose weights are the packed bytes of a version. It replaces `nn.Linear` in a model.

The kernels that run experts multiply by the packed bytes. Where there are none, and where the input is to have a
gradient, torch dequantises the matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moepack.pack.errors import InputError
from moepack.pack.spec import Matrix, Version
from moepack.runtime.experts import backends
from moepack.runtime.experts.op import enter
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.forms import compiled, make_forms
from moepack.runtime.kernels.reference import dequantise, section, sections_of


class PackedLinear(nn.Module):
    """The linear map y = W x + b, with packed W."""

    packed: Tensor  # uint8, the extent with W and b; empty until weights are loaded

    def __init__(self, matrix: Matrix, version: Version) -> None:
        super().__init__()
        self.matrix, self.version = matrix, version
        self.in_features, self.out_features = matrix.cols, matrix.rows
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        (self._sections,) = sections_of((matrix,), version)
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
        known = x.dtype in (torch.float32, torch.bfloat16)
        out: Tensor = self.group.run(self.which, x if known else x.float())
        return out.to(x.dtype)

    def _on_gpu(self, x: Tensor) -> Tensor:
        """`forward` by one launch, which dequantises the weights that a program multiplies by, in registers."""
        from moepack.runtime.kernels.affine_triton import TILINGS, dense

        self._check_loaded()
        rows = x.detach().reshape(-1, self.in_features)
        rows = (rows if x.dtype in TILINGS else rows.float()).contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        if len(rows):
            (form,) = make_forms((self.matrix,), self.version)
            with current(x.device):
                dense(self.matrix, form, self.packed, rows, out)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

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
