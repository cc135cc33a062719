"""A lossless extent on a GPU as it is stored, and what its decoder is told: found on the host before it went there.

Decides nothing about when it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.pack.codec.bits import Buffer
from moepack.pack.codec.exponent import HEADER, parse
from moepack.pack.codec.lossless import directory
from moepack.pack.errors import BundleError
from moepack.pack.spec import ExpertLayer
from moepack.runtime.kernels.forms import Form

Copy = Callable[[Tensor, Tensor], None]  # to, from: on the current stream


@dataclass(frozen=True, slots=True)
class CodedPart:
    """One coded matrix inside an extent.

    Attributes:
        at, size: of its coded bytes.
        header: a copy of their first 48.
        bias: where its bias begins; -1 without one.
    """

    at: int
    size: int
    header: Buffer
    bias: int


def parts_of(layer: ExpertLayer, extent: Buffer) -> tuple[CodedPart, ...]:
    """The parts of an extent whose directory and whose matrices' heads are on the host.

    Raises:
        CodecError: when it is not well formed.
    """
    out = []
    for m, (coded, bias) in zip(layer.matrices, directory(layer.matrices, extent), strict=True):
        parse(coded, m.weights)
        start = extent.ctypes.data
        place = -1 if bias is None else bias.ctypes.data - start
        out.append(CodedPart(coded.ctypes.data - start, len(coded), coded[:HEADER].copy(), place))
    return tuple(out)


class GpuPackedExtent:
    """One expert's extent in device memory.

    Attributes:
        extent: uint8, exactly the extent.
        where: file, layer, expert and version, for errors.
    """

    def __init__(
        self, extent: Tensor, parts: Sequence[CodedPart], layer: ExpertLayer, forms: Sequence[Form], target: Tensor,
        where: str,
    ) -> None:  # fmt: skip
        """Read nothing.

        Args:
            extent: uint8, exactly the extent.
            parts: of it.
            layer: whose expert it is.
            forms: where each matrix stands, once decoded.
            target: uint8, where they are decoded to.
            where: file, layer, expert and version, for errors.
        """
        self.extent, self.where = extent, where
        self._parts, self._layer, self._forms, self._target = tuple(parts), layer, tuple(forms), target

    def job(self, matrix: int, copy: Copy) -> Any:
        """What decodes one matrix to its place; `copy` is asked for its bias. Both on the current stream.

        Raises:
            BundleError: for bytes that are no coded matrix.
        """
        from moepack.runtime.kernels.exponent_triton import DecodeJob

        part, form, m = self._parts[matrix], self._forms[matrix], self._layer.matrices[matrix]
        if part.bias >= 0:
            size = 2 * m.rows
            copy(self._target[form.bias : form.bias + size], self.extent[part.bias : part.bias + size])
        out = self._target[form.low : form.low + 2 * m.weights].view(torch.bfloat16)
        return DecodeJob(self.extent[part.at : part.at + part.size], part.header, out)

    def damaged(self, why: str = "a matrix does not decode") -> BundleError:
        """What to raise for bytes that are no coded matrix."""
        return BundleError.single(self.where, "codec", why)
