"""Copies of a bundle that tests edit, by hand, and sign again; and what using such a copy says.

Each edit must end in a refusal of one printable line, or in a bundle whose values can all be read, within SECONDS.
Random edits are those of `benchmarks.hostile`.
"""

import hashlib
import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hostile.edits import header_of, with_header
from moepack.pack.errors import BundleError, MoepackError, Problem
from moepack.pack.manifest import MANIFEST
from moepack.pack.reader import open_bundle
from moepack.pack.tables import TABLES
from moepack.reports.inspect import inspect, render

SECONDS = 20  # an edit that takes longer hangs
Change = Callable[[Any], Any]


def canonical(document) -> bytes:
    """The bytes of a manifest."""
    return (json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode()


def signed(document: dict[str, Any]) -> bytes:
    """The bytes of a manifest, with the digest that it should have."""
    document.pop("sha256", None)
    return canonical({**document, "sha256": hashlib.sha256(canonical(document)).hexdigest()})


class Victim:
    """A copy of a bundle that is edited and put right again. `path` is its directory."""

    def __init__(self, source: Path, room: Path):
        self.path = Path(shutil.copytree(source, room / "bundle"))
        self._source = source
        self.manifest: dict[str, Any] = json.loads((source / MANIFEST).read_text())
        self._touched: set[str] = set()

    def restore(self):
        """Undo every edit."""
        for name in self._touched:
            file = self.path / name
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            elif os.path.lexists(file):
                file.unlink()
            if (self._source / name).is_dir():
                shutil.copytree(self._source / name, file)
            elif (self._source / name).exists():
                shutil.copyfile(self._source / name, file)
        self._touched.clear()

    def write(self, name: str, data: bytes):
        """Replace a file."""
        self._touched.add(name)
        (self.path / name).write_bytes(data)

    def replace(self, name: str, by: Callable[[Path], object]):
        """Remove a file or folder, and put something else there."""
        self._touched.add(name)
        file = self.path / name
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        by(file)

    def sign(self, change: Callable[[dict[str, Any]], object]):
        """Change the manifest, and sign it."""
        document = json.loads((self.path / MANIFEST).read_text())
        change(document)
        self.write(MANIFEST, signed(document))

    def rewrite(self, name: str, data: bytes):
        """Replace a file, and have the manifest say so. Of a layer file the header's digest alone is the manifest's."""
        self.write(name, data)
        entry: dict[str, Any] = {"size": len(data)}
        if name.startswith(("experts/", "dense/")):
            head = min(8 + struct.unpack("<Q", data[:8])[0], len(data)) if len(data) >= 8 else 0
            entry |= {"header_size": head, "header_sha256": hashlib.sha256(data[:head]).hexdigest()}
        else:
            entry["sha256"] = hashlib.sha256(data).hexdigest()
        self.sign(lambda d: d["files"][name].update(entry))

    def header(self, name: str, change: Change):
        """Change the header of a safetensors file: `change` is given its document, and returns the new one or bytes.

        The new header takes the old one's length where it fits, so that data stay where they are.
        """
        header, body = header_of(data := (self.path / name).read_bytes())
        text = change(header)
        text = text if isinstance(text, bytes) else json.dumps(text, separators=(",", ":")).encode(errors="replace")
        text = text.ljust(len(data) - len(body) - 8)
        if name.startswith(("experts/", "dense/")):
            text += b" " * (-(len(text) + 8) % 4096)
        self.rewrite(name, struct.pack("<Q", len(text)) + text + body)

    def extent(self, name: str, expert: int, change: Callable[[np.ndarray[Any, Any]], object]):
        """Change the bytes of an extent in place, and sign them, their header and the manifest."""
        data = (self.path / name).read_bytes()
        header, rest = header_of(data)
        body = np.frombuffer(rest, np.uint8).copy()
        names = sorted(n for n in header if n != "__metadata__")
        begin, end = header[names[expert]]["data_offsets"]
        change(body[begin:end])
        digests = header["__metadata__"]["sha256"].split(",")
        digests[expert] = hashlib.sha256(body[begin:end].data).hexdigest()
        header["__metadata__"]["sha256"] = ",".join(digests)
        self.rewrite(name, with_header(header, body.tobytes(), len(data) - len(rest) - 8))

    def tables(self, change: Callable[[dict[str, np.ndarray[Any, Any]], dict[str, str]], object]):
        """Change the tables and their metadata, and sign them."""
        from safetensors import safe_open
        from safetensors.numpy import save

        with safe_open(self.path / TABLES, framework="np") as f:
            arrays, metadata = {n: f.get_tensor(n).copy() for n in f.keys()}, dict(f.metadata())  # noqa: SIM118
        change(arrays, metadata)
        self.rewrite(TABLES, save({n: np.array(a, order="C") for n, a in arrays.items()}, metadata))


def read_all(path: Path):
    """Use a bundle as a user may: all of it is checked, shown, and decoded.

    Raises:
        MoepackError: when it is refused.
    """
    bundle = open_bundle(path)
    json.dumps(facts := inspect(path))
    from rich.console import Console

    with Path(os.devnull).open("w") as out:
        Console(file=out, markup=False).print(render(facts))
    problems = bundle.verify()
    for problem in problems:
        one_line(str(problem))
    if problems:
        raise Refused(str(problems[0]))
    for version in bundle.versions:
        for layer in (bundle.layers[0], bundle.layers[-1]):
            bundle.expert(version.name, layer.index, layer.experts - 1).numpy()
    for version in bundle.dense_versions:
        for described in bundle.manifest.dense:
            bundle.dense_matrix(version.name, described.module).numpy()
    dense = bundle.dense()
    dense.numpy(next(iter(dense)))


class Refused(MoepackError):
    """By `verify`."""


def one_line(text: str):
    """See that a message is a line that a terminal prints."""
    assert text and text.isprintable() and len(text) < 2500, repr(text[:300])


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes more of the processor's time, so that other programs do not count.

    What waits for ever is ended by pytest's time-out.
    """

    def late(*_):
        raise TimeoutError(f"took more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def problems_of(path: Path) -> list[Problem]:
    """What opening, the tables or `verify` says."""
    try:
        bundle = open_bundle(path)
        bundle.calibration()
        return bundle.verify()
    except BundleError as error:
        return list(error.problems)


def refusal(path: Path) -> str | None:
    """The line in which a bundle is refused; None for one that is good."""
    try:
        with in_time(SECONDS):
            read_all(path)
    except MoepackError as error:
        one_line(str(error))
        return str(error)
    return None
