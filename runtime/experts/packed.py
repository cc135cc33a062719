"""A lossless extent that stays as it is stored, and is decoded to a fixed address when somebody needs the weights.

Its digest was checked when it was read; what only decoding shows is checked then. Decides nothing about when.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from moepack.pack.codec import exponent_fast
from moepack.pack.codec.bits import Bf16Bits, Buffer
from moepack.pack.codec.lossless import directory
from moepack.pack.errors import BundleError, CodecError
from moepack.pack.spec import ExpertLayer
from moepack.runtime.kernels.forms import Form


class PackedExtent:
    """One expert's extent in memory.

    Attributes:
        extent: uint8, exactly the extent.
    """

    def __init__(self, extent: Tensor, layer: ExpertLayer, forms: Sequence[Form], target: Tensor, where: str) -> None:
        """Look at nothing yet.

        Args:
            extent: uint8, exactly the extent.
            layer: whose expert it is.
            forms: where each matrix stands, once decoded.
            target: uint8, where they are decoded to: an address that stays.
            where: file, layer, expert and version, for errors.
        """
        self.extent, self._layer, self._forms, self._target, self._where = extent, layer, tuple(forms), target, where
        self._parts: list[tuple[Buffer, Bf16Bits | None]] | None = None
        self._opened: list[Any] = [None] * len(layer.matrices)

    def _part(self, matrix: int) -> tuple[Buffer, Bf16Bits | None]:
        if self._parts is None:
            try:
                self._parts = directory(self._layer.matrices, self.extent.numpy())
            except CodecError as error:
                raise self.damaged(str(error)) from None
        return self._parts[matrix]

    def damaged(self, why: str) -> BundleError:
        """What to raise for bytes that are no coded matrix."""
        return BundleError.single(self._where, "codec", why)

    def opened(self, matrix: int) -> int:
        """The address of what a kernel decodes one matrix from (affine_native.CodedExperts); 0 where none can.

        Raises:
            BundleError: when the extent is not well formed.
        """
        if self._opened[matrix] is None:
            if (native := _native()) is None:
                return 0
            coded = self._part(matrix)[0]
            at = self._target.data_ptr() + self._forms[matrix].low
            opened = native.open_coded(coded, self._layer.matrices[matrix].weights, at)
            self._opened[matrix] = opened, opened.address if opened else 0
        return int(self._opened[matrix][1])

    def bias(self, matrix: int) -> None:
        """Write one matrix's bias, if it has any, to its place."""
        if (at := self._forms[matrix].bias) < 0:
            return
        if (bias := self._part(matrix)[1]) is not None:
            self._target.numpy()[at : at + bias.nbytes].view(np.uint16)[:] = bias

    def decode(self, matrix: int, threads: int | None) -> None:
        """Write one matrix and its bias to their places; releases the GIL.

        Args:
            matrix: which.
            threads: how many to use.

        Raises:
            BundleError: when the extent is not well formed.
        """
        low, count = self._forms[matrix].low, 2 * self._layer.matrices[matrix].weights
        try:
            exponent_fast.decode_into(
                self._part(matrix)[0], self._target.numpy()[low : low + count].view(np.uint16), threads
            )
        except CodecError as error:
            raise self.damaged(str(error)) from None
        self.bias(matrix)


def _native() -> ModuleType | None:
    engine = exponent_fast.engine()
    return engine if hasattr(engine, "open_coded") else None
