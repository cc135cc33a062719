"""Write a bundle so that it is either complete or absent.

Everything goes into a temporary sibling of the target; files are synced, the manifest is written last, and one rename
makes the bundle appear. An existing bundle is exchanged with its successor in one system call, because its tables and
its manifest must change together. After an error everything that was written is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from .errors import TargetError
from .files import in_one_step
from .manifest import MANIFEST, ExpertFileEntry, FileEntry, Manifest

_AT_ONCE = 1 << 24  # bytes copied at once
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of what is written alone
LOCK = "lock"  # the file in a folder by which it is held
# AT_FDCWD and RENAME_EXCHANGE (renameat2(2))
_HERE = -100
_EXCHANGE = 2


def existing(path: Path) -> Path:
    """Find the nearest existing path at or above `path`, which is absolute."""
    while not path.exists():
        path = path.parent
    return path


def check_target(target: Path) -> None:
    """Raise TargetError if a new bundle cannot be written at `target`."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise TargetError(f"{target}: exists and is not a directory; name a new directory")
    if target.is_dir() and any(target.iterdir()):
        raise TargetError(f"{target}: is not empty; name a new directory, or remove it first")
    parent = existing(target.absolute().parent)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise TargetError(f"{target}: cannot be written: {parent} is not a writable directory")


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two directories of one file system in one step. Raises OSError where that is impossible."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def check_replaceable(target: Path) -> None:
    """Raise TargetError if the bundle at `target` cannot be replaced in one step; to be called before any work."""
    parent = target.absolute().parent
    pair = [parent / f".{target.name}.try-{secrets.token_hex(4)}" for _ in range(2)]
    try:
        for path in pair:
            path.mkdir()
        exchange(*pair)
    except OSError as error:
        raise TargetError(
            f"{target}: cannot be replaced in one step here ({error.strerror}): name a new directory with --output"
        ) from None
    finally:
        for path in pair:
            if path.exists():
                path.rmdir()


def remove_empty(folder: Path, first: Path) -> None:
    """Remove a folder and those above it, up to `first`, as long as they are empty."""
    while folder.is_relative_to(first):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def remove_left(folder: Path, prefix: str, lock: str = "") -> None:
    """Remove directories that killed processes left: those whose names have the prefix and whose lock is free.

    `lock` names the file to lock in each directory; empty, the directory itself is locked.
    """
    for path in folder.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            held = os.open(path / lock, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)


def sync(path: Path) -> None:
    """Flush a file or a directory to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Write or replace a small file in one step."""
    with in_one_step(path) as file:
        file.write(data)


def check_room(folder: Path, target: Path, needed: int) -> None:
    """Raise TargetError if the disk of `folder` lacks room for so many bytes of what will be `target`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TargetError(f"{target}: the disk lacks room: {needed:,} bytes to write, {free:,} free")


def hold(folder: Path, busy: str) -> int:
    """Make a folder that its holder removes in the end, and return the descriptor that holds its lock.

    Raises TargetError, which says `busy`, while another process holds it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # removed in between
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise TargetError(busy) from None
        except OSError:
            return lock  # a file system without locks
        if os.fstat(lock).st_nlink:  # else a process that has just ended removed the folder
            return lock
        os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a directory and return the descriptor that holds the lock. Raises OSError when another process has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


