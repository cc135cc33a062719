"""The folder inside the target where a pull keeps files until all are fetched and checked.

Then whole files move into the target, whole versions as folders, and the manifest last. A killed pull keeps the fetched
files here; the target is then a bundle only if it was one before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from moepack.pack.errors import InputError, TargetError
from moepack.pack.manifest import MANIFEST
from moepack.pack.writer import check_target, hold, sync

FOLDER = ".pulling"
RECORD = ".pulled.json"


class Staging:
    """The locked target of a pull. A context manager, which unlocks the target."""

    def __init__(self, target: Path) -> None:
        """Lock a target that is new, empty, a bundle, or left by a stopped pull.

        Raises:
            TargetError: for any other target, or while another pull runs in it.
        """
        self.target = target
        self._folder = target / FOLDER
        self.files = self._folder / "files"  # fetched files, under their names in the bundle
        if not (target / MANIFEST).is_file() and not self._folder.is_dir():
            check_target(target)
        try:
            if self._folder.is_symlink():
                raise TargetError(f"{self._folder}: is a link: remove it")
            self._new = not self.files.is_dir()
            self._lock = hold(self._folder, f"{target}: another pull is running here: wait for it")
            self.files.mkdir(exist_ok=True)
        except OSError as error:
            raise TargetError(f"{target}: cannot be written: {error.strerror}") from None

    def publish(self, names: Iterable[str], manifest: bytes, record: dict[str, str]) -> None:
        """Move fetched files into the target: new folders as a whole, and the manifest last.

        Raises:
            TargetError: if a folder in the target is a link: files would land outside the target.
        """
        wanted = dict.fromkeys(names)
        folders = set[Path]()
        for name in wanted:
            source = self.files / name
            goal = self.target / name
            if not source.exists():
                continue  # moved with its folder
            for above in reversed(goal.relative_to(self.target).parents[:-1]):
                if (self.target / above).is_symlink():
                    raise TargetError(f"{self.target / above}: is a link, which a pull does not follow: remove it")
            sync(source)
            version = goal.parent if name.startswith("experts/") else None
            if version is not None and not version.exists():
                for file in source.parent.iterdir():
                    if file.relative_to(self.files).as_posix() in wanted:
                        sync(file)
                    else:  # left by a stopped pull of another bundle
                        file.unlink()
                version.parent.mkdir(parents=True, exist_ok=True)
                source.parent.rename(version)
            else:
                goal.parent.mkdir(parents=True, exist_ok=True)
                source.replace(goal)
            folders |= {goal.parent, goal.parent.parent}
        for folder in folders:
            sync(folder)
        self._write(RECORD, json.dumps(record).encode())
        self._write(MANIFEST, manifest)
        sync(self.target)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str, data: bytes) -> None:
        temporary = self._folder / name
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(self.target / name)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Refused before it fetched much; what a stopped pull left is for a run without the mistake.
        if isinstance(error, InputError) and self._new:
            shutil.rmtree(self._folder, ignore_errors=True)
            if not any(self.target.iterdir()):
                self.target.rmdir()
        os.close(self._lock)


def read_record(target: Path) -> dict[str, str]:
    """The `repo` and `commit` that a target was pulled from; empty if unknown."""
    try:
        found = json.loads((target / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return {k: str(found[k]) for k in ("repo", "commit") if k in found} if isinstance(found, dict) else {}
