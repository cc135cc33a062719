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
class Expert:
    """One expert in one version, still packed.

    Attributes:
        layer: what its layer's experts have in common: names and shapes of their matrices.
        version: which one it is.
        extent: its bytes, uint8 [size], read-only.
        where: its place, for messages.
    """

    layer: ExpertLayer
    version: Version
    extent: Buffer
    where: str

    def decode(self) -> Sequence[Any]:
        """Its matrices as they are stored: AffineMatrix, or LosslessMatrix of the lossless version.

        Raises:
            BundleError: when a lossless extent does not decode.
        """
        return _decode(self.layer.matrices, self.version, self.extent, self.where)

    def numpy(self) -> dict[str, NDArray[np.float32]]:
        """Weights "gate_up" (or "up") and "down", float32 [rows, cols], used as W @ x, and where there are any their
        biases "gate_up.bias" and "down.bias", float32 [rows]; every value is exact.

        Raises:
            BundleError: as `decode`.
        """
        return {name: _numpy(part) for name, part in _parts(self.version, self._names(), self.decode())}

    def torch(self) -> dict[str, Tensor]:
        """The same on the CPU: bfloat16 of the lossless version and of biases, to the bit, and float32 of others, whose
        values BF16 does not hold.

        Raises:
            BundleError: as `decode`.
        """
        return {name: _torch(part) for name, part in _parts(self.version, self._names(), self.decode())}

    def _names(self) -> list[tuple[str, str]]:
        return [(m.name, f"{m.name}.bias") for m in self.layer.matrices]


@dataclass(frozen=True, slots=True)
class DenseValues:
    """One dense matrix in one version, still packed.

    Attributes:
        described: its module and shape.
        version: which one it is.
        extent: its bytes, uint8 [size], read-only.
        where: its place, for messages.
    """

    described: DenseMatrix
    version: Version
    extent: Buffer
    where: str

    def decode(self) -> Any:
        """The matrix as it is stored; see `Expert.decode`."""
        return _decode((self.described.matrix,), self.version, self.extent, self.where)[0]

    def numpy(self) -> dict[str, NDArray[np.float32]]:
        """ "weight", float32 [rows, cols], used as W @ x, and where there is one "bias", float32 [rows]; exact.

        Raises:
            BundleError: when a lossless extent does not decode.
        """
        return {name: _numpy(part) for name, part in _parts(self.version, [_LINEAR], [self.decode()])}

    def torch(self) -> dict[str, Tensor]:
        """The same on the CPU, of the dtypes that `Expert.torch` has.

        Raises:
            BundleError: as `numpy`.
        """
        return {name: _torch(part) for name, part in _parts(self.version, [_LINEAR], [self.decode()])}


_LINEAR = ("weight", "bias")


def _decode(matrices: tuple[Matrix, ...], version: Version, extent: Buffer, where: str) -> Sequence[Any]:
    try:
        return version.decode(matrices, extent)
    except CodecError as error:
        raise BundleError.single(where, "codec", str(error)) from None


def _parts(version: Version, names: Sequence[tuple[str, str]], values: Sequence[Any]) -> Iterator[tuple[str, _Exact]]:
    """Weights and biases by their names: float32, or BF16 bits."""
    for (weight, bias), value in zip(names, values, strict=True):
        yield weight, version.dequantise(value)
        if value.bias is not None:
            yield bias, value.bias


def _numpy(part: _Exact) -> NDArray[np.float32]:
    return bf16_to_float32(part) if part.dtype == np.uint16 else part  # type: ignore[arg-type, return-value]


def _torch(part: _Exact) -> Tensor:
    import torch

    if part.dtype == np.uint16:
        return torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(part)
