"""Fill pinned memory: many extents read at once, past the page cache where possible, each checked once."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import BundleError
from moepack.pack.spec import PAGE

from .cudart import CudaError, Cudart
from .files import CHUNK, Stored
from .pinning import Chain, Mode, Pinned, allocate, anonymous, pin_filled, pin_mapping

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # errors of file systems and devices without O_DIRECT


class PageFile:
    """A file read with O_DIRECT where possible; `direct` says whether it is, as far as is known."""

    def __init__(self, path: Path, plain: int) -> None:
        """Open the file once more. The caller keeps the descriptor `plain`."""
        self._plain, self._fd = plain, -1
        with contextlib.suppress(OSError):  # refused, or removed: `plain` is open
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self.direct = self._fd >= 0

    def read(self, part: memoryview, at: int) -> int:
        """Read some bytes from an offset; returns how many. After a short read the rest may begin within a page."""
        if self.direct and not at % PAGE and not len(part) % PAGE:
            try:
                return os.preadv(self._fd, [part], at)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.direct = False
        return os.preadv(self._plain, [part], at)

    def close(self) -> None:
        """Close the descriptor that was opened here."""
        if self._fd >= 0:
            os.close(self._fd)


@dataclass(frozen=True, slots=True)
class PinnedFiller:
    """Fills regions of pinned memory, one after another, on one thread and its readers.

    The callbacks are those of `read_extents`; `damaged` gets the error and the place of every bad extent.
    """

    calls: Cudart
    chain: Chain
    threads: int
    before: Callable[[int], None]
    done: Callable[[Stored], None]
    damaged: Callable[[str, str], None]

    def pin(self, path: Path, extents: Sequence[Stored]) -> tuple[set[int], Pinned | None]:
        """Fill a region and pin it, and go down the chain on failure.

        Returns the numbers of the good extents, and the region's memory, None if it was not pinned. The extents are in
        the region's order, or in the file's while the chain is at mappings.
        """
        chain, calls = self.chain, self.calls
        size = sum(stored.size for stored in extents)
        if chain.mode is Mode.MAPPED:
            # Registered before it is checked, so that the checked pages are the ones that stay.
            if not warm(extents, self.threads, self.before):
                return self._read(path, extents, None), None
            try:
                pinned = pin_mapping(calls, extents[0].file, extents[0].offset, size)
            except (CudaError, OSError, ValueError) as error:
                chain.fall(str(error))
            else:
                return self._read_or_close(path, extents, pinned, None)
        filled: Buffer | None = None
        good: set[int] | None = None
        if chain.mode is Mode.REGISTERED:
            try:
                filled = anonymous(size)
                good = self._read(path, extents, filled)
                return good, pin_filled(calls, filled)
            except (CudaError, OSError) as error:  # errors of memory; a file's errors are damage
                chain.fall(str(error))
        if chain.mode is Mode.ALLOCATED:
            try:
                pinned = allocate(calls, size)
            except CudaError as error:
                chain.fall(str(error))
                return set(), None
            if good is None or filled is None:
                return self._read_or_close(path, extents, pinned, pinned.bytes)
            pinned.bytes[:] = filled
            return good, pinned
        return set(), None

    def _read_or_close(
        self, path: Path, extents: Sequence[Stored], pinned: Pinned, out: Buffer | None
    ) -> tuple[set[int], Pinned]:
        try:
            return self._read(path, extents, out), pinned
        except BaseException:
            pinned.close()
            raise

    def _read(self, path: Path, extents: Sequence[Stored], out: Buffer | None) -> set[int]:
        """Read and check a region's extents; returns the numbers of the good ones."""
        rooms = None if out is None else np.split(out, np.cumsum([stored.size for stored in extents[:-1]], dtype=int))
        with contextlib.closing(PageFile(path, extents[0].file)) as file:
            read = file.read if out is not None else None
            bad = read_extents(extents, rooms, self.threads, self.before, self.done, read)
            if out is not None and not file.direct:
                for stored in extents:  # the page cache would hold them once more
                    os.posix_fadvise(stored.file, stored.offset, stored.size, os.POSIX_FADV_DONTNEED)
        for i, error in bad.items():
            self.damaged(str(error), extents[i].where)
        return set(range(len(extents))) - bad.keys()


def read_extents(
    extents: Sequence[Stored],
    rooms: Sequence[Buffer] | None,
    threads: int,
    before: Callable[[int], None],
    done: Callable[[Stored], None],
    read: Callable[[memoryview, int], int] | None,
) -> dict[int, BundleError]:
    """Read extents in threads and check every digest; returns the errors of damaged ones by their number.

    `rooms` is the memory for each; without it they are checked and not kept. `before` is called with the size of each
    chunk before it is read, and its exception ends everything; `done` after each good extent, on any thread; `read` as
    in `Stored.read_into`.
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
    """Read extents into the page cache; returns whether all are complete."""
    complete = True

    def one(i: int) -> None:
        nonlocal complete
        stored, room, at = extents[i], np.empty(CHUNK, np.uint8).data, 0
        while at < stored.size:
            part = room[: min(CHUNK, stored.size - at)]
            before(len(part))
            try:
                at += stored.read_some(part, at)
            except BundleError:
                complete = False
                return

    in_threads(one, range(len(extents)), threads)
    return complete


def in_threads(work: Callable[[int], None], items: Sequence[int], threads: int) -> None:
    """Call `work` on items in threads, in order; the first error stops them and is raised."""
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

    # Daemons, so that a process can end without waiting for gigabytes.
    workers = [threading.Thread(target=run, name="moepack-fill", daemon=True) for _ in range(min(threads, len(items)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
