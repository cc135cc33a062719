"""Measure the process's memory, and bound the caches of libraries.

`moepack.runtime.devices.glibc.trim` returns freed memory to the system.
"""

from __future__ import annotations

import os
import resource
import sys
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


def peaks() -> dict[str, int | None]:
    """Return the peaks of the process and of its control group in bytes, for JSON."""
    from moepack.runtime.store.host_limit import group_peak

    return {"process_bytes_peak": peak_memory(), "group_bytes_peak": group_peak()}


def bound_kernel_caches() -> None:
    """Bound the caches of compiled CPU kernels. Call it before the process's first BF16 matrix product on a CPU.

    oneDNN and torch's layer over it compile a kernel for every shape of a BF16 product and keep 1,024 each. An expert's
    number of tokens varies, and so do the shapes. Measured, the caches grow to 350 MB, and cache hits do not matter.
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
