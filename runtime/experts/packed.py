"""An entropy-coded extent that stays coded in memory, and is decoded before its layer runs.

The digest was checked when the extent was read. Decoding raises errors that only decoding can find.
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


@dataclass(eq=False)
class CodedExtent:
    """One expert's coded extent in memory."""

    extent: Tensor  # uint8, exactly the extent
    layer: ExpertLayer
    forms: Sequence[Form]  # the place of each matrix in the memory to which the expert is decoded
    where: str  # file, layer, expert and version, for errors

    def damaged(self, why: str = "a matrix does not decode") -> BundleError:
        """Return the error for bytes that are not a coded matrix."""
        return BundleError.single(self.where, "codec", why)


@dataclass(frozen=True, slots=True)
class CodedPart:
    """One coded matrix inside an extent."""

    at: int  # offset of the coded bytes in the extent
    size: int  # number of coded bytes
    header: Buffer  # a copy of the first 48 coded bytes
    bias: int  # offset of the bias in the extent; -1 without a bias


def parts_of(layer: ExpertLayer, extent: Buffer) -> tuple[CodedPart, ...]:
    """Locate the coded matrices of an extent, of which the host has the directory and headers. Raises CodecError."""
    out = []
    start = extent.ctypes.data
    for m, (coded, bias) in zip(layer.matrices, directory(layer.matrices, extent), strict=True):
        parse(coded, m.weights)
        place = -1 if bias is None else bias.ctypes.data - start
        out.append(CodedPart(coded.ctypes.data - start, len(coded), coded[:HEADER].copy(), place))
    return tuple(out)


@dataclass(eq=False)
class GpuPackedExtent(CodedExtent):
    """One expert's extent in device memory; `parts` locate its matrices, found on the host before the copy."""

    parts: Sequence[CodedPart]

    def job(self, matrix: int, to: Tensor, copy: Copy) -> Any:
        """Copy the bias of one matrix by `copy`, and return the job that decodes the matrix on the current stream.

        `to` is the memory that the expert is decoded to, uint8.
        """
        from moepack.runtime.kernels.exponent_triton import DecodeJob

        part = self.parts[matrix]
        form = self.forms[matrix]
        m = self.layer.matrices[matrix]
        if part.bias >= 0:
            size = 2 * m.rows
            copy(to[form.bias : form.bias + size], self.extent[part.bias : part.bias + size])
        out = to[form.low : form.low + 2 * m.weights].view(torch.bfloat16)
        return DecodeJob(self.extent[part.at : part.at + part.size], part.header, out)
