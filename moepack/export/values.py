"""One matrix in one version, as writers take it: its weights in BF16 or exact, its codes, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moepack.pack.spec import Version
from moepack.pack.values import Expert

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle


@dataclass(frozen=True)
class Values:
    """A decoded matrix of a version."""

    version: Version
    decoded: Any  # what the version's `decode` gave

    @staticmethod
    def of_expert(bundle: Bundle, version: str, position: int, expert: int) -> list[Values]:
        """The matrices of one expert; its digest is checked. Raises BundleError when it is damaged."""
        layer = bundle.layers[position]
        one = bundle.expert(version, layer.index, expert)
        return [Values(one.version.at(i), value) for i, value in enumerate(Expert.decode(one))]

    @staticmethod
    def of_dense(bundle: Bundle, version: str, module: str) -> Values:
        """One dense matrix; its digest is checked. Raises BundleError when it is damaged."""
        one = bundle.dense_matrix(version, module)
        return Values(one.version, one.decode())

    @cached_property
    def exact(self) -> Tensor:
        """The weights [rows, cols], float32; bfloat16 where that holds them."""
        made = self.version.dequantise(self.decoded)
        return _bf16(made) if made.dtype == np.uint16 else torch.from_numpy(made)

    @cached_property
    def weight(self) -> Tensor:
        """The weights [rows, cols] rounded to bfloat16."""
        return self.exact.to(torch.bfloat16)

    @property
    def bias(self) -> Tensor:
        """The bias [rows], bfloat16."""
        return _bf16(self.decoded.bias)

    @cached_property
    def codes(self) -> Tensor:
        """The codes of an affine version, uint8 [rows, cols]."""
        return torch.from_numpy(self.decoded.codes)

    @cached_property
    def scale(self) -> Tensor:
        """The scales of an affine version [rows, groups], bfloat16 or float16 as stored."""
        dtype = torch.float16 if self.version.scale_dtype == "F16" else torch.bfloat16
        return torch.from_numpy(self.decoded.scale.copy()).view(dtype)

    @cached_property
    def zero(self) -> Tensor:
        """The whole zero points of an affine version, uint8 [rows, groups], in codes."""
        return torch.from_numpy(self.decoded.zero >> (8 - self.version.bits))


def _bf16(bits: Any) -> Tensor:
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16)
