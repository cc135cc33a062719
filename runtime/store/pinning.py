"""Pinned host memory: the ways to have it, and the chain from the best of them to none.

A way that fails is given up for the whole store, and the reason kept; its error is cleared by the calls themselves
(cudart.py). Decides nothing about what is put into the memory.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moepack.pack.codec.bits import Buffer

from .cudart import HOST_REGISTER_SUPPORTED, PORTABLE, READ_ONLY, READ_ONLY_SUPPORTED, CudaError, HostCalls


class Mode(enum.StrEnum):
    """How extents come to the device, the best first."""

    MAPPED = "mapped"  # the files' own pages, registered: nothing is copied on the host
    REGISTERED = "registered"  # read into anonymous memory, which is registered afterwards
    ALLOCATED = "allocated"  # read into memory that CUDA has allocated
    STAGED = "staged"  # nothing is pinned but a ring of staging buffers: every fetch reads the file


ORDER = tuple(Mode)


@dataclass(slots=True)
class Pinned:
    """Pinned memory.

    Attributes:
        mode: how it came about.
        bytes: its bytes; of a mapping nobody but the device reads them, for a file cut short would be a signal.
    """

    mode: Mode
    bytes: Buffer
    _let_go: Callable[[], None]

    def close(self) -> None:
        """Give it back; nobody may use it any more."""
        self._let_go()
        self.bytes = np.empty(0, np.uint8)


class Chain:
    """Where in the chain a store stands. One thread advances it.

    Attributes:
        mode: the way that is taken now.
        reasons: the ways that were given up, with why.
    """

    def __init__(self, calls: HostCalls) -> None:
        self.mode = Mode.MAPPED
        self.reasons: list[tuple[Mode, str]] = []
        try:
            if not calls.attribute(HOST_REGISTER_SUPPORTED):
                self.fall("the device registers no host memory")
                self.fall("the device registers no host memory")
            elif not calls.attribute(READ_ONLY_SUPPORTED):
                self.fall("the device registers no read-only mappings (HostRegisterReadOnlySupported is 0)")
        except CudaError as error:
            self.fall(str(error))

    def fall(self, reason: str) -> None:
        """Give up the way that is taken now."""
        self.reasons.append((self.mode, reason))
        self.mode = ORDER[ORDER.index(self.mode) + 1]


def anonymous(size: int) -> Buffer:
    """Pages of zeros that take memory once they are written; they are given back with the last view of them."""
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def pin_mapping(calls: HostCalls, file: int, offset: int, size: int) -> Pinned:
    """Register pages of a file's mapping, which are best in the page cache: a page that is not there is a fault.

    Raises:
        CudaError, OSError, ValueError: when it cannot be.
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


def pin_filled(calls: HostCalls, memory: Buffer) -> Pinned:
    """Register anonymous memory that has been filled: before that, registering would zero every page first.

    Raises:
        CudaError: when it cannot be.
    """
    address = memory.ctypes.data
    calls.register(address, len(memory), PORTABLE)
    return Pinned(Mode.REGISTERED, memory, lambda: calls.unregister(address))


def allocate(calls: HostCalls, size: int) -> Pinned:
    """Pinned memory from CUDA.

    Raises:
        CudaError: when there is none.
    """
    address = calls.allocate(size)
    return Pinned(Mode.ALLOCATED, _at(address, size), lambda: calls.free(address))


def _at(address: int, size: int) -> Buffer:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def probe(calls: HostCalls, size: int = 64 << 20) -> list[dict[str, Any]]:
    """Try each way of pinning on `size` bytes; the first that works is what a store takes here.

    Returns:
        One row a way: `mode`, `works`, `reason` where it does not, `bytes_per_second` of pinning alone where it does.
    """
    chain, rows = Chain(calls), []
    given_up = dict(chain.reasons)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(size))
        file.flush()
        filled = anonymous(size)
        filled.fill(1)  # its pages are there
        ways: list[tuple[Mode, Callable[[], Pinned]]] = [
            (Mode.MAPPED, lambda: pin_mapping(calls, file.fileno(), 0, size)),
            (Mode.REGISTERED, lambda: pin_filled(calls, filled)),
            (Mode.ALLOCATED, lambda: allocate(calls, size)),
        ]
        for mode, pin in ways:
            row: dict[str, Any] = {"mode": mode.value, "works": False}
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
            pinned.close()
    rows.append({"mode": Mode.STAGED.value, "works": True})
    return rows
