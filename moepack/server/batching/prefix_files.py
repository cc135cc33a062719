"""Kept chunks of prompts in files, which a later server finds again.

A file has one chunk's keys and values by layer, in safetensors, or the states after it. Its name is a digest of the
model, of all tokens before the chunk and of its own, so a file is found by what it is for, and by nobody who does not
have the same tokens. The model is the bundle, its dense versions, the dtype, the form of the cache and the version of
transformers, and under a policy that changes nothing the experts' versions. Others change them under running prompts,
too: their chunks are for all such policies.

A thread writes files, so no pass waits. Before a request is queued, its thread checks the files that hold its prompt's
beginning: they belong to this user alone, and their digest is that of their contents and name. The pass that reads the
prompt copies them into the request's row, one layer at a time, from the pages that checking has brought in. They take
no memory of the budget: the row has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import queue
import re
import tempfile
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.user_files import is_own, open_own
from moepack.runtime.dense.packed import PackedLinear

from .prefixes import CHUNK, MOST_STORED, STATES, Layers

if TYPE_CHECKING:
    from moepack.runtime.served_model import ServedModel

    from .prefixes import Chunk, Prefixes

log = logging.getLogger("moepack.server")
FORMAT = 4
DIGEST = "sha256"  # in the metadata: of the file's name and the file, with UNSIGNED in its place
UNSIGNED = "0" * 64
ENDING = ".safetensors"
OURS = re.compile(r"(\.\w+\.)?[0-9a-f]{64}\.safetensors")  # with the beginning, a file that was not yet whole
HEADER = 1 << 20  # the most bytes of a header
READ = 1 << 20  # bytes that are digested at a time
FREED = 0.9  # the share of the limit that is left when files make room for others
SHARE = 8  # part of the room that one of this many servers with the same folder may fill without a look at it


def described(model: ServedModel) -> str:
    """Describe what keys and values follow from, beside the tokens and versions that change."""
    manifest = model.moepack.bundle.manifest
    packed = {name: m.version.name for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    facts = (
        sorted((name, f.sha256) for name, f in manifest.files.items()),
        sorted((name, f.header_sha256) for name, f in manifest.expert_files.items()),
        sorted(packed.items()),
        str(model.dtype),
        [list(bits) for bits in model.moepack.kv],
        None if model.moepack.manager is not None else model.moepack.versions,
        CHUNK,
        transformers.__version__,
    )
    return json.dumps(facts)


class StoredLayers(Mapping[int, tuple[Tensor, ...]]):
    """A checked file's tensors by layer, read when they are asked for."""

    def __init__(self, opened: Any) -> None:
        """Take an open safetensors file."""
        self._opened = opened
        names: list[str] = opened.keys()
        self._tensors = Counter(int(name.partition(".")[0]) for name in names)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensors)

    def __getitem__(self, layer: int) -> tuple[Tensor, ...]:
        """Return one layer's tensors."""
        return tuple(self._opened.get_tensor(f"{layer}.{n}") for n in range(self._tensors[layer]))


