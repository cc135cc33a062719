"""A linear map whose weights are a version's packed bytes: what stands in a model in place of torch's.

On a CPU the compiled kernels multiply by the bytes as they lie; elsewhere the weights are dequantised for each call.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from moepack.pack.errors import InputError
from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.reference import dequantise, section, sections_of

_numbers = itertools.count()
_entered: weakref.WeakValueDictionary[int, PackedLinear] = weakref.WeakValueDictionary()


class PackedLinear(nn.Module):
    """y = W x + b with W packed.

    Attributes:
        in_features, out_features: columns and rows.
        packed: uint8, the extent; empty until weights are loaded.
    """

    packed: Tensor

    def __init__(self, matrix: Matrix, version: Version) -> None:
        super().__init__()
        self.matrix, self.version = matrix, version
        self.in_features, self.out_features = matrix.cols, matrix.rows
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        (self._sections,) = sections_of((matrix,), version)
        self.group: Any = None  # linears.Group, and which of it this map is
        self.which, self._number = 0, next(_numbers)
        _entered[self._number] = self

    def forward(self, x: Tensor) -> Tensor:
        """Of x [..., cols], in its dtype."""
        if torch.compiler.is_compiling():
            made: Tensor = torch.ops.moepack.dense(x, self._number, self.out_features)
            return made
        if self.group is None or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
            return nn.functional.linear(x, self.weights(x.dtype), self._bias(x.dtype))
        if x.dtype in (torch.float32, torch.bfloat16):
            out: Tensor = self.group.run(self.which, x)
            return out
        wide: Tensor = self.group.run(self.which, x.float())
        return wide.to(x.dtype)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """[rows, cols], dequantised."""
        if not self.packed.numel():
            raise InputError("a packed linear map was called before its weights were loaded")
        return dequantise(self.packed, self._sections, self.matrix, self.version, dtype)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        return section(self.packed, self._sections["bias"]).to(dtype) if self.matrix.bias else None

    def extra_repr(self) -> str:
        """As torch's own, and the version."""
        name = self.version.name
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.matrix.bias}, {name}"


@torch.library.custom_op("moepack::dense", mutates_args=())
def dense(x: Tensor, number: int, rows: int) -> Tensor:
    """A packed linear map in a compiled pass: that with this number, which has `rows` rows."""
    module = _entered.get(number)
    if module is None:
        raise InputError("the model of a compiled pass has gone: load the bundle and compile it again")
    return module.forward(x).contiguous()


@dense.register_fake
def _(x: Tensor, number: int, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)
