"""Trials of compiled libraries against their plain references, made once for each processor and remembered.

A compiler can be wrong about a loop for one kind of processor, and a processor about an instruction. So nothing that a
library computes is used before a trial of all its forms, at the level of instructions (isa.py) that will be used. What
a trial compares is its library's to decide. What it found is kept in the user's cache, by the digests of the library,
of the trial and of the references that it imports, the processor, the level, and moepack's version.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import logging
import platform
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from .user_files import remembered

Trial = Callable[[], str]  # a function of a module; returns what differs from the reference, in words, or ""
LONGEST = 300  # characters of a finding
# Lines of /proc/cpuinfo that tell processors apart, and none that differs between starts of one machine.
_FACTS = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "microcode",
    "flags",
    "Features",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "CPU revision",
    "isa",
    "uarch",
    "cpu",
    "revision",
)
log = logging.getLogger("moepack")
faults: dict[str, str] = {}  # what is not used in this process, by library and level, and why
_best: dict[Path, int | None] = {}  # what `best_level` returned, by library
_locks: collections.defaultdict[Path, threading.Lock] = collections.defaultdict(threading.Lock)


def open_library(path: Path, sources: Path) -> ctypes.CDLL:
    """Open a compiled library of ours.

    `sources` is the folder of its C files. Raises OSError if the library is missing, and if it was compiled from other
    files than these, because the addresses and sizes that it is given would not be those that it expects. Logs the
    latter.
    """
    library = ctypes.CDLL(str(path))
    try:
        compiled = ctypes.c_char_p.in_dll(library, f"moepack{path.stem}_sources").value
    except ValueError:
        compiled = None
    if compiled != _digest(sources).encode():
        _leave_out(path.name, "it was compiled from other sources: install moepack again")
        raise OSError(f"{path}: {faults[path.name]}")
    return library


def _digest(folder: Path) -> str:
    """The digest by which a library knows the C files that it is made of (setup.py)."""
    files = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def best_level(library: Path, names: dict[int, str], use: Callable[[int], int], trial: Trial) -> int | None:
    """Return the highest level at which a library agrees with its reference, now in use; `None` if none does.

    `names` are those of the levels that may be used; `use` makes the library use a level. Each level that fails is
    logged, and stands in `faults`. A process tries a library once.
    """
    with _locks[library]:
        if library not in _best:
            _best[library] = _highest(library, names, use, trial)
        return _best[library]


def _highest(library: Path, names: dict[int, str], use: Callable[[int], int], trial: Trial) -> int | None:
    for level in sorted(names, reverse=True):
        use(level)
        if not (wrong := _finding(library, names[level], trial)):
            return level
        remedy = "install moepack again with another C compiler, for example CC=clang"
        what = f"it computes wrong numbers on this processor ({wrong}): {remedy}"
        _leave_out(f"{library.name} ({names[level]})", what)
    return None


def _leave_out(what: str, why: str) -> None:
    if faults.get(what) != why:
        log.warning("%s is not used: %s", what, why)
    faults[what] = why


def _finding(library: Path, level: str, trial: Trial) -> str:
    """Return what is remembered of a library at a level; else what the trial finds now, which is then remembered."""

    def tried() -> str:
        with ThreadPoolExecutor(1, "moepack-trial") as pool:  # the caller's thread may be in one of torch's modes
            return pool.submit(trial).result()[:LONGEST]

    parts = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (library, *_sources(trial))]
    version = sys.modules[__name__.partition(".")[0]].__version__  # the package's, which has imported this module
    return remembered("trials", [*parts, processor(), level, version], _words, tried)


def _words(document: object) -> str:
    if not isinstance(document, str) or len(document) > LONGEST:
        raise ValueError("no finding")
    return document


def _sources(trial: Trial) -> list[Path]:
    """The file of a trial, and those of moepack that it imports names from: with them, its references."""
    package = __name__.partition(".")[0]
    files = {trial.__code__.co_filename}
    for value in trial.__globals__.values():
        module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and module.__name__.partition(".")[0] == package and module.__file__:
            files.add(module.__file__)
    return sorted(map(Path, files))


@functools.cache
def processor() -> str:
    """The model and the features of this machine's processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    facts = sorted({f"{name.strip()}:{value}" for name, _, value in pairs if name.strip() in _FACTS})
    return "\n".join([platform.machine(), platform.processor(), *facts])
