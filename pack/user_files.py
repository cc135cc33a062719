"""The user's own files: where the cache is, reading that refuses what others may have written, and writing in one step.

What the files hold, and whether that is valid, is their readers' to decide. `remembered` keeps what was measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
FILES = 64  # the most documents that are remembered of a kind; the oldest are removed
LARGEST = 1 << 20  # the most bytes of a valid document


def cache_path(name: str) -> Path | None:
    """Return `moepack/NAME` in XDG_CACHE_HOME or ~/.cache; `None` for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(named) if named and Path(named).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "moepack" / name


def is_own(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and others may not write it."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_own(file: Path) -> BinaryIO:
    """Open a file that this user alone may write.

    Raises:
        OSError: if it cannot be opened.
        ValueError: if it is a link, no regular file, or others may write it.
    """
    if file.is_symlink():
        raise ValueError(f"{file}: it is a link")
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    opened = os.fdopen(number, "rb")
    found = os.fstat(number)
    if not is_own(found) or not stat.S_ISREG(found.st_mode):
        opened.close()
        raise ValueError(f"{file}: it is no file of this user alone")
    return opened


def read_own(file: Path, most: int) -> bytes:
    """Read a file that this user alone may write; raise as `open_own`, and ValueError for more than `most` bytes."""
    with open_own(file) as opened:
        data = opened.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{file}: it has more than {most} bytes")
    return data


def write_whole(file: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Write a file in one step: it is the former one or the whole new one. Raises OSError, which names the file."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(number, "wb") as made:
            made.write(data.encode() if isinstance(data, str) else data)
            made.flush()
            os.fsync(made.fileno())
        partial.replace(file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(file)) from None
        raise


def write_report(file: Path, data: bytes) -> None:
    """Write a file for others to read, as `write_whole` does, in a folder that is made if it is not there."""
    file = Path(os.path.realpath(file))  # a link stays one
    folder = file.parent
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, data, 0o666)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def remembered(kind: str, key: object, read: Callable[[Any], T], make: Callable[[], T], seconds: float = math.inf) -> T:
    """Return what was made under a key in the last `seconds`, from the user's cache; else make it, and keep it there.

    `key` has everything on which the result depends, as JSON or with a `repr`. `read` takes a kept document, and raises
    ValueError, TypeError, KeyError or AttributeError for what is not valid. Results are JSON, or dataclasses of it.
    Files that cannot be read or written, or are not valid, are ignored. While torch's default dtype is another one
    nothing is read or kept: what is made then may hold for this process alone.
    """
    folder = cache_path(kind)
    torch: Any = sys.modules.get("torch")
    if folder is None or (torch is not None and torch.get_default_dtype() != torch.float32):
        return make()
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=repr).encode()).hexdigest()
    file = folder / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        document = json.loads(read_own(file, LARGEST))
        if 0 <= time.time() - file.stat().st_mtime < seconds:
            return read(document)
    made = make()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, json.dumps(made, default=asdict))
        by_age = sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in by_age[:-FILES]:
            old.unlink(missing_ok=True)
    return made
