"""Keeping a long run's resident memory at what it holds: bounded library caches, freed memory given back."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path


def resident_memory() -> int:
    """The process's resident memory now, in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_memory() -> int:
    """The process's peak resident memory so far, in bytes."""
    try:  # getrusage's peak survives exec: it would count the parent's memory at the fork
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def bound_kernel_caches() -> None:
    """Keep few compiled CPU kernels. Has an effect only before the process's first BF16 product on a CPU.

    oneDNN and torch's layer over it compile a kernel for every shape of a BF16 product and keep 1,024 each. Experts get
    another number of tokens every time: measured, the caches grow to 350 MB and their hits do not matter.
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc
    except (AttributeError, OSError, TypeError):
        return None


def give_back() -> None:
    """Return freed memory to the system. Without it glibc keeps about a layer's worth more after every layer."""
    trim = _trim()
    if trim is not None:
        trim(0)
