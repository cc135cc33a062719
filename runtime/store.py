"""The backing store: extents on the host, checked against their digests before anyone sees them.

Extents are either copied from the bundle's mapped files, or read from the files into memory that the caller has. It
decides nothing about what should be resident.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import BundleError, CodecError
from moepack.pack.lossless import LosslessMatrix, decode_lossless
from moepack.pack.reader import Bundle
from moepack.pack.spec import expert_file

CHUNK = 1 << 20  # bytes read, and added to the digest, at a time: they are still in cache when they are digested


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one extent stands, and what its bytes must be.

    Attributes:
        file: a descriptor open for reading.
        offset: of its first byte.
        size: its bytes.
        sha256: their digest, in hexadecimal.
        where: file, layer, expert and version, for errors.
    """

    file: int
    offset: int
    size: int
    sha256: str
    where: str

    def read_into(self, out: npt.NDArray[np.uint8], before: Callable[[int], None] | None = None) -> None:
        """Read the extent into the first `size` bytes of `out`, then check its digest. Releases the GIL.

        Reads, and does not map: a file that is cut short is then an error and not a signal.

        Args:
            out: uint8, contiguous.
            before: called with the size of each chunk before it is read; what it raises ends the read.

        Raises:
            BundleError: when the file cannot be read to the end, or its bytes do not match their digest; `out` then
                holds bytes that nobody may use.
        """
        digest, view, done = hashlib.sha256(), out.data[: self.size], 0
        while done < self.size:
            part = view[done : done + CHUNK]
            if before is not None:
                before(len(part))
            try:
                got = os.preadv(self.file, [part], self.offset + done)
            except OSError as error:
                raise BundleError.single(self.where, "read", f"cannot be read: {error.strerror}") from None
            if not got:
                raise BundleError.single(self.where, "size", "its file ends before it does")
            digest.update(part[:got])
            done += got
        if digest.hexdigest() != self.sha256:
            raise BundleError.single(self.where, "digest", "its bytes do not match their digest")


class BackingStore:
    """Reads extents of an open bundle. `position` counts the layers that have experts."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._lock = threading.Lock()
        self._files: dict[tuple[str, int], int] = {}

    def stored(self, version: str, position: int, expert: int) -> Stored:
        """Where an extent stands. Its file is opened the first time, and its header checked.

        Raises:
            BundleError: when the file is missing or damaged.
        """
        with self._lock:
            described = self.bundle.layer_file(version, position)
            layer = self.bundle.layers[position]
            key, name = (version, position), expert_file(version, layer.index)
            if key not in self._files:
                try:
                    self._files[key] = os.open(self.bundle.path / name, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise BundleError.single(name, "missing", f"cannot be read: {error.strerror}") from None
            where = f"{name}: layer {layer.index}, expert {expert}, version {version}"
            return Stored(
                self._files[key],
                described.offset(expert),
                described.extent_size(expert),
                described.digests[expert],
                where,
            )

    def close(self) -> None:
        """Close the files that `stored` opened."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

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
