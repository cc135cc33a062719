"""An expert or a dense matrix of a bundle as NumPy arrays or torch tensors.

Values are FORMAT.md's, by the reference decoders; kernels compute with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .codec.bits import Buffer, bf16_to_float32
from .errors import BundleError, CodecError
from .spec import DenseMatrix, ExpertLayer, Matrix, Version

if TYPE_CHECKING:
    from torch import Tensor

_Exact = NDArray[np.float32] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class _Packed:
    """Matrices of one extent, still packed."""

    version: Version
    extent: Buffer  # its bytes, uint8 [size], read-only
    where: str  # its place, for messages

    def _named(self) -> Sequence[tuple[Matrix, str, str]]:
        """Each matrix, and the names of its weight and bias."""
        raise NotImplementedError

    def decode(self) -> Any:
        """The matrices as they are stored: AffineMatrix, or LosslessMatrix of the lossless version.

        Raises:
            BundleError: when a lossless extent does not decode.
        """
        try:
            return self.version.decode([matrix for matrix, _, _ in self._named()], self.extent)
        except CodecError as error:
            raise BundleError.single(self.where, "codec", str(error)) from None

    def _parts(self) -> Iterator[tuple[str, _Exact]]:
        """Weights and biases by their names: float32, or BF16 bits."""
        for (_, weight, bias), value in zip(self._named(), _Packed.decode(self), strict=True):
            yield weight, self.version.dequantise(value)
            if value.bias is not None:
                yield bias, value.bias

    def numpy(self) -> dict[str, NDArray[np.float32]]:
        """Weights, float32 [rows, cols], used as W @ x, and biases, float32 [rows], where there are any; exact.

        Raises:
            BundleError: as `decode`.
        """
        return {n: bf16_to_float32(p) if p.dtype == np.uint16 else p for n, p in self._parts()}  # type: ignore[arg-type, misc]

    def torch(self) -> dict[str, Tensor]:
        """The same on the CPU: bfloat16 of the lossless version and of biases, to the bit.

        Other weights are float32, because BF16 does not hold their values.

        Raises:
            BundleError: as `decode`.
        """
        import torch

        made = {}
        for name, part in self._parts():
            bf16 = part.dtype == np.uint16
            made[name] = (
                torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16) if bf16 else torch.from_numpy(part)
            )
        return made


@dataclass(frozen=True, slots=True)
class Expert(_Packed):
    """One expert in one version: "gate_up" (or "up") and "down", and biases "gate_up.bias" and "down.bias"."""

    layer: ExpertLayer  # its layer, with the names and shapes of its matrices

    def _named(self) -> Sequence[tuple[Matrix, str, str]]:
        return [(m, m.name, f"{m.name}.bias") for m in self.layer.matrices]


@dataclass(frozen=True, slots=True)
class DenseValues(_Packed):
    """One dense matrix in one version: "weight" and "bias"."""

    described: DenseMatrix  # its module and shape

    def _named(self) -> Sequence[tuple[Matrix, str, str]]:
        return ((self.described.matrix, "weight", "bias"),)

    def decode(self) -> Any:
        """The matrix as it is stored; see `Expert.decode`."""
        return _Packed.decode(self)[0]
