"""Reading many extents at once: whole pages past the page cache where the filesystem allows it, each checked once.

Decides nothing about where the extents go, or which they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import BundleError
from moepack.pack.spec import PAGE

from .store import CHUNK, Stored

Bytes = npt.NDArray[np.uint8]
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # what a filesystem or a device says that does not read this way


class PageFile:
    """A file read with O_DIRECT where that goes, the plain way elsewhere.

    Attributes:
        direct: whether it goes, as far as is known.
    """

    def __init__(self, path: Path, plain: int) -> None:
        """`plain` is a descriptor that stays the caller's."""
        self._plain, self._fd = plain, -1
        with contextlib.suppress(OSError):  # refused, or gone by now: `plain` is open
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        self.direct = self._fd >= 0 and hasattr(os, "O_DIRECT")

    def read(self, part: memoryview, at: int) -> int:
        """Read some bytes from an offset; returns how many. After a short read the rest may begin within a page.

        Raises:
            OSError: when it cannot be read.
        """
        if self.direct and not at % PAGE and not len(part) % PAGE:
            try:
                return os.preadv(self._fd, [part], at)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.direct = False
        return os.preadv(self._plain, [part], at)

    def close(self) -> None:
        """Close what was opened here."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def page_file(path: Path, plain: int) -> Iterator[PageFile]:
    """A PageFile for as long as it is used."""
    file = PageFile(path, plain)
    try:
        yield file
    finally:
        file.close()


def read_extents(
    extents: Sequence[Stored],
    rooms: Sequence[Bytes] | None,
    threads: int,
    before: Callable[[int], None],
    done: Callable[[Stored], None] = lambda stored: None,
    read: Callable[[memoryview, int], int] | None = None,
) -> dict[int, BundleError]:
    """Read extents in threads and check every digest; returns those that are damaged, by their number.

    Args:
        extents: what is read.
        rooms: where each goes; without it they are checked and not kept.
        threads: how many.
        before: called with the size of each chunk before it is read; what it raises ends everything.
        done: called, on any thread, after each that is good.
        read: as of `Stored.read_into`.
    """
    bad: dict[int, BundleError] = {}

    def one(i: int) -> None:
        room = rooms[i] if rooms is not None else np.empty(CHUNK, np.uint8)
        try:
            extents[i].read_into(room, before, read)
        except BundleError as error:
            bad[i] = error
        else:
            done(extents[i])

    in_threads(one, range(len(extents)), threads)
    return bad


def warm(extents: Sequence[Stored], threads: int, before: Callable[[int], None]) -> bool:
    """Bring extents into the page cache; returns whether all are there to their end."""
    complete = True

    def one(i: int) -> None:
        nonlocal complete
        stored, room, at = extents[i], np.empty(CHUNK, np.uint8).data, 0
        while at < stored.size:
            part = room[: min(CHUNK, stored.size - at)]
            before(len(part))
            try:
                got = os.preadv(stored.file, [part], stored.offset + at)
            except OSError:
                got = 0
            if not got:
                complete = False
                return
            at += got

    in_threads(one, range(len(extents)), threads)
    return complete


def in_threads(work: Callable[[int], None], items: Sequence[int], threads: int) -> None:
    """Do `work` on items, taken in order by threads; the first error ends the taking and is raised."""
    queue, lock = iter(items), threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        while True:
            with lock:
                item = next(queue, None) if not errors else None
            if item is None:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    # Daemons: a process that ends does not wait for gigabytes.
    workers = [threading.Thread(target=run, name="moepack-fill", daemon=True) for _ in range(min(threads, len(items)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