class PrefixFiles:
    """Files of one model's chunks in a folder. Any thread may call it."""

    def __init__(self, folder: Path, most: int, model: str) -> None:
        """Use a folder, of which files over `most` bytes in all leave, the longest unused first.

        `model` describes the model.

        Raises:
            InputError: for a folder that cannot be made or written, or that others may write.
        """
        self._folder = folder
        self._most = most
        self._model = hashlib.sha256(f"{FORMAT} {model}".encode()).digest()
        self._found: OrderedDict[str, StoredLayers] = OrderedDict()  # checked, and not yet asked for
        self._kept: weakref.WeakValueDictionary[str, Chunk] = weakref.WeakValueDictionary()  # that prompts take now
        self._waiting: queue.SimpleQueue[tuple[list[str], weakref.ref[Chunk] | None] | None] = queue.SimpleQueue()
        self._failed = False  # whether a write has failed: no more are tried
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = folder.stat()
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InputError(f"{folder}: prompts cannot be kept there: {error.strerror or error}") from None
        if not is_own(about):
            raise InputError(f"{folder}: others may write there, so prompts are not kept there: chmod go-w, or another")
        self._make_room()
        self._thread = threading.Thread(target=self._write_all, name="moepack-prefixes", daemon=True)
        self._thread.start()

    def names(self, keys: Sequence[bytes]) -> Iterator[str]:
        """Yield the names of a prompt's chunks, which have these chunk keys."""
        last = self._model
        for key in keys:
            last = hashlib.sha256(last + key).digest()
            yield last.hex()

    def keep(self, keys: Sequence[bytes], chunk: Chunk) -> None:
        """Have a chunk written, unless it leaves memory before. `keys` are those of its prompt up to it.

        Behind the keys of a prompt up to a chunk, STATES names the states after it.
        """
        names = list(self.names(keys))
        self._kept[names[-1]] = chunk
        self._waiting.put((names[-2:], weakref.ref(chunk)))

    def look_for(self, keys: Sequence[bytes], states: bool = False) -> None:
        """Check the files that hold the beginning of a prompt, for `take`; those that are in memory are not needed.

        With `states` also look for the last states that were kept.
        """
        used = list(itertools.takewhile(self._has, itertools.islice(self.names(keys), MOST_STORED)))
        if states:
            used += itertools.islice(filter(self._has, map(_states_of, used[::-1])), 1)
        for name in reversed(used):  # the first chunk is used by all that follow, so it leaves last
            with contextlib.suppress(OSError):
                os.utime(self._folder / (name + ENDING))

    def _has(self, name: str) -> bool:
        """Whether a chunk is in memory, or its file was checked, now or before."""
        if name in self._kept or name in self._found:
            return True
        path = self._folder / (name + ENDING)
        try:
            self._found[name] = _checked(path)
        except FileNotFoundError:
            return False
        except (OSError, MemoryError) as error:  # its contents may be whole
            log.warning("%s: not read: %s", path, error)
            return False
        except Exception as error:  # of any kind, from a file that may hold anything
            log.warning("%s: not read, and removed: %s", path, error)
            self._remove(path)
            return False
        while len(self._found) > MOST_STORED:  # of requests that were refused
            with contextlib.suppress(KeyError):  # another thread was faster
                self._found.popitem(last=False)
        return True

    def take(self, keys: Sequence[bytes], found: list[Chunk], prefixes: Prefixes) -> None:
        """Add the checked chunks that follow those `found` of a prompt, which `find` has just returned."""
        if not self._found:
            return
        names = list(self.names(keys))
        for name in names[len(found) :]:
            layers = self._found.pop(name, None)
            if layers is None or not prefixes.add_stored(found, keys[len(found)], layers):
                break
            self._kept[name] = found[-1]
        for n, name in enumerate(map(_states_of, names[: len(found)]), 1):
            layers = self._found.pop(name, None)
            made = None if layers is None else prefixes.add_stored(found[:n], STATES, layers)
            if made is not None:
                self._kept[name] = made

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the files of a prompt that has no finite answer, once those that wait have been written."""
        for name in self.names(keys):
            for one in (name, _states_of(name)):
                self._found.pop(one, None)
                self._waiting.put(([one], None))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return the time of use, the size and the path of each file, also of those that a killed server left."""
        out = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                if OURS.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        about = entry.stat(follow_symlinks=False)
                        out.append((about.st_mtime_ns, about.st_size, Path(entry.path)))
        return out

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            names, reference = item
            *before, path = (self._folder / (name + ENDING) for name in names)
            if reference is None:
                self._remove(path)
                continue
            chunk = reference()
            if chunk is None or self._failed or path.exists():
                continue
            try:
                after = before[0].stat().st_mtime_ns if before else time.time_ns() + 1
            except OSError:
                continue  # nothing finds a chunk without the one before it
            try:
                self._left -= _written(path, chunk.layers, after - 1)
            except Exception as error:  # memory may be short too
                self._failed = True
                log.warning("%s: no more prompts are kept there: %s", self._folder, error)
            if self._left < 0:
                self._make_room()

    def _make_room(self) -> None:
        """Remove files beyond the limit, and set how many bytes are written before the next look at the folder."""
        found = sorted(self._files(), reverse=True)
        total = sum(size for _, size, _ in found)
        least = self._most if total <= self._most else FREED * self._most
        while found and total > least:
            _, size, path = found.pop()
            self._remove(path)
            total -= size
        self._left = (self._most - total) // SHARE


def _states_of(name: str) -> str:
    """Return the name of the states after a chunk, of which this is the name."""
    return hashlib.sha256(bytes.fromhex(name) + STATES).hexdigest()


def _written(path: Path, layers: Layers, used: int) -> int:
    """Write a chunk, used at that time in nanoseconds, in one step; return the file's bytes."""
    from safetensors.torch import save

    data = save({f"{layer}.{n}": t for layer, held in layers.items() for n, t in enumerate(held)}, {DIGEST: UNSIGNED})
    at = data.index(UNSIGNED.encode())
    digest = hashlib.sha256(path.name.encode())
    digest.update(data)
    number, name = tempfile.mkstemp(prefix=".", suffix="." + path.name, dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(number, "wb") as made:
            made.write(data)
            made.seek(at)
            made.write(digest.hexdigest().encode())
        os.utime(partial, ns=(used, used))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return len(data)


def _checked(path: Path) -> StoredLayers:
    """Open a file whose digest is that of its contents; raise OSError or ValueError for another."""
    from safetensors import safe_open

    with open_own(path) as opened:
        start = opened.read(8)
        size = int.from_bytes(start, "little")
        if size > HEADER:
            raise ValueError("it is no file of a chunk")
        header = opened.read(size)
        said = json.loads(header)["__metadata__"][DIGEST]
        digest = hashlib.sha256(path.name.encode() + start + header.replace(said.encode(), UNSIGNED.encode(), 1))
        while block := opened.read(READ):
            digest.update(block)
    if said != digest.hexdigest():
        raise ValueError("it has changed since it was written")
    return StoredLayers(safe_open(path, "pt"))
