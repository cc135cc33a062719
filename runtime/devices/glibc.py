"""The C library's heap on a CPU, held to what is in use: freed memory given back, dense tensors out of mapped files.

Without it a process takes more than its budget says: caches that grow and activations that die leave holes in the
heap, as large as they were, which glibc keeps. Where that is wanted for a while, `reusing` says so. Decides nothing
about what is allocated.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
# Buffers from 512 KiB on are mapped, and go back to the system as they die. On a model of hidden size 512 with caches
# of 3,072 tokens the process's peak falls from 12 MB above what is reserved to 3, and prefill takes 8 % longer (each
# page is cleared anew), decoding no longer. At 128 KiB prefill takes 45 % longer, at 2 MiB the peak gains little.
MAPPED, KEPT = 512 << 10, 4 << 20
# What glibc itself comes to, of which it says how much may be mapped at all; once anything is set, it sets nothing.
MOST_MAPPED, MOST_KEPT, MAPPINGS = 32 << 20, 64 << 20, 65536

_USERS = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_limits = [MOST_MAPPED, MOST_KEPT]  # that hold while nothing is reused
_lock, _reusers = threading.Lock(), 0  # how many want memory to be reused now


@functools.cache
def _libc() -> Any:
    try:
        library = ctypes.CDLL(None)
        return library if library.malloc_trim and library.mallopt else None  # glibc
    except (AttributeError, OSError, TypeError):
        return None


def bound() -> None:
    """Let the heap keep little of what is freed, from now on, or once nothing is reused any more; not without glibc, or
    where the user has set it."""
    with _lock:
        _limits[:] = MAPPED, KEPT
        if not _reusers:
            _limit()


@contextmanager
def reusing() -> Iterator[None]:
    """Have what is freed taken by what is allocated next, for a while; not without glibc, or where the user has set it.

    Large buffers are mapped otherwise, and the system clears each of their pages anew. The heap takes more than is
    alive meanwhile: holes. Their memory goes back to the system in the end, but below what then stays alive they can be
    taken again, and `bound` does not hold for these: allocate elsewhere what is to stay. It holds for the process,
    until the last thread that wants it is through.
    """
    global _reusers
    with _lock:
        _reusers += 1
        if _settable():
            _libc().mallopt(M_MMAP_MAX, 0)
            _libc().mallopt(M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        with _lock:
            _reusers -= 1
            last = not _reusers and _settable()
            if last:
                _libc().mallopt(M_MMAP_MAX, MAPPINGS)
                _limit()
        if last:
            trim()


def _settable() -> bool:
    return _libc() is not None and not _USERS & os.environ.keys()


def _limit() -> None:
    if _settable():
        _libc().mallopt(M_MMAP_THRESHOLD, _limits[0])
        _libc().mallopt(M_TRIM_THRESHOLD, _limits[1])


def trim() -> None:
    """Return freed memory to the system, holes in the middle of the heap included; does nothing without glibc."""
    if _libc() is not None:
        _libc().malloc_trim(0)


def own(model: Any) -> None:
    """Copy parameters and buffers out of the files they may be mapped from; tied ones stay tied.

    Mapped pages are not the process's own: they come and go with the system's cache, and with the file.
    """
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = storage, storage.clone()
    for tensor in (*model.parameters(), *model.buffers()):
        _, copied = copies[tensor.untyped_storage()._cdata]
        tensor.data = tensor.new_empty(0).set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
