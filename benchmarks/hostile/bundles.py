"""Small whole bundles of each version that holds a checkpoint, ways to change them, and what then uses them."""

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from moepack.pack.errors import MoepackError
from moepack.pack.manifest import MANIFEST, canonical
from moepack.pack.reader import open_bundle, verify
from moepack.pack.tables import TABLES
from moepack.pipeline.shrink import shrink

from .edits import Case, Subject, change, damaged, header_of, with_header
from .small_bundle import RELEASED, released_versions, write_small_bundle

PACKED = ("experts/", "dense/")


class BundleCase(Case):
    """A copy of a whole bundle.

    Attributes:
        manifest: the manifest's document, without its digest.
        raw: its bytes, where they are no document.
    """

    def __init__(self, base: dict[str, bytes], chance: random.Random, outside: Path) -> None:
        super().__init__(base, chance, outside)
        self.manifest = json.loads(base[MANIFEST])
        del self.manifest["sha256"]
        self.raw: bytes | None = None

    def sign(self, name: str) -> None:
        """Let the manifest say of a file what is true."""
        data = self.files[name]
        entry = self.manifest["files"].get(name)
        if data is None or not isinstance(entry, dict):
            return
        if "sha256" in entry:
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        else:
            head = data[: entry["header_size"]]
            entry |= {"size": len(data), "header_sha256": hashlib.sha256(head).hexdigest()}

    def write(self, root: Path) -> None:
        """See Case; the manifest is made last."""
        self.files[MANIFEST] = self.signed() if self.raw is None else self.raw
        super().write(root)

    def signed(self) -> bytes:
        """The manifest's bytes; now and then its digest is left wrong."""
        document = dict(self.manifest)
        if self.chance.random() < 0.95:
            document["sha256"] = hashlib.sha256(canonical(document)).hexdigest()
        return canonical(document)


def whole(target: Path, name: str, group_size: int) -> None:
    """The small bundle, whose first version, which holds the checkpoint, is this one."""
    versions = released_versions(name, group_size)
    write_small_bundle(target, versions, next(iter(versions[0].holds)))


def manifests(case: BundleCase) -> None:
    """The manifest's values."""
    for _ in range(case.chance.choice((1, 1, 2, 3))):
        change(case.manifest, case.chance)


def texts(case: BundleCase) -> None:
    """The manifest's bytes."""
    case.raw = damaged(case.signed(), case.chance)


def headers(case: BundleCase) -> None:
    """A layer file's header: overlapping extents, holes, counts, names, digests; the file's size stays right."""
    name = case.chance.choice([n for n in case.files if n.startswith(PACKED)])
    data = case.data(name)
    document, body = header_of(data)
    length = len(data) - len(body) - 8
    change(document, case.chance)
    changed = with_header(document, body)
    if len(changed) <= len(data) or case.chance.random() < 0.5:
        changed = with_header(document, body, length)
    case.files[name] = changed
    if case.chance.random() < 0.9:
        case.sign(name)


def extents(case: BundleCase) -> None:
    """An extent's bytes, with its digest and those above it made right again."""
    name = case.chance.choice([n for n in case.files if n.startswith(PACKED)])
    data = case.data(name)
    head, rest = header_of(data)
    body = bytearray(rest)
    tensors = sorted(n for n in head if n != "__metadata__")
    number = case.chance.randrange(len(tensors))
    begin, end = head[tensors[number]]["data_offsets"]
    for _ in range(case.chance.choice((1, 4, 64))):
        at = begin + case.chance.randrange(case.chance.choice((32, 1024, end - begin)))
        body[at : at + 4] = struct.pack("<I", case.chance.choice((0, 1, 0xFFFFFFFF, case.chance.getrandbits(32))))
    digests = head["__metadata__"]["sha256"].split(",")
    digests[number] = hashlib.sha256(body[begin:end]).hexdigest()
    head["__metadata__"]["sha256"] = ",".join(digests)
    case.files[name] = with_header(head, bytes(body), len(data) - len(rest) - 8)
    case.sign(name)


def tables(case: BundleCase) -> None:
    """The loss tables, header or bytes."""
    data = case.data(TABLES)
    if case.chance.random() < 0.6:
        document, body = header_of(data)
        change(document, case.chance)
        case.files[TABLES] = with_header(document, body)
    else:
        case.files[TABLES] = damaged(data, case.chance)
    case.sign(TABLES)


def links(case: BundleCase) -> None:
    """Links out, to themselves and to nowhere, directories, pipes and devices in place of files; and missing files."""
    for _ in range(case.chance.choice((1, 1, 3))):
        name = case.chance.choice(list(case.files))
        case.others[name] = case.chance.choice(
            (
                lambda p: p.symlink_to(case.outside),
                lambda p: p.symlink_to(p.name),
                lambda p: p.symlink_to("nowhere"),
                lambda p: p.symlink_to("/dev/zero"),
                lambda p: p.symlink_to("."),
                lambda p: p.mkdir(),
                lambda p: os.mkfifo(p),
                lambda p: None,
            )
        )
        entry = case.manifest["files"].get(name)
        if isinstance(entry, dict) and case.chance.random() < 0.5:
            entry["size"] = case.chance.choice((0, 12))


def bodies(case: BundleCase) -> None:
    """Any file's bytes, its size and digests made right again or not."""
    name = case.chance.choice([n for n in case.files if n != MANIFEST])
    case.files[name] = damaged(case.data(name), case.chance)
    if case.chance.random() < 0.7:
        case.sign(name)


KINDS: dict[Callable[[BundleCase], None], int] = {
    manifests: 30,
    texts: 10,
    headers: 20,
    extents: 15,
    tables: 10,
    links: 10,
    bodies: 5,
}


def attempt(root: Path, out: Path, shrinks: bool) -> str:
    """Open, check, read tables, decode, now and then shrink: "opened" or "refused"."""
    try:
        bundle = open_bundle(root)
        found = [p for _, problems in verify(bundle) for p in problems]
        bundle.calibration()
        with np.errstate(invalid="ignore", over="ignore"):  # scales and codes that verify has found
            for version in bundle.versions:
                for layer in bundle.layers:
                    bundle.expert(version.name, layer.index, 0).numpy()
        if shrinks:
            shrink(root, out, [bundle.versions[-1].name])
        return "refused" if found else "opened"
    except (MoepackError, OSError):
        return "refused"


SUBJECTS = tuple(
    Subject(f"bundle of {name}", partial(whole, name=name, group_size=size), BundleCase, KINDS, attempt)
    for name, size in {"bf16": 0, **dict(RELEASED)}.items()
)
