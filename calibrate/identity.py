"""A checkpoint's identity: the SHA-256 of each of its weight files, and of its configuration.

Headers and sizes do not suffice: two fine-tunes of one model share both. A digest is kept with the file's size, time of
change and inode, so that a resumed build does not read unchanged files again. A thread reads 1 to 2 GB a second.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moepack.pack.errors import InputError

from .checkpoint import Checkpoint

THREADS = 4  # disks seldom serve more
_PIECE = 8 << 20  # bytes that are read at a time
Digest = dict[str, str | int]  # a file's `sha256`, and its `size`, `mtime_ns` and `inode` when it was read


def identity(
    checkpoint: Checkpoint,
    known: Mapping[str, Digest] | None = None,
    advance: Callable[[int], None] = lambda size: None,
) -> tuple[dict[str, str], dict[str, Digest]]:
    """The digests of a checkpoint's files by their names, and what to pass as `known` next time.

    A file whose size, time and inode are unchanged keeps the digest that `known` has from an earlier call. `advance`
    receives the bytes of each read, from several threads. Raises InputError if a file cannot be read, or changes while
    it is read.
    """
    names = sorted({*checkpoint.headers, "config.json"})
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        made = pool.map(lambda name: _digest(checkpoint.path / name, (known or {}).get(name), advance), names)
        kept = dict(zip(names, made, strict=True))
    return {name: str(entry["sha256"]) for name, entry in kept.items()}, kept


def is_known(path: Path, known: Digest) -> bool:
    """Whether a file, perhaps on another machine, has the digest in `known`, an entry of `identity`.

    Equal size and time of change suffice if that time has fractions of a second, which copies may keep; otherwise the
    bytes decide. Raises InputError if the file cannot be read.
    """
    try:
        inode = path.stat().st_ino if known["mtime_ns"] % 10**9 else known["inode"]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return bool(_digest(path, {**known, "inode": inode}, lambda size: None)["sha256"] == known["sha256"])


def _digest(path: Path, known: object, advance: Callable[[int], None]) -> Digest:
    try:
        with path.open("rb") as file:
            state = _state(file.fileno())
            if isinstance(known, dict) and known == {**state, "sha256": known.get("sha256")}:
                return known
            digest = hashlib.sha256()
            while piece := file.read(_PIECE):
                digest.update(piece)
                advance(len(piece))
            if _state(file.fileno()) != state:
                raise InputError(f"{path}: changed while it was read: run again once nothing writes to it")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): download the checkpoint again") from None
    return {**state, "sha256": digest.hexdigest()}


def _state(file: int) -> Digest:
    now = os.fstat(file)
    return {"size": now.st_size, "mtime_ns": now.st_mtime_ns, "inode": now.st_ino}
