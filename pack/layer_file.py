"""Layer files: the extents of one version of one layer, as a safetensors file whose data are whole pages.

A file is written one extent at a time and the header last, so that only one extent is in memory. It is read an extent
at a time too, and not through a mapping: a mapped file that is cut ends the process. FORMAT.md, "Layer files".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType

import numpy as np

from .codec.bits import Buffer
from .errors import BundleError, Kind
from .files import advise, open_file, opened, writing
from .manifest import ExpertFileEntry
from .safetensors_file import Header, make_header, parse_header
from .spec import MAX_EXTENT, PAGE, DenseLayer, ExpertLayer, Version, align

Layer = ExpertLayer | DenseLayer
_DIGITS = 15  # most decimal digits of a byte offset: a header's size is fixed before the offsets are known


def _metadata(version: str, layer: Layer, digests: list[str]) -> dict[str, str]:
    form = f"moepack.{layer.kind}/1"
    return {"format": form, "layer": layer.label, "sha256": ",".join(digests), "version": version}


def header_size(version: str, layer: Layer) -> int:
    """Bytes of a layer file before its first extent: whole pages, the same for all sizes of extents."""
    names = {layer.extent_name(e): ("U8", (1,)) for e in range(layer.extents)}
    longest = make_header(names, _metadata(version, layer, ["0" * 64] * layer.extents))
    return align(len(longest) + 3 * _DIGITS * layer.extents, PAGE)


class LayerFileWriter:
    """Writer of one layer file. A context manager: after an error the file is removed."""

    def __init__(self, path: Path, version: str, layer: Layer) -> None:
        self._path = path
        self._version = version
        self._layer = layer
        self._temporary = path.with_name(path.name + ".partial")
        self._sizes: list[int] = []
        self._digests: list[str] = []
        self._payload = 0
        self.entry: ExpertFileEntry | None = None
        self._header_size = header_size(version, layer)
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path):
            self._file = self._temporary.open("wb")
            self._file.seek(self._header_size)

    def add(self, extent: Buffer, payload: int) -> None:
        """Write the next extent: whole pages, with `payload` bytes that are not padding."""
        if len(extent) % PAGE or len(self._sizes) == self._layer.extents:
            raise ValueError("an extent is whole pages, and a layer has no more extents than experts or matrices")
        with writing(self._path):
            self._file.write(extent.data)
        self._sizes.append(len(extent))
        self._digests.append(hashlib.sha256(extent.data).hexdigest())
        self._payload += payload

    def __enter__(self) -> LayerFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._temporary.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it writes once more what a full disk has refused
                self._file.close()

    def _finish(self) -> None:
        if len(self._sizes) != self._layer.extents:
            raise ValueError(f"{len(self._sizes)} extents written, the layer has {self._layer.extents}")
        names = {self._layer.extent_name(e): ("U8", (size,)) for e, size in enumerate(self._sizes)}
        header = make_header(names, _metadata(self._version, self._layer, self._digests), self._header_size)
        if len(header) != self._header_size:
            raise ValueError("the reserved header is too small")
        with writing(self._path):
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._temporary.rename(self._path)
        self.entry = ExpertFileEntry(
            self._header_size + sum(self._sizes), len(header), hashlib.sha256(header).hexdigest(), self._payload
        )


def is_whole(path: Path, entry: ExpertFileEntry) -> bool:
    """Whether a layer file has the bytes that its entry describes."""
    try:
        with path.open("rb") as file:
            head = file.read(entry.header_size)
            if hashlib.sha256(head).hexdigest() != entry.header_sha256:
                return False
            header = parse_header(head, os.fstat(file.fileno()).st_size, str(path))
            extents = sorted(header.tensors.values(), key=lambda t: t.begin)
            found = [hashlib.sha256(file.read(t.end - t.begin)).hexdigest() for t in extents]
    except (OSError, BundleError):
        return False
    return found == header.metadata["sha256"].split(",")


class LayerFile:
    """A layer file opened for reading. Its header is checked against the manifest's entry and against the layer.

    Raises BundleError when the file does not match these, or breaks the format.
    """

    def __init__(self, root: Path, name: str, entry: ExpertFileEntry, version: Version, layer: Layer) -> None:
        self.location = f"{root}/{name}"
        self._at = root.absolute(), name
        self.version = version
        self.layer = layer
        file = open_file(root, name)
        try:
            if (size := os.fstat(file).st_size) != entry.size:
                raise self._bad("size", f"{size} bytes, the manifest says {entry.size}")
            advise(file, "RANDOM")  # some systems read 8 MiB of extents with a header
            head = os.pread(file, entry.header_size, 0)
        except OSError as error:
            raise self._bad("read", f"cannot be read: {error}") from None
        finally:
            os.close(file)
        if hashlib.sha256(head).hexdigest() != entry.header_sha256:
            raise self._bad("digest", "its header does not match the manifest's digest")
        if struct.unpack("<Q", head[:8])[0] != entry.header_size - 8:
            raise self._bad("header", "its header length does not match the manifest")
        self._check(parse_header(head, entry.size, self.location))

    def _bad(self, kind: Kind, message: str) -> BundleError:
        return BundleError.single(self.location, kind, message)

    def _check(self, header: Header) -> None:
        layer = self.layer
        version = self.version
        meta = header.metadata
        digests = meta.get("sha256", "").split(",")
        if len(digests) != layer.extents or dict(meta) != _metadata(version.name, layer, digests):
            raise self._bad("header", "its metadata do not belong to this layer and version")
        self.digests = digests
        spans: list[tuple[int, int]] = []
        for e in range(layer.extents):
            t = header.tensors.get(layer.extent_name(e))
            where = layer.place(e)
            if t is None or t.dtype != "U8" or len(t.shape) != 1 or len(header.tensors) != layer.extents:
                raise self._bad("header", f"{where} is missing or not a byte string, or others are there")
            if t.begin % PAGE or t.end % PAGE or (spans and t.begin != spans[-1][1]):
                raise self._bad("alignment", f"the extent of {where} is not whole pages in order")
            if t.end - t.begin >= MAX_EXTENT:
                raise self._bad("overflow", f"the extent of {where} has {t.end - t.begin} bytes")
            sizes = version.stored_sizes(layer.extent_matrices(e))
            if sizes is not None and t.end - t.begin != sizes[0]:
                raise self._bad("size", f"the extent of {where} has {t.end - t.begin} bytes")
            spans.append((t.begin, t.end))
        self._spans = spans

    def extent(self, number: int, check_digest: bool = True) -> Buffer:
        """Read the extent of one expert or one dense matrix; the array is read-only.

        Raises BundleError when the file ends before it, or when its bytes do not match their digest.
        """
        begin, end = self._spans[number]
        extent = np.empty(end - begin, np.uint8)
        with opened(*self._at) as file:
            file.seek(begin)
            got = file.readinto(extent.data)
        if got < len(extent):
            raise BundleError.single(self.place(number), "size", "the file ends before it")
        if check_digest and hashlib.sha256(extent.data).hexdigest() != self.digests[number]:
            raise BundleError.single(self.place(number), "digest", "its bytes do not match their digest")
        extent.setflags(write=False)
        return extent

    def ahead(self, number: int) -> None:
        """Have the system begin to read an extent."""
        begin, end = self._spans[number]
        with opened(*self._at) as file:
            advise(file.fileno(), "WILLNEED", begin, end - begin)

    def place(self, number: int) -> str:
        """The place of an extent, in words for messages."""
        return f"{self.location}: {self.layer.place(number)}, version {self.version.name}"

    def extent_size(self, number: int) -> int:
        """Bytes of an extent, padding included."""
        begin, end = self._spans[number]
        return end - begin

    def offset(self, number: int) -> int:
        """Return an extent's offset in the file, in bytes."""
        return self._spans[number][0]
