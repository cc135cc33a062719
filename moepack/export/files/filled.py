"""A file of tensors whose bytes are written in any order. What the bytes mean is not known here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.sections import align

# Brings a file's bytes to the disk; macOS has no call that leaves its times alone.
to_disk: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
SYNC = 64 << 20  # bytes after which a file is brought to the disk, so that it writes while others are made


class FilledFile:
    """A file that has its header and its size from the start."""

    def __init__(
        self,
        path: Path,
        head: bytes,
        tensors: Mapping[str, int],
        alignment: int,
        sync: Callable[[int], None],
    ) -> None:
        """Make the file.

        Args:
            path: its name.
            head: its first bytes.
            tensors: the bytes of each by name, in their order, each at a multiple of `alignment` after the header.
            alignment: see `tensors`.
            sync: called with the file's descriptor each time SYNC bytes were written.
        """
        self._path = path
        at = len(head)
        self._places: dict[str, tuple[int, int]] = {}  # offset and bytes
        for name, size in tensors.items():
            self._places[name] = at, size
            at += align(size, alignment)
        self._lock = threading.Lock()
        self._unsynced = 0
        self._sync = sync
        self._left = {name: size for name, size in tensors.items() if size}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.truncate(self._fd, at)
        self._write(memoryview(head), 0)

    @property
    def whole(self) -> bool:
        """Whether all bytes were written."""
        return not self._left

    def put(self, name: str, data: npt.NDArray[np.uint8], at: int = 0) -> None:
        """Write bytes of a tensor, uint8 [n], from a byte of it on; several threads may.

        Raises InputError if the tensor has not so many.
        """
        begin, size = self._places[name]
        if at + data.size > size or self._left.get(name, 0) < data.size:
            raise InputError(f"{self._path}: {name} has more bytes than its description: the bundle is damaged")
        if not data.size:
            return
        view = np.ascontiguousarray(data).data
        for i in range(0, data.size, SYNC):
            self._write(view[i : i + SYNC], begin + at + i)
            with self._lock:
                self._unsynced += len(view[i : i + SYNC])
                sync = self._unsynced >= SYNC
                self._unsynced *= not sync
            if sync:
                self._sync(self._fd)
        with self._lock:
            self._left[name] -= data.size
            if not self._left[name]:
                del self._left[name]

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            done = os.pwrite(self._fd, data, at)
            data = data[done:]
            at = at + done

    def close(self) -> None:
        """Close the file, whole or not."""
        os.close(self._fd)

    def check(self) -> None:
        """Raise InputError if bytes of a tensor were not written."""
        for name, left in self._left.items():
            raise InputError(f"{self._path}: {name}: {left} bytes are not in the bundle: it is damaged")
