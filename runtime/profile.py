"""Profiles: how often a user's own traffic chose each expert, in the place of calibration's counts.

A profile is a small JSON file that belongs to one model: it names the bundle by its tensors outside the experts, which
all versions share. It is read as untrusted. What follows from the counts is the policies' to decide.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.manifest import CONFIG, LEFTOVERS, TABLES
from moepack.pack.reader import TENSORS, Bundle, variant
from moepack.pack.user_files import write_whole

if TYPE_CHECKING:
    from .serving import Serving

FORMAT = "moepack.profile/1"
MOST_BYTES = 64 << 20  # of a profile's file: more than any model's counts take
MOST = 1 << 53  # of a count
EVERY = 300.0  # seconds between two savings of a server's profile
Counts = list[npt.NDArray[np.int64]]  # for each layer, [experts]
log = logging.getLogger("moepack.runtime")


def identity(bundle: Bundle) -> str:
    """Name the model of a bundle: a digest of its configuration and of its tensors outside the experts."""
    files = bundle.manifest.files
    named = {
        name: files[name].sha256
        for name in files
        if name == CONFIG or (name.endswith(TENSORS) and name not in (TABLES, LEFTOVERS))
    }
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def read_profile(path: str | Path, bundle: Bundle) -> Counts:
    """Read a profile.

    Raises:
        InputError: if the file cannot be read, is no profile, or belongs to another model.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(f"{path}: has more than {MOST_BYTES} bytes, which no profile has")
        found = json.loads(data)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not a profile: it is no JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f"{path}: not a profile: its format is not {FORMAT}")
    if found.get("model") != identity(bundle):
        raise InputError(f"{path}: a profile of another model than {bundle.path}")
    rows = found.get("counts")
    if not isinstance(rows, list) or [len(x) if isinstance(x, list) else -1 for x in rows] != _shape(bundle):
        raise InputError(f"{path}: its counts are not one for each expert of {bundle.path}")
    if not all(type(n) is int and 0 <= n <= MOST for row in rows for n in row):
        raise InputError(f"{path}: a count is a whole number from 0 to 2^53")
    return [np.array(row, np.int64) for row in rows]


def write_profile(path: str | Path, bundle: Bundle, counts: Sequence[Sequence[int]]) -> None:
    """Write a profile in one step: the file is the former one or the whole new one. Raises OSError on failure."""
    rows = [[min(int(n), MOST) for n in row] for row in counts]
    text = json.dumps({"format": FORMAT, "model": identity(bundle), "counts": rows})
    write_whole(Path(path).absolute(), text + "\n")


def profiled(bundle: Bundle, path: str | Path | None) -> Bundle:
    """Return the bundle with the routing counts of a profile; without a path, the bundle. Raises as `read_profile`."""
    return bundle if path is None else variant(bundle, routed=read_profile(path, bundle))


def check_writable(path: str | Path) -> None:
    """Raise InputError unless a profile can be written at `path`."""
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: a profile cannot be written there: name a file in a folder that is yours")


@contextlib.contextmanager
def kept(path: str | Path, bundle: Bundle, serving: Serving) -> Iterator[None]:
    """Count what is served in the context into the profile at `path`: every `EVERY` seconds, and at the end.

    What the file held before counts half, so that traffic of a few sessions ago fades. Without traffic it stays.
    """
    before: Counts = [np.array(row, np.int64) for row in serving.routed()]
    old = read_profile(path, bundle) if Path(path).exists() else [0 * row for row in before]
    ended = threading.Event()
    written = sum(int(row.sum()) for row in before)

    def save() -> None:
        nonlocal written
        counts = serving.routed()
        if (total := sum(map(sum, counts))) == written:
            return
        new = [(a // 2 + b - c).tolist() for a, b, c in zip(old, counts, before, strict=True)]
        try:
            write_profile(path, bundle, new)
            written = total
        except OSError as error:
            log.warning("%s: the profile is not saved: %s", path, error.strerror)

    def run() -> None:
        while not ended.wait(EVERY):
            save()

    thread = threading.Thread(target=run, name="moepack-profile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        save()


def _shape(bundle: Bundle) -> list[int]:
    return [layer.experts for layer in bundle.layers]
