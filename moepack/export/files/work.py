"""The hidden directory beside an export's output, in which the export is made, and from which a stopped one goes on.

A file in it counts once its size and digest stand in the record, which is written after the file is on disk. What the
files hold is not known here, only for what they were made: the same bundle and the same options.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moepack.pack.errors import BundleError, InputError, TargetError
from moepack.pack.files import digest_of, size_of
from moepack.pack.manifest.parser import safe_path
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.writer import LOCK, check_room, hold, replace_file, sync
from moepack.shared.progress import Reporter

_RECORD = "record.json"


class ExportDirectory:
    """An open, locked working directory."""

    FILES = "files"  # the folder that becomes the output

    def __init__(self, target: Path, made_for: Mapping[str, object], reporter: Reporter) -> None:
        """Take over what was made for the same, and remove all else.

        Raises TargetError for a directory that is no export's, and while another export is at work in it.
        """
        # a rename may remove the current directory
        self._target = target
        self._output = target.absolute()
        self._whole: dict[str, tuple[int, str]] = {}
        self.root = self._output.with_name(f".{self._output.name}.exporting")
        self._key = hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()
        self._stack = contextlib.ExitStack()
        self._recording = threading.Lock()
        record = self.root / _RECORD
        there = set(_names(self.root))
        if self.root.is_symlink() or (_RECORD not in there and there - {LOCK, f"{_RECORD}.partial"}):
            raise TargetError(f"{self.root}: is no export's, and an export works there: remove it")
        self._lock = hold(self.root, f"{target}: another export is writing it: wait for it")
        try:
            self._take_over(_read(record), reporter)
        except BaseException:  # Ctrl-C while digests are checked, or a full disk
            with contextlib.suppress(OSError):
                if not record.exists():
                    self.remove()
            self.unlock()
            raise

    def _take_over(self, record: JsonObject, reporter: Reporter) -> None:
        known = record.get("files", {}) if record.get("made_for") == self._key else {}
        if known:
            reporter.stage("check what is here", len(known))
        for name, (size, digest) in known.items():
            reporter.step(name)
            if self._same(name, size, digest):
                self._whole[name] = size, digest
            else:
                reporter.note(f"{self.root / name} is not as it was written: it is written again")
        self._tidy()
        self._save()
        if self._whole:
            reporter.note(f"{self._target}: goes on: {self._kept('here')}")

    def _same(self, name: str, size: int, digest: str) -> bool:
        """Whether a file is as it was recorded, and no link."""
        try:
            return size_of(self.root, name) == size and digest_of(self.root, name) == digest
        except BundleError:
            return False

    def has(self, name: str) -> bool:
        """Whether a file, named with its folder, is whole."""
        return name in self._whole

    def path(self, folder: str, name: str) -> Path:
        """Return the path of a file in a folder, and create the folder."""
        (self.root / folder / name).parent.mkdir(parents=True, exist_ok=True)
        return self.root / folder / name

    def finish(self, *names: str) -> None:
        """Record files, named with their folders, as whole, once they are on disk."""
        with ThreadPoolExecutor(1) as pool:  # digests while the disk writes
            digests = {name: pool.submit(digest_of, self.root, name) for name in names}
            for name in names:
                sync(self.root / name)
            found = {name: ((self.root / name).stat().st_size, digests[name].result()) for name in names}
        with self._recording:
            self._whole |= found
            self._save()

    def at_end(self, call: Callable[[], None]) -> None:
        """Have something called when the export ends or stops."""
        self._stack.callback(call)

    def check_room(self, needed: int) -> None:
        """Raise TargetError if the disk has less room than an export of so many bytes needs beside what is here."""
        left = needed - sum(size for size, _ in self._whole.values())
        check_room(self.root, self._target, left)

    def publish(self) -> None:
        """Give the folder FILES the output's name, and remove the rest."""
        made = self.root / self.FILES
        for path in made.rglob("*"):
            sync(path)
        sync(made)
        made.rename(self._output)
        self._whole.clear()  # an error from here on keeps nothing, and does not undo the output
        with contextlib.suppress(OSError):
            sync(self._output.parent)
        with contextlib.suppress(OSError):
            self.remove()

    def remove(self) -> None:
        """Remove the directory; the record goes last, by which a later export knows that it may."""
        self._whole.clear()
        self._tidy()
        for name in (_RECORD, LOCK):
            (self.root / name).unlink(missing_ok=True)
        self.root.rmdir()

    def stop(self) -> str:
        """Remove what is not whole, or everything where nothing is; says what is kept."""
        if not self._whole:
            self.remove()
            return ""
        self._tidy()
        self._save()  # a full disk may not have taken the last one
        return f"; {self._kept('kept')}: run the same command again to go on"

    def close(self) -> None:
        """Close what is open, and unlock the directory."""
        self._stack.close()

    def unlock(self) -> None:
        """Release the lock."""
        os.close(self._lock)
        with contextlib.suppress(OSError):  # NFS keeps a removed lock's name until here
            self.root.rmdir()

    def _kept(self, where: str) -> str:
        count = len(self._whole)
        size = sum(size for size, _ in self._whole.values())
        return (
            f"{count} whole files ({size:,} bytes) are {where}" if count > 1 else f"a file ({size:,} bytes) is {where}"
        )

    def _save(self) -> None:
        document = {"made_for": self._key, "files": self._whole}
        replace_file(self.root / _RECORD, json.dumps(document, indent=1).encode())

    def _tidy(self) -> None:
        """Remove all that is not whole."""
        for path in sorted(self.root.rglob("*"), reverse=True):  # a folder after what is in it
            name = path.relative_to(self.root).as_posix()
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif name not in self._whole and name not in (LOCK, _RECORD):
                path.unlink()


@contextlib.contextmanager
def working(target: Path, made_for: Mapping[str, object], needed: int, reporter: Reporter) -> Iterator[ExportDirectory]:
    """Context manager: fill a working directory, and move it to `target` when the context ends without an error.

    Files that a stopped export with the same `made_for` left are kept. An InputError removes everything.

    Args:
        target: new or empty.
        made_for: everything that the bytes of the files depend on.
        needed: approximate bytes to write.
        reporter: receives a message when a stopped export is continued, or stopped again.

    Raises:
        TargetError: if `target` cannot be written, or the disk has too little room. The message says what is kept.
    """
    work = None
    try:
        work = ExportDirectory(target, made_for, reporter)
        work.check_room(needed)
        yield work
        work.close()
        work.publish()
    except BaseException as error:
        kept = _stopped(work, error)
        if isinstance(error, OSError):
            raise TargetError(f"{target}: cannot be written: {error.strerror or error}{kept}") from None
        if kept:
            reporter.note(f"{target}: stopped{kept}")
        raise
    finally:
        if work is not None:
            work.unlock()


def _stopped(work: ExportDirectory | None, error: BaseException) -> str:
    """Close and tidy after an error; says what is kept. A refusal keeps nothing, as it would come again."""
    if work is None:
        return ""
    try:
        work.close()
        if isinstance(error, InputError):
            work.remove()
            return ""
        return work.stop()
    except OSError:  # a disk that is gone: the next export tidies
        return ""


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _read(path: Path) -> JsonObject:
    try:
        found = json.loads(path.read_text())
        for name, (size, digest) in found["files"].items():
            if not (safe_path(name) and isinstance(size, int) and isinstance(digest, str)):
                return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
