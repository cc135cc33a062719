"""An entropy-coded extent that stays coded in memory, and is decoded when its layer runs.

The digest was checked when the extent was read. Decoding raises errors that only decoding can find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.pack.codec import exponent_fast
from moepack.pack.codec.bits import Bf16Bits, Buffer
from moepack.pack.codec.exponent import HEADER, parse
from moepack.pack.codec.lossless import directory
from moepack.pack.errors import BundleError, CodecError
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.kernels.forms import Form

Copy = Callable[[Tensor, Tensor], None]  # to, from: on the current stream


@dataclass(eq=False)
class _Stored:
    """One expert's extent in memory."""

    extent: Tensor  # uint8, exactly the extent
    layer: ExpertLayer
    forms: Sequence[Form]  # the place of each decoded matrix in the memory that they are decoded to
    where: str  # file, layer, expert and version, for errors

    def damaged(self, why: str = "a matrix does not decode") -> BundleError:
        """Return the error for bytes that are not a coded matrix."""
        return BundleError.single(self.where, "codec", why)


@dataclass(eq=False)
class PackedExtent(_Stored):
    """One BF16 expert's extent in host memory. Methods raise BundleError when the extent is malformed."""

    target: Tensor  # uint8, the memory that matrices are decoded to; its address never changes

    def __post_init__(self) -> None:
        self._opened: list[Any] = [None] * len(self.layer.matrices)

    @cached_property
    def _parts(self) -> list[tuple[Buffer, Bf16Bits | None]]:
        try:
            return directory(self.layer.matrices, self.extent.numpy())
        except CodecError as error:
            raise self.damaged(str(error)) from None

    def opened(self, matrix: int) -> int:
        """The address from which a kernel can decode one matrix (affine_native.CodedExperts); 0 if no kernel can."""
        if self._opened[matrix] is None:
            if (native := _native()) is None:
                return 0
            at = self.target.data_ptr() + self.forms[matrix].low
            opened = native.open_coded(self._parts[matrix][0], self.layer.matrices[matrix].weights, at)
            self._opened[matrix] = opened, opened.address if opened else 0
        return int(self._opened[matrix][1])

    def bias(self, matrix: int) -> None:
        """Write the bias of a matrix, if it has one, to its place in `target`."""
        at = self.forms[matrix].bias
        if at >= 0 and (bias := self._parts[matrix][1]) is not None:
            self.target.numpy()[at : at + bias.nbytes].view(np.uint16)[:] = bias

    def decode(self, matrix: int, threads: int | None) -> None:
        """Decode one matrix to its place in `target`, and write its bias. Releases the GIL."""
        low = self.forms[matrix].low
        count = 2 * self.layer.matrices[matrix].weights
        room = self.target.numpy()[low : low + count].view(np.uint16)
        try:
            exponent_fast.decode_into(self._parts[matrix][0], room, threads)
        except CodecError as error:
            raise self.damaged(str(error)) from None
        self.bias(matrix)


@dataclass(eq=False)
class RestoredExtent(_Stored):
    """One expert's extent of any encoding in host memory, with the methods of `PackedExtent` for one page an expert."""

    target: Tensor
    version: Version

    def opened(self, matrix: int) -> int:
        """Return 0: no kernel decodes the matrices of such an expert one by one."""
        return 0

    def decode(self, page: int, threads: int | None) -> None:
        """Write the whole expert to `target` as it is in memory. Raises BundleError when the extent is malformed."""
        try:
            self.version.restore(self.layer.matrices, self.extent.numpy(), self.target.numpy(), threads)
        except CodecError as error:
            raise self.damaged(str(error)) from None


def _native() -> ModuleType | None:
    engine = exponent_fast.engine()
    return engine if hasattr(engine, "open_coded") else None


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
class GpuPackedExtent(_Stored):
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
