"""Fill pinned memory: read many extents at once, past the page cache where possible, and check each once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import BundleError

from .cudart import CudaError, Cudart
from .files import CHUNK, Stored
from .page_file import PageFile
from .pinning import Chain, Mode, Pinned, allocate, anonymous, pin_filled, pin_mapping


@dataclass(frozen=True, slots=True)
class PinnedFiller:
    """Fills regions of pinned memory, one after another, with `threads` that read.

    `before` and `done` are passed to `read_extents`; `damaged` gets the error and the place of every bad extent.
    """

    calls: Cudart
    chain: Chain
    threads: int
    before: Callable[[int], None]
    done: Callable[[Stored], None]
    damaged: Callable[[str, str], None]

    def pin(self, extents: Sequence[Stored]) -> tuple[set[int], Pinned | None]:
        """Fill a region with `extents` and pin it; if a way of pinning fails, try the next one of the chain.

        Returns the indices in `extents` of the good ones, and the region's memory (`None` if it was not pinned).
        `extents` are in the region's order, which must be the file's order while the chain's mode is MAPPED.
        """
        chain = self.chain
        calls = self.calls
        size = sum(stored.size for stored in extents)
        if chain.mode is Mode.MAPPED:
            # The mapping is registered before it is checked, so that the checked pages are the pinned ones.
            if not warm(extents, self.threads, self.before):
                return self._read(extents, None), None
            try:
                pinned = pin_mapping(calls, extents[0].file, extents[0].offset, size)
            except (CudaError, OSError, ValueError) as error:
                chain.fall(str(error))
            else:
                return self._read_or_close(extents, pinned, None)
        filled: Buffer | None = None
        good: set[int] | None = None
        if chain.mode is Mode.REGISTERED:
            try:
                filled = anonymous(size)
                good = self._read(extents, filled)
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
                return self._read_or_close(extents, pinned, pinned.bytes)
            pinned.bytes[:] = filled
            return good, pinned
        return set(), None

    def _read_or_close(self, extents: Sequence[Stored], pinned: Pinned, out: Buffer | None) -> tuple[set[int], Pinned]:
        try:
            return self._read(extents, out), pinned
        except BaseException:
            pinned.close()
            raise

    def _read(self, extents: Sequence[Stored], out: Buffer | None) -> set[int]:
        """Read and check a region's extents; return the indices of the good ones."""
        rooms = None if out is None else np.split(out, np.cumsum([stored.size for stored in extents[:-1]], dtype=int))
        with contextlib.closing(PageFile(extents[0].file)) as file:
            read = file.read if out is not None else None
            bad = read_extents(extents, rooms, self.threads, self.before, self.done, read)
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
    """Read extents in threads and check every digest; return the errors of damaged extents by their index.

    `rooms` has the memory for each extent; if it is `None`, extents are checked and not kept. `before` is called with
    the size of each chunk before the chunk is read; an exception of `before` ends everything. `done` is called after
    each good extent, on any thread. `read` is that of `Stored.read_into`.
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
    """Read extents into the page cache; return whether all could be read to their end."""
    complete = True

    def one(i: int) -> None:
        nonlocal complete
        stored = extents[i]
        room = np.empty(CHUNK, np.uint8).data
        at = 0
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
    """Call `work` on items in threads, which take them in order; the first error stops the threads and is raised."""
    queue = iter(items)
    lock = threading.Lock()
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
