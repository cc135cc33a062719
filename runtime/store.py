"""The backing store: extents on the host, checked against their digests before anyone sees them.

This form maps the bundle's files and copies what is asked for. It decides nothing about what should be resident.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moepack.pack.errors import BundleError, CodecError
from moepack.pack.lossless import LosslessMatrix, decode_lossless
from moepack.pack.reader import Bundle


class BackingStore:
    """Reads extents of an open bundle. `position` counts the layers that have experts."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle

    def extent(self, version: str, position: int, expert: int, device: torch.device) -> Tensor:
        """A copy of one extent on `device`, uint8 [bytes], beginning on a multiple of 64.

        Raises:
            BundleError: when its bytes do not match their digest.
        """
        view = self.bundle.extent(version, position, expert)
        room = torch.empty(len(view), dtype=torch.uint8)  # begins on a multiple of 64, which kernels rely on
        np.copyto(room.numpy(), view)
        return room.to(device)

    def lossless(self, position: int, expert: int) -> list[LosslessMatrix]:
        """The decoded lossless version of one expert.

        Raises:
            BundleError: when its bytes do not match their digest or do not decode.
        """
        view = self.bundle.extent("bf16", position, expert)
        layer = self.bundle.layers[position]
        try:
            return decode_lossless(layer.matrices, view)
        except CodecError as error:
            where = f"{self.bundle.path}: layer {layer.index}, expert {expert}, version bf16"
            raise BundleError.single(where, "codec", str(error)) from None
