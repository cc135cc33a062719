"""The backing store: extents in the bundle's files, checked against their digests before use.

Extents are read, not mapped: a truncated file then raises an error instead of a signal, and reading is five times as
fast as page faults. pinned.py keeps extents in pinned host memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.errors import BundleError, InputError
from moepack.pack.files import open_file
from moepack.pack.reader import Bundle
from moepack.pack.spec import PAGE

from .checked import State, recorded, state
from .page_file import PageFile
from .read_ahead import Place, ReadAhead

DENSE = -1  # the layer position in the place of a dense matrix
CHUNK = 1 << 20  # bytes read and digested at a time: they are still in the processor's cache for the digest
REQUEST = (
    8 << 20
)  # bytes of a read past the page cache: whole extents of most models; a longer one could not be stopped


class Cancelled(Exception):
    """A read was cancelled."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The location of one extent in a file, and the extent's digest."""

    file: int  # a descriptor open for reading
    offset: int  # of its first byte
    size: int  # in bytes
    sha256: str  # the digest in hexadecimal
    where: str  # file, layer, expert and version, for errors
    place: Place = ("", 0, 0)  # (version, layer position, expert); of a dense matrix: (version, DENSE, number)
    ahead: ReadAhead | None = field(default=None, compare=False, repr=False)  # may have read the extent already
    # The file's state when each extent was checked: not checked again while the state stays. `None`: always checked
    checked: dict[Place, State] | None = field(default=None, compare=False, repr=False)
    direct: PageFile | None = field(default=None, compare=False, repr=False)  # reads past the page cache

    def read_into(
        self,
        out: npt.NDArray[np.uint8],
        before: Callable[[int], None] | None = None,
        read: Callable[[memoryview, int], int] | None = None,
        after: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read the extent into the first `size` bytes of `out`, and check its digest. Releases the GIL.

        Args:
            out: uint8, contiguous. If it is smaller than the extent, each chunk overwrites the one before: the extent
                is then checked, and not kept.
            before: called with the size of each chunk before the chunk is read; an exception of `before` ends the read.
            read: reads some bytes from an offset of the file, and returns how many; by default `direct`, or `preadv`.
            after: called with the begin and end of each chunk in the extent, once the chunk is in `out`; the digest is
                checked after the last chunk.

        Raises:
            BundleError: when the file cannot be read to the end, or the digest does not match; `out` is then invalid.
        """
        ready = self.ahead.take(self.place) if self.ahead is not None else None
        digest = hashlib.sha256()
        kept = len(out) >= self.size
        done = 0
        found = None if self.checked is None else state(self.file)  # before the first byte: it may change meanwhile
        known = self.checked is not None and self.checked.get(self.place) == found
        most = REQUEST if self.direct is not None else CHUNK
        while done < self.size:
            begin = done if kept else 0
            part = out.data[begin : begin + min(most, self.size - done)]
            if before is not None:
                before(len(part))
            got = len(part)
            if ready is not None:  # checked when it was read
                part[:] = ready.numpy().data[done : done + got]
            else:
                got = self.read_some(part, done, read)
                if not known:
                    digest.update(part[:got])
            done += got
            if after is not None:
                after(done - got, done)
        if ready is None and not known:
            if digest.hexdigest() != self.sha256:
                raise BundleError.single(self.where, "digest", "its bytes do not match their digest")
            if self.checked is not None and found is not None:
                self.checked[self.place] = found

    def read_some(self, part: memoryview, begin: int, read: Callable[[memoryview, int], int] | None = None) -> int:
        """Read bytes of the extent from `begin` on, unchecked; return how many. Raises BundleError on failure."""
        try:
            at = self.offset + begin
            if read is None and self.direct is not None:
                read = self.direct.read
            got = os.preadv(self.file, [part], at) if read is None else read(part, at)
        except OSError as error:
            raise BundleError.single(self.where, "read", f"cannot be read: {error.strerror}") from None
        if not got:
            raise BundleError.single(self.where, "size", "its file ends before it does")
        return got

    def load(self) -> Tensor:
        """Read the extent into new memory, uint8 [size], that begins on a page.

        Raises BundleError as `read_into` does.
        """
        if self.ahead is not None and (ready := self.ahead.take(self.place)) is not None:
            return ready
        room = torch.empty(self.size + PAGE, dtype=torch.uint8)
        room = room[-room.data_ptr() % PAGE :][: self.size]
        replace(self, ahead=None).read_into(room.numpy())
        return room


class BackingStore:
    """Reads extents of an open bundle. A layer `position` counts only the layers with experts, from 0."""

    def __init__(self, bundle: Bundle, checks_again: bool = True, direct: bool = False) -> None:
        """Open the store. Without `checks_again`, an extent is digested again only after its file has changed.

        With `direct`, extents are read past the page cache where the system allows it (`PageFile`).
        """
        self.bundle = bundle
        record = recorded()  # shared with other stores of the load while the user's record is read
        if record is None and not checks_again:
            record = {}
        self._checked = record
        self._lock = threading.RLock()  # a finalizer may close on the thread that holds it
        self._closed = False
        self._files: dict[str, int] = {}
        self._direct: dict[str, PageFile] | None = {} if direct else None
        self._ahead: ReadAhead | None = None
        weakref.finalize(self, _close, self._files, self._direct)

    def stored(self, version: str, position: int, number: int) -> Stored:
        """Locate the extent of expert `number` of a layer; at position DENSE, of dense matrix `number` of the manifest.

        The first call opens the file and checks its header. Raises BundleError when the file is missing or damaged.
        """
        with self._lock:
            if self._closed:
                raise InputError(f"{self.bundle.path}: this store was closed")
            if position == DENSE:
                layer, at = self.bundle.dense_place(number)
                described = self.bundle.dense_file(version, layer)
            else:
                described = self.bundle.layer_file(version, position)
                at = number
            file = described.location
            if file not in self._files:
                self._files[file] = open_file(self.bundle.path, described.layer.file(version))
                if self._direct is not None:
                    self._direct[file] = PageFile(self._files[file])
            return Stored(
                self._files[file],
                described.offset(at),
                described.extent_size(at),
                described.digests[at],
                described.place(at),
                (version, position, number),
                self._ahead,
                self._checked,
                None if self._direct is None else self._direct[file],
            )

    @contextlib.contextmanager
    def reading_ahead(self, wanted: Iterable[Place]) -> Iterator[None]:
        """Read and check these extents in threads inside the context, in order, before the loader asks for them."""
        sizes = []
        for place in wanted:
            with contextlib.suppress(BundleError):  # raised again when the loader asks for it
                sizes.append((place, self.stored(*place).size))
        with contextlib.closing(
            ReadAhead(sizes, lambda place: replace(self.stored(*place), ahead=None).load())
        ) as self._ahead:
            try:
                yield
            finally:
                self._ahead = None

    def close(self) -> None:
        """Close the files that `stored` opened."""
        with self._lock:
            self._closed = True
            _close(self._files, self._direct)


def _close(files: dict[str, int], direct: dict[str, PageFile] | None) -> None:
    while direct:
        direct.popitem()[1].close()
    while files:
        os.close(files.popitem()[1])
