"""One matrix in one version, as writers take it: its weights in BF16 or exact, its codes, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.codec.affine import section_array
from moepack.pack.codec.bits import from_blocks
from moepack.pack.codec.rotation import turned_back
from moepack.pack.encodings.affine import Affine
from moepack.pack.spec import Version
from moepack.pack.values import Expert

from .words import words

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle


class _Packed:
    """An expert or a dense matrix, decoded once where that is asked for."""

    def __init__(self, one: Expert) -> None:
        self.one = one

    @cached_property
    def decoded(self) -> Any:
        return Expert.decode(self.one)


@dataclass(frozen=True)
class Values:
    """A matrix of a version."""

    version: Version
    packed: _Packed
    number: int  # of the matrix in it

    @staticmethod
    def of_expert(bundle: Bundle, version: str, position: int, expert: int) -> list[Values]:
        """The matrices of one expert; its digest is checked. Raises BundleError when it is damaged."""
        layer = bundle.layers[position]
        packed = _Packed(bundle.expert(version, layer.index, expert))
        return [Values(packed.one.version.at(i), packed, i) for i in range(len(layer.matrices))]

    @staticmethod
    def of_dense(bundle: Bundle, version: str, module: str) -> Values:
        """One dense matrix; its digest is checked. Raises BundleError when it is damaged."""
        one = bundle.dense_matrix(version, module)
        return Values(one.version, _Packed(one), 0)

    @property
    def decoded(self) -> Any:
        """What the version's `decode` gives. Raises BundleError where that fails."""
        return self.packed.decoded[self.number]

    def _part(self, kind: str) -> npt.NDArray[Any]:
        """A section of an affine version, [rows, n]."""
        one = self.packed.one
        (section,) = [s for s in one.version.sections(one.matrices) if (s.kind, s.matrix) == (kind, self.number)]
        return from_blocks(section_array(one.extent, section), one.matrices[self.number].rows)

    def words(self) -> Tensor:
        """The codes of an affine version in 32-bit words along a row (words.py), int32 [rows, n].

        Versions of one plane keep them so; no code is unpacked.
        """
        bits, cols = self.version.bits, self.packed.one.matrices[self.number].cols
        if isinstance(self.version, Affine) and self.version.planes == (bits,) and cols * bits % 32 == 0:
            return torch.from_numpy(self._part("plane0").view(np.int32))
        return words(self.codes, bits)

    @cached_property
    def exact(self) -> Tensor:
        """The weights [rows, cols], float32, of a rotated matrix turned back; bfloat16 where that holds them."""
        made = turned_back(self.packed.one.version, self.number, self.version.dequantise(self.decoded))
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
        return torch.from_numpy(self._part("scale")).view(dtype)

    @cached_property
    def zero(self) -> Tensor:
        """The whole zero points of an affine version, uint8 [rows, groups], in codes."""
        return torch.from_numpy(self._part("zero") >> (8 - self.version.bits))


def _bf16(bits: Any) -> Tensor:
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16)
