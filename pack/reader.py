"""Opening a bundle: the manifest, the files it lists, and extents as views of file mappings.

Every size, offset and path is checked before it is used, and all problems are reported at once. Digests of extents are
checked when they are asked for, digests of everything by `verify`. Decides nothing about who serves what.
"""

from __future__ import annotations

import stat
from collections.abc import Container, Iterator
from pathlib import Path

from .affine import Buffer
from .errors import BundleError, CodecError, Problem
from .layer_file import LayerFile
from .lossless import decode_lossless
from .manifest import MANIFEST, MAX_BYTES, ExpertFileEntry, FileEntry, Manifest, parse_manifest
from .spec import ExpertLayer, Version, expert_file
from .tables import TABLES, CalibrationTables, read_tables
from .writer import sha256_of


class Bundle:
    """An open bundle.

    Attributes:
        path: its directory.
        manifest: its manifest; `manifest.versions` is what was built.
        versions: what is here, from most to least precise: a version may be absent, but only as a whole.
    """

    def __init__(self, path: Path, manifest: Manifest, versions: tuple[Version, ...]) -> None:
        self.path, self.manifest, self.versions = path, manifest, versions
        self._open: dict[tuple[str, int], LayerFile] = {}

    @property
    def layers(self) -> tuple[ExpertLayer, ...]:
        """The layers that have experts, in model order."""
        return self.manifest.layers

    @property
    def expert_weights(self) -> int:
        """Weights of all experts of all layers."""
        return sum(layer.experts * layer.expert_weights for layer in self.layers)

    def layer_file(self, version: str, position: int) -> LayerFile:
        """The layer file of the layer at `position` in `layers`; kept open."""
        key = (version, position)
        if key not in self._open:
            layer = self.layers[position]
            name = expert_file(version, layer.index)
            entry = self.manifest.expert_files[name]
            self._open[key] = LayerFile(self.path / name, name, entry, self.manifest.version(version), layer)
        return self._open[key]

    def extent(self, version: str, position: int, expert: int, check_digest: bool = True) -> Buffer:
        """A read-only view of one extent; its digest is checked first.

        Raises:
            BundleError: when the file or the extent is damaged.
        """
        return self.layer_file(version, position).extent(expert, check_digest)

    def calibration(self) -> CalibrationTables:
        """The loss tables and routing statistics.

        Raises:
            BundleError: when the file is damaged.
        """
        tables = read_tables(self.path / TABLES, self.layers)
        for version in self.versions:
            if version.name not in tables.versions:
                raise BundleError.single(str(tables.path), "tables", f"has no column of version {version.name}")
        return tables

    def version_bytes(self, version: str) -> int:
        """Bytes of a version's files as stored."""
        return sum(self.manifest.expert_files[expert_file(version, layer.index)].size for layer in self.layers)

    def bits_per_weight(self, version: str) -> float:
        """Bits an expert weight takes: codes with their tables, scales and indexes, without alignment padding."""
        files = (self.manifest.expert_files[expert_file(version, layer.index)] for layer in self.layers)
        return 8 * sum(f.payload for f in files) / self.expert_weights


def open_bundle(path: str | Path, skip_partial: bool = False) -> Bundle:
    """Open the bundle at `path`.

    Args:
        path: its directory.
        skip_partial: whether a version of which some files are here counts as absent, as in a cache that a download
            left unfinished; it is a problem without this.

    Raises:
        BundleError: with every problem of its manifest and of the files it lists.
    """
    root = Path(path)
    manifest_path = root / MANIFEST
    try:
        if not manifest_path.is_file():  # a pipe or a device has no end
            raise OSError
        if manifest_path.stat().st_size > MAX_BYTES:
            raise BundleError.single(str(root), "size", f"{MANIFEST} has more than {MAX_BYTES} bytes")
        data = manifest_path.read_bytes()
    except OSError:
        what = f"not a bundle: it has no readable {MANIFEST}" if root.exists() else "no such directory"
        raise BundleError.single(str(root), "missing", what) from None
    try:
        manifest = parse_manifest(data)
    except BundleError as error:
        raise BundleError([Problem(f"{root}/{p.location}", p.kind, p.message) for p in error.problems]) from None
    enough = all if skip_partial else any
    present = tuple(
        v for v in manifest.versions if enough((root / expert_file(v.name, x.index)).exists() for x in manifest.layers)
    )
    problems = []
    for name, entry in _expected_files(manifest, present):
        try:
            found = (root / name).stat()
        except (OSError, ValueError):
            problems.append(Problem(f"{root}/{name}", "missing", "listed in the manifest, not there"))
            continue
        if not stat.S_ISREG(found.st_mode):
            problems.append(Problem(f"{root}/{name}", "kind", "not a file"))
        elif found.st_size != entry.size:
            problems.append(Problem(f"{root}/{name}", "size", f"{found.st_size} bytes, the manifest says {entry.size}"))
    if not present:
        problems.append(Problem(str(root), "missing", "no version of the experts is here"))
    if problems:
        raise BundleError(problems)
    return Bundle(root, manifest, present)


def _expected_files(
    manifest: Manifest, present: tuple[Version, ...]
) -> Iterator[tuple[str, FileEntry | ExpertFileEntry]]:
    yield from manifest.files.items()
    for version in present:
        for layer in manifest.layers:
            name = expert_file(version.name, layer.index)
            yield name, manifest.expert_files[name]


def verify(bundle: Bundle, only: Container[str] | None = None) -> Iterator[tuple[str, list[Problem]]]:
    """Check every digest and decode every lossless extent; yields each file's name with its problems.

    Args:
        bundle: the bundle.
        only: names of files in it, where not all are to be checked.
    """
    for name, entry in bundle.manifest.files.items():
        if only is not None and name not in only:
            continue
        good = sha256_of(bundle.path / name) == entry.sha256
        yield name, [] if good else [Problem(name, "digest", "its bytes do not match their digest")]
    for version in bundle.versions:
        for position, layer in enumerate(bundle.layers):
            name = expert_file(version.name, layer.index)
            if only is None or name in only:
                yield name, _verify_layer(bundle, version, position)


def _verify_layer(bundle: Bundle, version: Version, position: int) -> list[Problem]:
    problems: list[Problem] = []
    try:
        file = bundle.layer_file(version.name, position)
    except BundleError as error:
        return list(error.problems)
    for expert in range(file.layer.experts):
        try:
            extent = file.extent(expert)
            if version.is_lossless:
                decode_lossless(file.layer.matrices, extent)
        except BundleError as error:
            problems.extend(error.problems)
        except CodecError as error:
            at = f"{file.location}: layer {file.layer.index}, expert {expert}, version {version.name}"
            problems.append(Problem(at, "codec", str(error)))
    return problems
