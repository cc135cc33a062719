"""Open files of a bundle: only regular files, and only inside the bundle's directory.

Folders are entered one by one and never through a symbolic link. Only regular files are opened, because pipes may
block. One kind of link is followed: from a snapshot in huggingface_hub's cache into the `blobs` beside `snapshots`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Literal

from .errors import BundleError, Kind, TargetError

_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_SPECIAL = (
    (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"), (stat.S_ISLNK, "a symbolic link"),
)  # fmt: skip


def advise(file: int, advice: Literal["RANDOM", "DONTNEED", "WILLNEED"], at: int = 0, size: int = 0) -> None:
    """Tell the system how a range of a file, by default all, will be read; macOS takes no such advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, at, size, getattr(os, f"POSIX_FADV_{advice}"))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of what writes a file into a TargetError that names the file."""
    try:
        yield
    except OSError as error:
        raise TargetError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def in_one_step(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write it in one step: a killed process leaves the former file at `path`, or the whole new one."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with writing(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def open_file(root: Path, name: str) -> int:
    """Open a file of the bundle at `root` for reading and return its descriptor. `root` itself may be a symbolic link.

    `name` is a relative POSIX path that `manifest.parser.safe_path` allows. Raises BundleError of kind "missing",
    "link", "file-type" or "read".
    """
    location = f"{root}/{name}"
    *folders, last = name.split("/")
    try:
        at = os.open(root, _FOLDER)
        try:
            for folder in folders:
                _check(location, os.stat(folder, dir_fd=at, follow_symlinks=False), folder)
                inner = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = inner
            if stat.S_ISLNK(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode):
                return _open_blob(root, name)
            return _open_regular(location, last, at)
        finally:
            os.close(at)
    except OSError as error:
        raise _refusal(location, error) from None


def _open_blob(root: Path, name: str) -> int:
    """Follow a link of the Hub's cache: from `models--A--B/snapshots/COMMIT/NAME` to `models--A--B/blobs/DIGEST`.

    All links on the way are resolved before the target is compared, so a `blobs` that is itself a link is refused.
    """
    location = f"{root}/{name}"
    home = Path(os.path.realpath(root))
    target = Path(os.path.realpath(home / name))
    if home.parent.name != "snapshots" or target.parent != home.parent.parent / "blobs":
        raise BundleError.single(location, "link", "is a symbolic link, which a bundle does not hold: copy the file")
    return _open_regular(location, target)


def _check(location: str, found: os.stat_result, folder: str | None = None) -> None:
    wanted = stat.S_ISREG if folder is None else stat.S_ISDIR
    if not wanted(found.st_mode):
        what = next((words for is_one, words in _SPECIAL if is_one(found.st_mode)), "a regular file")
        kind: Kind = "link" if stat.S_ISLNK(found.st_mode) else "file-type"
        shown = "is" if folder is None else f"its folder {folder} is"
        raise BundleError.single(location, kind, f"{shown} {what}: a bundle holds regular files in directories alone")


def _open_regular(location: str, path: str | Path, folder: int | None = None) -> int:
    """Open a regular file, and check it again once it is open: it may have been replaced since the first check."""
    _check(location, os.stat(path, dir_fd=folder, follow_symlinks=False))
    file = os.open(path, _FILE, dir_fd=folder)
    try:
        _check(location, os.fstat(file))
    except BundleError:
        os.close(file)
        raise
    return file


def _refusal(location: str, error: OSError) -> BundleError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return BundleError.single(location, "missing", "listed in the manifest, not there")
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return BundleError.single(location, "link", "is a symbolic link, which a bundle does not hold")
    return BundleError.single(location, "read", f"cannot be read: {error.strerror}")


@contextlib.contextmanager
def opened(root: Path, name: str) -> Iterator[BufferedReader]:
    """Open a file of the bundle to read. OSErrors, also in the context, become the BundleErrors of `open_file`."""
    with os.fdopen(open_file(root, name), "rb") as file:
        try:
            yield file
        except OSError as error:
            raise _refusal(f"{root}/{name}", error) from None


def size_of(root: Path, name: str) -> int:
    """The size of a file in bytes. Raises the BundleErrors of `open_file`."""
    with opened(root, name) as file:
        return os.fstat(file.fileno()).st_size


def read_file(root: Path, name: str, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises BundleErrors as `open_file` does, and kind "size" if it is larger."""
    with opened(root, name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BundleError.single(f"{root}/{name}", "size", f"has more than {most} bytes")
    return data


def digest_of(root: Path, name: str) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises the BundleErrors of `open_file`."""
    with opened(root, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