class BundleWriter:
    """Writer of the bundle at `target`. A context manager: leaving it without `finish` removes what was written.

    An OSError of a file that is written inside the context becomes a TargetError that names the file.

    `keep` names the files that a new bundle takes from the bundle it replaces. With None, `target` must be new or
    empty. Raises TargetError for any other target, and while another process is replacing the bundle.
    """

    def __init__(self, target: Path, keep: Sequence[str] | None = None) -> None:
        self._target = target.absolute()
        self._keep = keep
        self._lock = -1
        self._last = ""  # the file that is written
        partial = f".{self._target.name}.partial-"
        self.root = self._target.with_name(f"{partial}{secrets.token_hex(4)}")
        if keep is None:
            check_target(target)
            remove_left(self._target.parent, partial)
        else:
            try:
                self._lock = _lock(self._target)
            except OSError:
                raise TargetError(f"{self._target}: another process is replacing it: wait for it") from None
            self.root = self._target.with_name(f".{self._target.name}.successor")
            shutil.rmtree(self.root, ignore_errors=True)  # what a killed process left
        self._files: dict[str, FileEntry] = {}
        self._expert_files: dict[str, ExpertFileEntry] = {}
        self._first_made = next((p for p in reversed(self.root.parents) if not p.exists()), None)
        try:
            self.root.mkdir(parents=True)
        except OSError as error:
            raise TargetError(f"{target}: cannot be written: {error.strerror}") from None
        if keep is None:
            with contextlib.suppress(OSError):  # on a file system without locks remove_left removes nothing either
                self._lock = _lock(self.root)

    def path(self, name: str) -> Path:
        """Make the directory of the bundle's file `name`, and return the path at which to write the file."""
        self._last = name
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def check_room(self, linked: Iterable[Path], written: int) -> None:
        """Raise TargetError if the disk lacks room for so many bytes, and for copies of files that cannot be linked."""
        device = self.root.stat().st_dev
        found = [path.stat() for path in linked]
        copied = sum(file.st_size for file in found if file.st_dev != device)
        check_room(self.root, self._target, written + copied)

    def add(self, name: str) -> None:
        """Take the finished file at `path(name)` into the bundle. An OSError names the path."""
        with (self.root / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            self._files[name] = FileEntry(os.fstat(file.fileno()).st_size, digest)

    def adopt(self, name: str, source: Path, entry: ExpertFileEntry) -> None:
        """Take a finished layer file into the bundle: a hard link where that works, a copy elsewhere."""
        self._place(name, source)
        self._expert_files[name] = entry

    def take(self, name: str, source: Path, entry: FileEntry, link: bool) -> None:
        """Take a file that is no layer file into the bundle: a hard link if `link` and that works, else a copy."""
        self._place(name, source, link)
        self._files[name] = entry

    def _place(self, name: str, source: Path, link: bool = True) -> None:
        # a cache has symbolic links; a hard link to one is one too
        path = self.path(name)
        source = source.resolve()
        try:
            if not link:
                raise OSError
            path.hardlink_to(source)
        except OSError:
            with source.open("rb") as read, path.open("wb") as copy:
                shutil.copyfileobj(read, copy, _AT_ONCE)

    def with_files(self, manifest: Manifest) -> Manifest:
        """A copy of the manifest that lists the files added so far."""
        return replace(manifest, files=dict(self._files), expert_files=dict(self._expert_files))

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the manifest, with the files that were added, and make the bundle appear; returns that manifest."""
        manifest = self.with_files(manifest)
        for name in self._keep or ():
            self._carry(name)
        for name in (*self._files, *self._expert_files):
            sync(self.path(name))
        replace_file(self.path(MANIFEST), manifest.to_json())
        for directory in (*(p for p in self.root.rglob("*") if p.is_dir()), self.root):
            sync(directory)
        if self._keep is None:
            check_target(self._target)
            self.root.rename(self._target)
        else:
            exchange(self.root, self._target)
        sync(self._target.parent)
        return manifest

    def _carry(self, name: str) -> None:
        path = self.path(name)
        path.unlink(missing_ok=True)
        try:
            os.link(self._target / name, path, follow_symlinks=False)
        except OSError:
            shutil.copy2(self._target / name, path, follow_symlinks=False)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.root.exists():  # unfinished, or the bundle that was replaced
            shutil.rmtree(self.root, ignore_errors=True)
            if self._first_made is not None:
                remove_empty(self._target.parent, self._first_made)
        if self._lock >= 0:
            os.close(self._lock)
        if not isinstance(error, OSError):
            return
        ours = error.filename is not None and self.root in Path(error.filename).parents
        if ours or error.errno in FULL:  # others without a name may be of what is read
            raise TargetError(f"{self._target / self._last}: cannot be written: {error.strerror or error}") from None
