"""An export's files of tensors: known beforehand, filled in any order, left alone where a stopped export wrote them."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.manifest import DENSE, DENSE_INDEX
from moepack.pack.processors import processors
from moepack.pack.safetensors_file import DTYPES, make_header

from .filled import FilledFile, to_disk
from .work import ExportDirectory

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Entries = dict[str, tuple[str, tuple[int, ...]]]  # names to dtypes, as safetensors calls them, and shapes
WORKERS = min(4, processors() + 1)  # one may wait for the disk; each holds an expert
AHEAD = 4  # calls that wait for the disk: as many times filled.SYNC are not on it
METADATA = {"format": "pt"}  # of every file of safetensors


def tensor_bytes(entry: tuple[str, tuple[int, ...]]) -> int:
    """Bytes of a tensor of this dtype and shape."""
    return DTYPES[entry[0]][0] * math.prod(entry[1])


def cut(tensors: Mapping[str, T], size: Callable[[T], int], most: int) -> list[dict[str, T]]:
    """Cut tensors, in their order, into files of at most `most` bytes; a larger tensor has a file of its own."""
    out = [dict[str, T]()]
    total = 0
    for name, tensor in tensors.items():
        total += size(tensor)
        if out[-1] and total > most:
            out.append({})
            total = size(tensor)
        out[-1][name] = tensor
    return out


class Workers:
    """Threads that take calls, a few ahead of what is done; NumPy, digests and the disk leave Python free.

    Leaving the context waits for them. An error of one ends the others, and comes from `submit` or at the end.
    """

    def __init__(self, threads: int = WORKERS, ahead: int = 2 * WORKERS) -> None:
        """Start threads, which at most `ahead` calls wait for or run on."""
        self._pool = ThreadPoolExecutor(threads)
        self._room = threading.Semaphore(ahead)
        self._error: BaseException | None = None

    def submit(self, call: Callable[..., None], *given: object) -> None:
        """Have something called, once there is room. Raises an earlier call's error, after which nothing is called."""
        self._room.acquire()
        if self._error is not None:
            self._room.release()  # others may wait for it, and are to raise too
            raise self._error
        self._pool.submit(self._run, call, given)

    def close(self) -> None:
        """Wait for all calls. Raises the error of one."""
        self._pool.shutdown()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Wait for calls that run, and drop the others."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, call: Callable[..., None], given: tuple[object, ...]) -> None:
        try:
            if self._error is None:
                call(*given)
        except BaseException as error:
            self._error = error
        finally:
            self._room.release()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if error is None:
            self.close()
        else:
            self._error = self._error or error
            self._pool.shutdown()


class Files:
    """Files of tensors in a folder of a working directory. One that is whole there is not written again.

    Several threads may put tensors: see `Workers`. A thread of its own brings them to the disk and records them, at
    most AHEAD calls behind, so that no other waits for the disk while that keeps up.
    """

    def __init__(
        self,
        work: ExportDirectory,
        folder: str,
        parts: Mapping[str, Mapping[str, int]],
        head: Callable[[str], bytes],
        alignment: int = 1,
    ) -> None:
        """`parts`: bytes of each tensor, by the name of its file. `head`: a file's header. See FilledFile."""
        self._work = work
        self._folder = folder
        self._parts = parts
        self._head = head
        self._alignment = alignment
        self._file_of = {name: file for file, part in parts.items() for name in part}
        self._open: dict[str, FilledFile] = {}
        self._full = set[str]()  # those whose last byte is written
        self._lock = threading.Lock()
        self._disk = Workers(1, AHEAD)
        work.at_end(self._abandon)

    @property
    def names(self) -> list[str]:
        """The files."""
        return list(self._parts)

    def wants(self, names: Iterable[str]) -> bool:
        """Whether any of these tensors is in a file that is not whole."""
        return any(not self._done(file) for file in {self._file_of[name] for name in names})

    def put(self, name: str, data: npt.NDArray[np.uint8], at: int = 0) -> None:
        """Write bytes of a tensor, uint8 [n], from a byte of it on."""
        file = self._file_of[name]
        with self._lock:
            if self._done(file):
                return
            own = self._opened(file)
        own.put(name, data, at)
        with self._lock:
            last = own.whole and file not in self._full
            self._full |= {file} if last else set()
        if last:
            self._disk.submit(self._finish, file)

    def close(self) -> None:
        """Finish the files. Raises InputError if bytes of a tensor were not written."""
        for file in self._parts:
            if not self._done(file):
                self._opened(file).check()
                self._disk.submit(self._finish, file)
        self._disk.close()

    def _done(self, file: str) -> bool:
        return file in self._full or self._work.has(f"{self._folder}/{file}")

    def _opened(self, file: str) -> FilledFile:
        if file not in self._open:
            path = self._work.path(self._folder, file)
            own = self._head(file), self._parts[file], self._alignment
            self._open[file] = FilledFile(path, *own, lambda fd: self._disk.submit(to_disk, fd))
        return self._open[file]

    def _finish(self, file: str) -> None:
        self._open.pop(file).close()
        self._work.finish(f"{self._folder}/{file}")

    def _abandon(self) -> None:
        self._disk.abandon()
        for file in self._open.values():
            file.close()


class TensorFiles(Files):
    """The safetensors files of a checkpoint, with an index if they are several."""

    def __init__(self, work: ExportDirectory, parts: Mapping[str, Entries]) -> None:
        """`parts`: the tensors of each file."""
        self._entries = {name: entry for part in parts.values() for name, entry in part.items()}
        sizes = {file: {n: tensor_bytes(e) for n, e in part.items()} for file, part in parts.items()}
        super().__init__(work, ExportDirectory.FILES, sizes, lambda file: make_header(parts[file], METADATA))

    def put_tensor(self, name: str, values: Tensor, index: int = 0) -> None:
        """Write values of a tensor, from an index of its first axis on. Raises InputError if they do not fit it."""
        import torch

        if str(values.dtype) != f"torch.{DTYPES[self._entries[name][0]][1]}":
            raise InputError(f"{name} is {values.dtype}, not as described: the bundle is damaged")
        data = values.contiguous().reshape(-1).view(torch.uint8).numpy()
        self.put(name, data, index * (len(data) // max(1, values.shape[0])) if values.ndim else 0)

    def close(self) -> None:
        """See Files."""
        super().close()
        if len(self._parts) > 1:
            total = sum(sum(part.values()) for part in self._parts.values())
            document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._file_of.items()))}
            path = self._work.path(ExportDirectory.FILES, DENSE_INDEX)
            path.write_text(json.dumps(document, indent=2) + "\n")


def sharded(entries: Entries, most: int) -> dict[str, Entries]:
    """The files of a checkpoint of these tensors, by name."""
    parts = cut(entries, tensor_bytes, most)
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    return dict(zip([DENSE] if len(parts) == 1 else names, parts, strict=True))


def tensor_file_bytes(entries: Entries, most: int) -> int:
    """Bytes of the files of these tensors, with their headers."""
    parts = sharded(entries, most).values()
    return sum(len(make_header(part, METADATA)) + sum(map(tensor_bytes, part.values())) for part in parts)
