"""The work directory: finished pieces of a build, from which a killed build resumes.

A piece counts once it has a marker, which is written after the piece is on disk. An earlier process's marker counts if
the files are as they were then. Within a layer, each task's result is a file named by the digest of the task's inputs.
settings.json holds the settings that change the bytes. A directory made with other settings is refused; the error
names the setting.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from pathlib import Path

from moepack.pack.errors import InputError, TargetError
from moepack.pack.layer_file import is_whole
from moepack.pack.manifest import ExpertFileEntry
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.writer import LOCK, existing, replace_file, sync
from moepack.shared.progress import SILENT, Reporter

from .saved import is_as_saved

DIGESTS = "digests.json"  # of the checkpoint's files
HIDDEN = "hidden.safetensors"  # activations that leave a layer; removed from its piece when later ones are kept
_SETTINGS = "settings.json"
_MARKER = "done.json"
_SAVED = "saved"  # in a marker: the names of files that the piece cannot do without
_BEHIND = "chosen"  # of a stage's settings: what digests among them follow from
_OBJECT = re.compile(r"[0-9a-f]{64}\.safetensors")
_REMOVED = "removed-"  # prefix of folders that are being removed
PROBE = "shared-"  # prefix of files by which machines detect a shared file system
ADDED = "add-"  # prefix of stages that add versions


def expert_name(version: str) -> str:
    """The name of an experts' version's file in a piece."""
    return f"{version}.safetensors"


def dense_name(version: str) -> str:
    """The name of a dense version's file in a piece."""
    return f"dense-{version}.safetensors"


def check_work(path: Path, output: Path | None = None) -> None:
    """Raise TargetError for a path that cannot become a work directory, or not one beside `output`; creates nothing.

    A directory that holds something is taken only if moepack made it as a work directory: --fresh removes folders.
    """
    above = existing(path.absolute())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise TargetError(f"{path}: cannot be used as a work directory: {above} is not a writable directory")
    if output is not None and path.resolve().is_relative_to(output.resolve()):
        raise TargetError(f"{path}: lies in the bundle's directory {output}: name a --work outside it")
    if path.is_dir():
        names = {entry.name.removesuffix(".partial") for entry in path.iterdir()}
        ours = LOCK in names and (_SETTINGS in names or names <= {LOCK, DIGESTS})
        if names and not ours:
            raise TargetError(f"{path}: holds files and is no work directory of moepack: name another --work")


