"""What a case is, on disk and in memory, and random changes of documents and bytes."""

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 255, 4095, 4096, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 47, 1 << 63, (1 << 64) - 1, 10**400)
PATHS = ("", "..", "../../outside/file", "/etc/passwd", "a/../b")
TEXTS = (*PATHS, "\0", "w9", "\ud800", "A" * 70_000, "CON", "%s", "{}", "config.json")
VALUES: tuple[object, ...] = (*NUMBERS, *TEXTS, None, True, False, 0.5, 1e308, [], {}, [[]], {"": ""})


class Case:
    """A copy of a whole directory, as one case changes it; on disk once `write` was called.

    Attributes:
        files: bytes of each, None where there is none.
        others: what stands in place of a file: links, directories, pipes.
        outside: a file that is nobody's.
    """

    def __init__(self, base: dict[str, bytes], chance: random.Random, outside: Path) -> None:
        self.files: dict[str, bytes | None] = dict(base)
        self.others: dict[str, Callable[[Path], object]] = {}
        self.chance = chance
        self.outside = outside

    def data(self, name: str) -> bytes:
        """The bytes of a file that is there."""
        data = self.files[name]
        assert data is not None
        return data

    def write(self, root: Path) -> None:
        """Make the directory of it, whatever stands there."""
        for name, data in self.files.items():
            path = root / name
            if name in self.others or data is None:
                _clear(path)
            elif not path.is_file() or path.is_symlink() or path.read_bytes() != data:
                _clear(path)
                path.write_bytes(data)
        for name, make in self.others.items():
            make(root / name)


@dataclass(frozen=True)
class Subject:
    """Something whole, ways to change it, and what uses it then."""

    name: str
    make: Callable[[Path], None]  # writes it into a directory
    case: type[Case]
    kinds: Mapping[Callable[[Any], None], int]  # a way to change a case, and how often it comes
    # Uses what stands in a directory, perhaps (if the last is true) writing to another: "opened" or "refused".
    attempt: Callable[[Path, Path, bool], str]


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _places(document: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield (*at, key)
        yield from _places(value, (*at, key))


def change(document: Any, chance: random.Random) -> None:
    """A value somewhere in it becomes another, goes, or comes twice."""
    places = list(_places(document))
    if not places:
        return
    at = chance.choice(places)
    where = document
    for key in at[:-1]:
        where = where[key]
    kind = chance.random()
    if kind < 0.6:
        where[at[-1]] = copy.deepcopy(chance.choice(VALUES))
    elif kind < 0.7:
        del where[at[-1]]
    elif kind < 0.8 and isinstance(where, dict):
        where[chance.choice(TEXTS)] = where.pop(at[-1])
    elif isinstance(where, list):
        where.extend(copy.deepcopy(where) * min(chance.choice((1, 3, 500)), 1 + 10_000 // (1 + len(where))))
    else:
        other = document
        for key in chance.choice(places):
            other = other[key]
        where[at[-1]] = copy.deepcopy(other)


def header_of(data: bytes | bytearray) -> tuple[Any, bytes]:
    """The header of a safetensors file, and the bytes behind it."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), bytes(data[8 + length :])


def with_header(document: object, body: bytes, size: int = 0) -> bytes:
    """A safetensors file; its header is filled up to `size` bytes."""
    text = json.dumps(document, separators=(",", ":")).encode().ljust(size)
    return struct.pack("<Q", len(text)) + text + body


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Bits turned, bytes cut out, doubled or put in."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(out) + 1)
        size = chance.choice((1, 2, 8, 64, 4096))
        kind = chance.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del out[at : at + size]
        elif kind == 2:
            out[at:at] = out[at : at + size]
        elif kind == 3:
            out[at:at] = chance.choice(
                (b"\xff\xfe\xfd", b"\0" * size, b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000, b"NaN")
            )
        else:
            out[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS[:-1]) & (1 << 64) - 1)
    return bytes(out)
