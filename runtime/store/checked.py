"""A record of digests that were checked, so that the next start of the same user need not read files to digest them.

A file counts as unchanged while its device, inode, size and times of change (mtime and ctime) stay. That does not find
bytes that change under the file system: a failing disk, or a writer to the device. The record is the user's own; one
that is not, or is malformed, is ignored. Files that others may write are digested every time.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from moepack.pack.reader import Bundle
from moepack.pack.user_files import cache_path, read_own, write_whole

from .read_ahead import Place

State = tuple[int, int, int, int, int]
FILE = -2  # the layer position in the place of a whole file, whose digest stands for the version
LARGEST = 64 << 20  # bytes of a record
log = logging.getLogger("moepack.runtime")
_record: contextvars.ContextVar[dict[Place, State] | None] = contextvars.ContextVar("moepack checked", default=None)


def state(file: int) -> State:
    """Return what identifies the content of an open file."""
    found = os.fstat(file)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


def recorded() -> dict[Place, State] | None:
    """Return the extents that need no digest while their files' states stay, to be added to; None: all need one."""
    return _record.get()


@contextlib.contextmanager
def recording(bundle: Bundle, wanted: bool) -> Iterator[None]:
    """Read the bundle's record for loads in the context, and write it once they have succeeded."""
    file = _file(bundle) if wanted else None
    foreign = _foreign(bundle) if file is not None else None
    if foreign is not None:
        log.warning("%s: others may write it: digests are checked anew, and not recorded", foreign)
    if file is None or foreign is not None:
        yield
        return
    places = _read(file)
    known = dict(places)
    token = _record.set(places)
    try:
        yield
    finally:
        _record.reset(token)
    made = places.copy()  # threads that serve go on adding to `places`
    if made != known:
        with contextlib.suppress(OSError):
            _write(file, made)


def _foreign(bundle: Bundle) -> Path | None:
    """Return a file or folder of the bundle that another user may write; None if there is none."""
    files = [bundle.path / name for name in (*bundle.manifest.files, *bundle.manifest.expert_files)]
    real = [Path(os.path.realpath(file)) for file in files if file.exists()]
    for path in dict.fromkeys([*real, *(x.parent for x in real), Path(os.path.realpath(bundle.path))]):
        found = path.stat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return path
    return None


def _file(bundle: Bundle) -> Path | None:
    folder = cache_path("checked")
    name = hashlib.sha256(os.fsencode(os.path.realpath(bundle.path))).hexdigest()
    return None if folder is None else folder / f"{name}.json"


def _read(file: Path) -> dict[Place, State]:
    try:
        rows = json.loads(read_own(file, LARGEST))
        out: dict[Place, State] = {}
        for version, position, values, numbers in rows:
            a, b, c, d, e = (int(x) for x in values)
            out |= {(str(version), int(position), int(n)): (a, b, c, d, e) for n in numbers}
        return out
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return {}


def _write(file: Path, places: dict[Place, State]) -> None:
    rows: dict[tuple[str, int, State], list[int]] = {}
    for (version, position, number), values in places.items():
        rows.setdefault((version, position, values), []).append(number)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(file, json.dumps([[*key, sorted(numbers)] for key, numbers in rows.items()]))