class WorkDirectory:
    """An open, locked work directory.

    A stage is "calibrate", "quantize" or one that adds versions. A piece is a stage's work on one part of the model: a
    decoder layer, or what lies outside the layers (`layer` None).
    """

    def __init__(self, path: Path, reporter: Reporter = SILENT) -> None:
        self.path = path
        self._reporter = reporter
        self._checked = False  # whether the pieces of earlier processes are
        check_work(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / LOCK).open("w")
        except OSError as error:
            raise TargetError(f"{path}: cannot be used as a work directory: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise TargetError(f"{path}: another build is at work here: wait for it, or name another --work") from None

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def settings(self) -> dict[str, JsonObject]:
        """The settings of each stage that was begun here, by stage; empty for a new directory."""
        path = self.path / _SETTINGS
        if not path.exists():
            return {}
        document = self.read(path)
        if document is None or not all(isinstance(how, dict) for how in document.values()):
            raise TargetError(f"{path}: is damaged: start over with moepack build or calibrate, and --fresh")
        return document

    def begin(self, stage: str, wanted: JsonObject, fresh: bool, behind: JsonObject | None = None) -> None:
        """Start or resume a stage with these settings. `fresh` discards the stage, and with "calibrate" all others.

        `behind` has what the user chose, by name, where digests in `wanted` follow from it. It may change as long as
        these do not; where they do, the error names it.

        Raises:
            InputError: when finished pieces were made with other settings; names the first difference.
        """
        over = fresh and stage == "calibrate"  # which takes damaged settings, too
        have = {} if over else self.settings()
        if fresh:
            folders = [path.name for path in self.path.iterdir()]
            after = [name for name in folders if name == "quantize" or name.startswith(ADDED)]
            for name in (*(after if over else ()), stage, "objects"):
                have.pop(name, None)
                self._remove(self.path / name)
        # Without a finished piece, old settings do not matter.
        old = dict(have.get(stage, wanted) if self.holds(stage) else wanted)
        chosen = dict(behind or {})
        before = old.pop(_BEHIND, chosen)
        for key in sorted(set(old) | set(wanted)):
            was = old.get(key)
            now = wanted.get(key)
            if was != now:
                if isinstance(was, dict) and isinstance(now, dict):
                    part = next(k for k in sorted({*was, *now}) if was.get(k) != now.get(k))
                    key = f"{key} ({part})"
                    was = was.get(part)
                    now = now.get(part)
                if other := [name for name in chosen if before.get(name) != chosen[name]]:
                    key = other[0]
                    was = before.get(key)
                    now = chosen[key]
                raise InputError(
                    f"{self.path}: holds pieces made with {key} {_short(was)}, now {_short(now)}: "
                    "use the old setting, another --work, or --fresh"
                )
        kept = {**wanted, _BEHIND: chosen} if chosen else dict(wanted)
        replace_file(self.path / _SETTINGS, json.dumps({**have, stage: kept}, indent=1).encode())
        (self.path / stage).mkdir(exist_ok=True)  # after the settings, by which moepack knows its directory

    def holds(self, stage: str) -> bool:
        """Whether any piece of a stage is finished."""
        return any((self.path / stage).glob(f"*/{_MARKER}"))

    def piece(self, stage: str, layer: int | None, name: str) -> Path:
        """Return the path of a piece's file, and make the piece's folder."""
        directory = self.path / stage / ("rest" if layer is None else f"layer-{layer:03d}")
        directory.mkdir(parents=True, exist_ok=True)
        return directory / name

    def object(self, address: str) -> Path:
        """Return the path of a task's result, named by the digest of the inputs.

        The file is deleted when its layer is done.
        """
        directory = self.path / "objects"
        directory.mkdir(exist_ok=True)
        return directory / f"{address}.safetensors"

    def _remove(self, folder: Path) -> None:
        """Remove a folder. A killed process leaves the whole folder, or nothing under its name."""
        if folder.exists():
            aside = self.path / f"{_REMOVED}{secrets.token_hex(4)}"
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def tidy(self) -> None:
        """Remove a killed build's temporary files and half-removed folders."""
        for path in self.path.glob(f"{_REMOVED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.path / "objects").glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not _OBJECT.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for path in self.path.glob(f"{PROBE}*"):
            path.unlink(missing_ok=True)

    def done(self, stage: str, layer: int | None) -> JsonObject | None:
        """The note that `mark` wrote for a finished piece, or None.

        The first call checks all pieces that earlier processes finished. One with damage becomes unfinished.
        """
        if not self._checked:
            self._checked = True
            self._check()
        return self.read(self.piece(stage, layer, _MARKER))

    def _check(self) -> None:
        markers = sorted(p for p in self.path.glob(f"*/*/{_MARKER}") if not p.parts[-3].startswith(_REMOVED))
        if markers:
            self._reporter.stage("check finished pieces", len(markers))
        for marker in markers:
            self._reporter.step(marker.parent.relative_to(self.path).as_posix())
            try:
                damaged = _damaged(marker.parent, self.read(marker) or {})
            except (KeyError, TypeError, AttributeError):  # of JSON that no build wrote
                damaged = [marker]
            for path in damaged:
                self.drop(path)
            if damaged:
                marker.unlink(missing_ok=True)

    def drop(self, path: Path) -> None:
        """Remove a damaged file, and say so."""
        self._reporter.note(f"{path}: is damaged: what it holds has to be made again")
        path.unlink(missing_ok=True)

    def read(self, path: Path) -> JsonObject | None:
        """Read a small JSON file that holds one object; None if it cannot be read."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def mark(self, stage: str, layer: int | None, note: JsonObject) -> None:
        """Mark a piece as finished, after syncing its files."""
        directory = self.piece(stage, layer, _MARKER).parent
        for file in directory.iterdir():
            sync(file)
        saved = _safetensors(directory) - _layer_files(note).keys() - {HIDDEN}
        replace_file(directory / _MARKER, json.dumps({**note, _SAVED: sorted(saved)}).encode())
        sync(directory)


def _safetensors(piece: Path) -> set[str]:
    return {path.name for path in piece.glob("*.safetensors")}


def _layer_files(note: JsonObject) -> dict[str, ExpertFileEntry]:
    """The layer files of a piece by name, from its note."""
    experts = {expert_name(v): entry for v, entry in note.get("entries", {}).items()}
    dense = {dense_name(v): entry for v, entry in note.get("dense", {}).get("entries", {}).items()}
    return {name: ExpertFileEntry(**entry) for name, entry in (experts | dense).items()}


def _damaged(piece: Path, note: JsonObject) -> list[Path]:
    """The files of a finished piece that do not have the bytes that were written, or are not there."""
    entries = _layer_files(note)
    wrong = [name for name, entry in entries.items() if not is_whole(piece / name, entry)]
    saved = _safetensors(piece) - entries.keys() | {*note[_SAVED]}
    wrong += [name for name in saved if not is_as_saved(piece / name)]
    return [piece / name for name in sorted(wrong)]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 48 else text[:45] + "..."
