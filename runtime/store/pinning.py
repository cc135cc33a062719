"""Pinned host memory: the ways to get it, in a chain from the best way to no pinning.

A store that fails in one way goes on to the next, and keeps the reason. cudart.py clears the error.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moepack.pack.codec.bits import Buffer

from .cudart import HOST_REGISTER_SUPPORTED, PORTABLE, READ_ONLY, READ_ONLY_SUPPORTED, CudaError, Cudart


class Mode(enum.StrEnum):
    """How extents reach the device, best way first."""

    MAPPED = "mapped"  # the files' own pages, registered: nothing is copied on the host
    REGISTERED = "registered"  # read into anonymous memory, which is then registered
    ALLOCATED = "allocated"  # read into memory that CUDA allocated
    STAGED = "staged"  # only staging buffers are pinned: every fetch reads the file


@dataclass(slots=True)
class Pinned:
    """Pinned memory, and its mode. Only the device may read MAPPED bytes: a truncated file would signal the host."""

    mode: Mode
    bytes: Buffer
    _let_go: Callable[[], None]

    def close(self) -> None:
        """Free the memory."""
        self._let_go()
        self.bytes = np.empty(0, np.uint8)


class Chain:
    """A store's place in the chain of ways. Only one thread calls `fall`."""

    def __init__(self, calls: Cudart) -> None:
        self.mode = Mode.MAPPED  # the present way
        self.reasons: list[tuple[Mode, str]] = []  # the ways that were given up, with the reasons
        try:
            if not calls.attribute(HOST_REGISTER_SUPPORTED):
                self.fall("the device registers no host memory")
                self.fall("the device registers no host memory")
            elif not calls.attribute(READ_ONLY_SUPPORTED):
                self.fall("the device registers no read-only mappings (HostRegisterReadOnlySupported is 0)")
        except CudaError as error:
            self.fall(str(error))

    def fall(self, reason: str) -> None:
        """Give up the present way for the next one."""
        self.reasons.append((self.mode, reason))
        self.mode = list(Mode)[list(Mode).index(self.mode) + 1]


def anonymous(size: int) -> Buffer:
    """Return uint8 [size] of zeros. Pages take memory when written, and are freed with their last view."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def pin_mapping(calls: Cudart, file: int, offset: int, size: int) -> Pinned:
    """Map a range of a file and register its pages; each page outside the page cache costs a fault.

    Raises CudaError, OSError or ValueError on failure.
    """
    inside = offset % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(file, inside + size, access=mmap.ACCESS_READ, offset=offset - inside)
    address = np.frombuffer(mapping, np.uint8).ctypes.data + inside
    calls.register(address, size, READ_ONLY | PORTABLE)

    def let_go() -> None:
        try:
            calls.unregister(address)
        finally:
            mapping.close()

    return Pinned(Mode.MAPPED, _at(address, size), let_go)


def pin_filled(calls: Cudart, memory: Buffer, flags: int = PORTABLE) -> Pinned:
    """Register anonymous memory, filled before (empty pages would be zeroed first). Raises CudaError on failure."""
    address = memory.ctypes.data
    calls.register(address, len(memory), flags)
    return Pinned(Mode.REGISTERED, memory, lambda: calls.unregister(address))


def allocate(calls: Cudart, size: int) -> Pinned:
    """Allocate pinned memory from CUDA. Raises CudaError on failure."""
    address = calls.allocate(size)
    return Pinned(Mode.ALLOCATED, _at(address, size), lambda: calls.free(address))


def _at(address: int, size: int) -> Buffer:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def probe(calls: Cudart, size: int = 64 << 20) -> list[dict[str, object]]:
    """Try each way of pinning on `size` bytes. A store uses the first that works.

    Returns:
        One row for each way: `mode`, `works`, and the failure's `reason` or the `bytes_per_second` of pinning alone.
        `kernels_read` says whether kernels may read such memory: the device finds it at the host's address.
    """
    chain = Chain(calls)
    rows = []
    given_up = dict(chain.reasons)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(size))
        file.flush()
        filled = anonymous(size)
        filled.fill(1)  # so that its pages exist
        ways: list[tuple[Mode, Callable[[], Pinned]]] = [
            (Mode.MAPPED, lambda: pin_mapping(calls, file.fileno(), 0, size)),
            (Mode.REGISTERED, lambda: pin_filled(calls, filled)),
            (Mode.ALLOCATED, lambda: allocate(calls, size)),
        ]
        for mode, pin in ways:
            row: dict[str, object] = {"mode": mode.value, "works": False}
            rows.append(row)
            if mode in given_up:
                row["reason"] = given_up[mode]
                continue
            began = time.perf_counter()
            try:
                pinned = pin()
            except (CudaError, OSError) as error:
                row["reason"] = str(error)
                continue
            row.update(works=True, bytes_per_second=size / (time.perf_counter() - began))
            if mode is not Mode.MAPPED:
                address = pinned.bytes.ctypes.data
                row["kernels_read"] = calls.device_address(address) == address
            pinned.close()
    rows.append({"mode": Mode.STAGED.value, "works": True})
    return rows
