"""Take a model's tensors out of mapped files into own memory, and check the files' digests on the way.

transformers maps the bundle's tensor files and reads their headers. Each file is read once here: past the page cache
where possible, several pieces at a time, each copied to the tensors that it belongs to and digested in order. So what
is served is what was checked, and neither the process nor the page cache holds the weights twice. Where the system does
not say what is mapped (macOS), tensors are copied from the mapped files, which are then read and digested.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import BundleError
from moepack.pack.files import advise, open_file
from moepack.pack.manifest import LEFTOVERS
from moepack.pack.reader import TENSORS, Bundle
from moepack.runtime.devices.cpu import CpuMemory
from moepack.runtime.devices.glibc import madvise
from moepack.runtime.planning.measure import lone_embedding
from moepack.runtime.store.checked import FILE, recorded, state
from moepack.runtime.store.loading import LoadCount, loading
from moepack.runtime.store.page_file import READERS, PageFile

from .file_rows import FileRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE = 8 << 20  # bytes of a read; READERS of them are in memory at a time


class _Part(NamedTuple):
    """Bytes of a file that belong into memory."""

    begin: int  # in the file
    end: int
    room: Buffer  # uint8 [end - begin]


class _Rows(NamedTuple):
    """A model's embedding that stays in its file."""

    model: nn.Module
    name: str  # of the embedding
    module: nn.Embedding
    path: str
    begin: int  # in the file


class _Mapping(NamedTuple):
    """A range of addresses that is mapped from a file."""

    begin: int
    end: int
    offset: int  # in the file
    path: str


def own(model: PreTrainedModel, bundle: Bundle, uncached: bool = False) -> None:
    """Copy what is mapped of a model's tensors into own memory, and check the bundle's files; tied ones stay tied.

    With `uncached` the files leave the page cache: what transformers maps has the system read ahead. An input embedding
    that nothing else uses then stays in its file (file_rows.py).

    Raises:
        BundleError: when a file cannot be read, or does not match its digest.
    """
    mapped = list(_mapped())
    copies = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]()
    parts = dict[str, list[_Part]]()
    lone = lone_embedding(model) if uncached else None
    rows = None
    used = set[_Mapping]()
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage._cdata in copies:
            continue
        begin = storage.data_ptr()
        size = storage.nbytes()
        at = bisect.bisect_right(mapped, begin, key=lambda m: m.begin) - 1
        within = mapped[at] if at >= 0 and begin + size <= mapped[at].end and storage.device.type == "cpu" else None
        if within is None:
            if not mapped:  # the system does not say what is
                copies[storage._cdata] = storage, storage.clone()
            continue
        where = within.offset + begin - within.begin
        used.add(within)
        if lone is not None and tensor is lone[1].weight:
            rows = _Rows(model, *lone, within.path, where)
            parts.setdefault(within.path, [])
            continue
        copies[storage._cdata] = storage, (copied := type(storage)(size))
        room = torch.empty(0, dtype=torch.uint8).set_(copied).numpy()
        parts.setdefault(within.path, []).append(_Part(where, where + size, room))
    for m in used:  # pages that are mapped would stay in the page cache
        # Not other mappings of these files: a model that goes meanwhile leaves its addresses to the next allocation.
        madvise(m.begin, m.end - m.begin, mmap.MADV_DONTNEED)
    count = loading()
    names = [n for n in bundle.manifest.files if n.endswith(TENSORS) and n != LEFTOVERS]
    count.expect(sum(bundle.manifest.files[name].size for name in names))
    for name in names:
        _read(bundle, name, parts, rows, count, uncached)
    if parts:
        raise BundleError.single(str(bundle.path), "read", "its tensors were mapped from files that are not its own")
    for tensor in (*model.parameters(), *model.buffers()):
        found = copies.get(tensor.untyped_storage()._cdata)
        if found is not None:
            tensor.data = tensor.new_empty(0).set_(found[1], tensor.storage_offset(), tensor.shape, tensor.stride())


def _read(
    bundle: Bundle, name: str, parts: dict[str, list[_Part]], rows: _Rows | None, count: LoadCount, uncached: bool
) -> None:
    """Read one file into the parts that are its own, which are removed from `parts`; check its digest.

    An embedding whose `rows` are in this file stays there from now on.
    """
    location = f"{bundle.path}/{name}"
    file = open_file(bundle.path, name)
    try:
        path = _path(file)
        wanted = sorted(parts.pop(path, []), key=lambda part: part.begin)
        record = recorded()
        entry = bundle.manifest.files[name]
        now = state(file)
        known = record is not None and record.get((entry.sha256, FILE, 0)) == now
        here = None if rows is None or rows.path != path else rows
        # Before the digest is made: a change meanwhile would be served unchecked.
        stays = None if here is None else FileRows(here.module, os.dup(file), here.begin, location)
        if _digest(file, entry.size, wanted, count, known) != entry.sha256 and not known:
            raise BundleError.single(location, "digest", "its bytes do not match their digest")
        if record is not None:
            record[entry.sha256, FILE, 0] = now
        if here is not None and stays is not None:
            here.model.set_submodule(here.name, stays)
    except OSError as error:
        raise BundleError.single(location, "read", f"cannot be read: {error.strerror}") from None
    finally:
        if uncached:
            advise(file, "DONTNEED")
        os.close(file)


def _digest(file: int, size: int, wanted: Sequence[_Part], count: LoadCount, known: bool) -> str:
    """Read a file's `size` bytes, copy them to `wanted`, and return their digest, which is of no bytes if `known`."""
    digest = hashlib.sha256()
    rooms = CpuMemory(READERS * PIECE)
    rooms.take(0, READERS * PIECE)
    free = collections.deque(rooms.tensor.numpy().reshape(READERS, PIECE))
    going: collections.deque[tuple[Future[int], Buffer]] = collections.deque()
    with contextlib.closing(PageFile(file)) as pages, ThreadPoolExecutor(READERS, "moepack-dense") as pool:

        def read(at: int, room: Buffer) -> int:
            got = 0
            most = min(PIECE, size - at)
            while got < most and (part := pages.read(room.data[got:], at + got)):  # whole pages: also past the end
                got += part
            _copy(room[: min(got, most)], at, wanted)
            return min(got, most)

        def finish() -> None:
            reading, room = going.popleft()
            got = reading.result()
            if not known:
                digest.update(room[:got].data)
            count.add(got)
            free.append(room)

        for at in range(0, size, PIECE):
            if not free:
                finish()
            room = free.popleft()
            going.append((pool.submit(read, at, room), room))
        while going:
            finish()
    return digest.hexdigest()


def _copy(made: Buffer, at: int, wanted: Sequence[_Part]) -> None:
    """Copy the bytes of a file from offset `at` on to where they belong."""
    end = at + len(made)
    for part in wanted[bisect.bisect_right(wanted, at, key=lambda p: p.end) :]:
        if part.begin >= end:
            break
        begin = max(part.begin, at)
        last = min(part.end, end)
        part.room[begin - part.begin : last - part.begin] = made[begin - at : last - at]


def _path(file: int) -> str:
    """Return the path of an open file as `_mapped` has it; an empty one where the system does not say."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{file}").readlink())
    return ""


def _mapped() -> Iterator[_Mapping]:
    """Yield what the process has mapped of files, by address; nothing where the system does not say."""
    with contextlib.suppress(OSError), Path("/proc/self/maps").open() as lines:
        for line in lines:
            where, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            if path and path[0].startswith("/"):
                begin, end = (int(x, 16) for x in where.split("-"))
                yield _Mapping(begin, end, int(offset, 16), path[0].replace("\\012", "\n"))
