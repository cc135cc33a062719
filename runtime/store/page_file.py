"""A file read past the page cache, with O_DIRECT, in whole pages.

What the page cache holds already is copied from it: that takes no time of the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moepack.pack.files import advise
from moepack.pack.spec import MEMORY_PAGE, PAGE

# Reads under way while loading, and for a pass that waits. The threads sleep meanwhile, so they may be more than the
# cores. On a virtual disk 1, 2, 4 and 8 took in 1.9, 2.4, 2.2 and 2.3 GB/s in extents of 2.5 MiB.
READERS = 4
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # errors of file systems and devices without O_DIRECT
_CACHESTAT = 451  # the number of this system call, Linux 6.5
_libc = ctypes.CDLL(None, use_errno=True)


class PageFile:
    """A file read with O_DIRECT where possible; `direct` turns False once the system has refused O_DIRECT."""

    def __init__(self, plain: int) -> None:
        """Open once more, for O_DIRECT, the file of the caller's descriptor `plain`, which `close` leaves open."""
        self._plain = plain
        self._fd = -1
        with contextlib.suppress(OSError, AttributeError):  # refused, or a system without it
            self._fd = os.open(f"/proc/self/fd/{plain}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self.direct = self._fd >= 0
        if self.direct:  # what is copied from the page cache must not bring what follows into it
            advise(plain, "RANDOM")

    def read(self, part: memoryview, at: int) -> int:
        """Read bytes from offset `at` into `part`; return how many. Any thread may call this.

        Reads that are not whole pages of the file into whole pages of memory go through the page cache. Where O_DIRECT
        is refused all do, and what they leave there is dropped.
        """
        pages = not (at % PAGE or len(part) % PAGE or np.frombuffer(part, np.uint8).ctypes.data % PAGE)
        if self.direct and pages and not is_cached(self._plain, at, len(part)):
            try:
                return os.preadv(self._fd, [part], at)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.direct = False
        got = os.preadv(self._plain, [part], at)
        if not self.direct:
            advise(self._plain, "DONTNEED", at, got)
        return got

    def close(self) -> None:
        """Close the descriptor that `__init__` opened."""
        if self._fd >= 0:
            os.close(self._fd)


def is_cached(file: int, at: int, size: int) -> bool:
    """Return whether the page cache holds all of these bytes; False where the system does not say."""
    if sys.platform != "linux":
        return False  # there the number is another call's
    asked = (ctypes.c_uint64 * 2)(at, size)
    found = (ctypes.c_uint64 * 5)()
    failed = _libc.syscall(_CACHESTAT, file, asked, found, 0)
    touched = (at + size - 1) // MEMORY_PAGE - at // MEMORY_PAGE + 1
    return not failed and found[0] >= touched


def direct_rate(file: int, in_flight: int, request: int = 4 << 20) -> float | None:
    """Read a file once past the page cache, in whole requests in order, `in_flight` at a time; return bytes a second.

    Returns None where the system refuses O_DIRECT.
    """
    size = os.fstat(file).st_size // request * request
    offsets = iter(range(0, size, request))
    rooms = [_huge(request) for _ in range(in_flight)]
    with contextlib.closing(PageFile(file)) as pages, ThreadPoolExecutor(in_flight) as pool:

        def read(room: memoryview) -> None:
            for at in offsets:
                pages.read(room, at)

        began = time.perf_counter()
        list(pool.map(read, rooms))
        seconds = time.perf_counter() - began
        return size / seconds if pages.direct else None


def _huge(size: int) -> memoryview:
    """Return memory in huge pages, which a disk fills twice as fast as small ones."""
    room = mmap.mmap(-1, size + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            room.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(room, np.uint8).ctypes.data % (2 << 20)
    view = memoryview(room)[start : start + size]
    view[:] = bytes(size)
    return view
