"""The user's own files: where the cache is, reading that refuses what others may have written, and writing in one step.

What the files hold, and whether that is valid, is their readers' to decide.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def cache_path(name: str) -> Path | None:
    """Return `moepack/NAME` in XDG_CACHE_HOME or ~/.cache; `None` for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(named) if named and Path(named).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "moepack" / name


def read_own(file: Path, most: int) -> bytes:
    """Read a file that this user alone may write.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is a link, no regular file, larger than `most` bytes, or others may write it.
    """
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as opened:
        found = os.fstat(opened.fileno())
        own = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not own or not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise ValueError(f"{file}: not a file of this user alone of at most {most} bytes")
        return opened.read(most)


def write_whole(file: Path, text: str) -> None:
    """Write a file of mode 0600 in one step: it is the former one or the whole new one. Raises OSError on failure."""
    number, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    partial = Path(name)
    try:
        with os.fdopen(number, "w") as made:
            made.write(text)
            made.flush()
            os.fsync(made.fileno())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
