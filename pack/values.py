"""An expert or a dense matrix of a bundle as NumPy arrays or torch tensors.

The reference decoders make the values that FORMAT.md defines; kernels compute with the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .codec.bits import Buffer, bf16_to_float32
from .encodings.base import Stored
from .errors import BundleError, CodecError
from .spec import Matrix, Version

if TYPE_CHECKING:
    from torch import Tensor

_Exact = NDArray[np.float32] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert in one version, packed: matrices "gate_up" (or "up") and "down", biases "gate_up.bias" and so on."""

    version: Version
    matrices: Sequence[Matrix]
    extent: Buffer  # its bytes, uint8 [size], read-only
    where: str  # the extent's place, in words for messages

    def decode(self) -> Sequence[Stored]:
        """Unpack the matrices as they are stored, each as AffineMatrix, or LosslessMatrix in the lossless version.

        Raises BundleError when a lossless extent does not decode.
        """
        try:
            return self.version.decode(self.matrices, self.extent)
        except CodecError as error:
            raise BundleError.single(self.where, "codec", str(error)) from None

    def _parts(self) -> Iterator[tuple[str, _Exact]]:
        for i, (matrix, value) in enumerate(zip(self.matrices, Expert.decode(self), strict=True)):
            yield matrix.name, self.version.at(i).dequantise(value)
            if value.bias is not None:
                yield "bias" if matrix.name == "weight" else f"{matrix.name}.bias", value.bias

    def numpy(self) -> dict[str, NDArray[np.float32]]:
        """Exact weights, float32 [rows, cols] (used as W @ x), and biases if any, float32 [rows], by name.

        Raises BundleError when a lossless extent does not decode.
        """
        return {n: bf16_to_float32(p) if p.dtype == np.uint16 else p for n, p in self._parts()}  # type: ignore[arg-type, misc]

    def torch(self) -> dict[str, Tensor]:
        """Weights and biases as CPU tensors.

        Lossless weights and all biases are bfloat16, bit for bit. Other weights are float32: BF16 cannot hold their
        values. Raises BundleError when a lossless extent does not decode.
        """
        import torch

        def tensor(part: _Exact) -> Tensor:
            if part.dtype == np.uint16:
                return torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16)
            return torch.from_numpy(part)

        return {name: tensor(part) for name, part in self._parts()}


class DenseValues(Expert):
    """One dense matrix in one version, packed: its arrays are named "weight" and "bias"."""

    def decode(self) -> Stored:
        """The matrix as it is stored; see `Expert.decode`."""
        return Expert.decode(self)[0]
