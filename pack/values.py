"""An expert of a bundle as arrays of numbers: what a version's weights are, for NumPy or torch.

The values are FORMAT.md's, by the reference decoders; kernels compute with the same ones. Decides nothing about
serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .affine import AffineMatrix, Buffer, bf16_to_float32, decode_affine
from .errors import BundleError, CodecError
from .lossless import LosslessMatrix, decode_lossless
from .spec import ExpertLayer, Version

if TYPE_CHECKING:
    from torch import Tensor


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

    def decode(self) -> Sequence[AffineMatrix | LosslessMatrix]:
        """Its matrices as they are stored: codes, scales and zero points, or BF16 bits of the lossless version.

        Raises:
            BundleError: when a lossless extent does not decode.
        """
        if not self.version.is_lossless:
            return decode_affine(self.layer.matrices, self.version, self.extent)
        try:
            return decode_lossless(self.layer.matrices, self.extent)
        except CodecError as error:
            raise BundleError.single(self.where, "codec", str(error)) from None

    def numpy(self) -> dict[str, NDArray[np.float32]]:
        """Weights "gate_up" (or "up") and "down", float32 [rows, cols], used as W @ x, and where there are any their
        biases "gate_up.bias" and "down.bias", float32 [rows]; every value is exact.

        Raises:
            BundleError: as `decode`.
        """
        out: dict[str, NDArray[np.float32]] = {}
        for m, value in zip(self.layer.matrices, self.decode(), strict=True):
            if isinstance(value, LosslessMatrix):
                out[m.name] = bf16_to_float32(value.weight)
            else:
                out[m.name] = value.dequantise(self.version)
            if value.bias is not None:
                out[f"{m.name}.bias"] = bf16_to_float32(value.bias)
        return out

    def torch(self) -> dict[str, Tensor]:
        """The same on the CPU: bfloat16 of the lossless version and of biases, to the bit, and float32 of others, whose
        values BF16 does not hold.

        Raises:
            BundleError: as `decode`.
        """
        import torch

        def exact(bits: NDArray[np.uint16]) -> Tensor:
            return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)

        out: dict[str, Tensor] = {}
        for m, value in zip(self.layer.matrices, self.decode(), strict=True):
            if isinstance(value, LosslessMatrix):
                out[m.name] = exact(value.weight)
            else:
                out[m.name] = torch.from_numpy(value.dequantise(self.version))
            if value.bias is not None:
                out[f"{m.name}.bias"] = exact(value.bias)
        return out
