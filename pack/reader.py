"""Open a bundle: the manifest, the files it lists, and extents as views of file mappings.

Every size, offset and path is checked before it is used, and all problems are reported at once. An extent's digest is
checked when the extent is read. `verify` checks all digests, and the rules that need every byte (codec/checks.py).
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from .codec.bits import Buffer
from .dense import DenseTensors
from .errors import BundleError, CodecError, InputError, Problem
from .files import digest_of, read_file, size_of
from .layer_file import Layer, LayerFile
from .manifest import CARD, CONFIG, DENSE, DENSE_INDEX, LEFTOVERS, MANIFEST, MAX_BYTES, Manifest
from .manifest.parser import parse_manifest
from .spec import DenseLayer, Version
from .tables import TABLES, Array, CalibrationTables, read_tables
from .values import DenseValues, Expert

_CONFIG_BYTES = 64 << 20
TENSORS = ".safetensors"  # the ending of files of tensors


class Bundle:
    """An open bundle. `versions` are here; `manifest.versions` are all that were built."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        versions: tuple[Version, ...],
        dense_versions: tuple[Version, ...] | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        # The versions that are here, from most to least precise: a version may be absent, but only as a whole.
        self.versions = versions
        self.dense_versions = manifest.dense_versions if dense_versions is None else dense_versions
        self.layers = manifest.layers
        self.dense_layers = manifest.dense_layers
        self.routed: tuple[Array, ...] | None = None  # counts in the place of calibration's; see `variant`
        self._open: dict[tuple[str, str, int | None], LayerFile] = {}

    @property
    def files(self) -> dict[str, int]:
        """Sizes of the files outside `experts/` and `dense/` that are here: what only an export needs may be absent."""
        names = (n for n in self.manifest.files if n != LEFTOVERS or os.path.lexists(self.path / n))
        return {name: self.manifest.files[name].size for name in names}

    @property
    def expert_weights(self) -> int:
        """Weights of all experts of all layers."""
        return sum(layer.experts * layer.expert_weights for layer in self.layers)

    def layer_file(self, version: str, position: int) -> LayerFile:
        """Open the file of a version of the layer at `position` in `layers`, or return the open one."""
        return self._file(version, self.layers[position])

    def dense_file(self, version: str, layer: DenseLayer) -> LayerFile:
        """Open the file of a version of a layer's dense matrices, or return the open one."""
        return self._file(version, layer)

    def _file(self, version: str, layer: Layer) -> LayerFile:
        key = version, layer.kind, layer.index  # a tuple: every fetch comes here, and a path takes 2 microseconds
        if key not in self._open:
            name = layer.file(version)
            manifest = self.manifest
            described = manifest.version(version) if layer.kind == "experts" else manifest.dense_version(version)
            self._open[key] = LayerFile(self.path, name, manifest.expert_files[name], described, layer)
        return self._open[key]

    def dense_place(self, number: int) -> tuple[DenseLayer, int]:
        """Locate a dense matrix by its number in `manifest.dense`: its layer, and its number in that layer."""
        layer = self.dense_layers[bisect.bisect_right(self.dense_layers, number, key=lambda x: x.first) - 1]
        return layer, number - layer.first

    def dense_matrix(self, version: str, module: str) -> DenseValues:
        """Read one dense matrix in one version and check its digest; `.numpy()` and `.torch()` give weight and bias.

        `module` is the Linear's name in the transformers model, as in `manifest.dense`. Raises InputError when the
        bundle does not have the matrix, and BundleError when it is damaged.
        """
        here = [v.name for v in self.dense_versions]
        if version not in here:
            known = f"here are {', '.join(here)}" if here else "they are as in the checkpoint"
            raise InputError(f"{self.path}: has no version {version!r} of dense matrices: {known}")
        for number, described in enumerate(self.manifest.dense):
            if described.module == module:
                layer, at = self.dense_place(number)
                file = self.dense_file(version, layer)
                return DenseValues(file.version, (described.matrix,), file.extent(at), file.place(at))
        raise InputError(f"{self.path}: {module!r} is not a dense matrix with versions")

    def extent(self, version: str, position: int, expert: int, check_digest: bool = True) -> Buffer:
        """A read-only view of one extent. Its digest is checked first; raises BundleError when it is damaged."""
        return self.layer_file(version, position).extent(expert, check_digest)

    def expert(self, version: str, layer: int, expert: int) -> Expert:
        """Read one expert in one version and check its digest; `.numpy()` and `.torch()` give its matrices.

        `layer` is the decoder layer's index in the model, as in `layers`. Raises InputError when the bundle does not
        have the expert, and BundleError when it is damaged.
        """
        here = [v.name for v in self.versions]
        if version not in here:
            raise InputError(f"{self.path}: has no version {version!r}: here are {', '.join(here)}")
        indices = [x.index for x in self.layers]
        if layer not in indices:
            raise InputError(f"{self.path}: layer {layer} has no experts: layers {', '.join(map(str, indices))} have")
        position = indices.index(layer)
        described = self.layers[position]
        if not 0 <= expert < described.experts:
            raise InputError(f"{self.path}: layer {layer} has no expert {expert}: it has {described.experts}, from 0")
        file = self.layer_file(version, position)
        return Expert(file.version, described.matrices, file.extent(expert), file.place(expert))

    def dense(self, check_digests: bool = True) -> DenseTensors:
        """The dense tensors that have no versions: shapes by name, `.numpy(name)`, `.torch(name)`.

        With `check_digests` a file's digest is checked before its first tensor is read. Raises BundleError when a
        file's header is damaged.
        """
        return DenseTensors(self.path, self.manifest, check_digests)

    def calibration(self) -> CalibrationTables:
        """The loss tables and routing statistics; the file's digest is checked first.

        Raises BundleError when the file is damaged, or breaks FORMAT.md.
        """
        matrices = len(self.manifest.dense)
        tables = read_tables(self.path / TABLES, self.layers, self.manifest.files[TABLES].sha256, matrices)
        columns = [(v.name, tables.versions) for v in self.versions]
        columns += [(v.name, tables.dense.versions) for v in self.dense_versions if tables.dense]
        for name, known in columns:
            if name not in known:
                raise BundleError.single(str(tables.path), "tables", f"has no column of version {name}")
        return tables if self.routed is None else tables.routed_as(self.routed)

    def check(self, *names: str) -> None:
        """Check the digests of these files outside `experts/`; without names, of all files that hold no tensors.

        Raises BundleError with every file that does not match its digest.
        """
        wanted = names or tuple(name for name in self.files if not name.endswith(TENSORS))
        problems = [p for name in wanted for p in _check_digest(self, name)]
        if problems:
            raise BundleError(problems)

    def verify(self) -> list[Problem]:
        """List every problem of the bundle: check all digests and every rule of the format, reading every byte."""
        return [p for _, found in verify(self) for p in found]

    def version_bytes(self, version: str) -> int:
        """Bytes of a version's files as stored."""
        return sum(self.manifest.expert_files[layer.file(version)].size for layer in self.layers)

    def dense_bytes(self, version: str) -> int:
        """Bytes of the files of a version of the dense matrices."""
        return sum(self.manifest.expert_files[layer.file(version)].size for layer in self.dense_layers)

    def bits_per_weight(self, version: str) -> float:
        """Bits per expert weight: codes with their tables, scales and indexes, without alignment padding."""
        files = (self.manifest.expert_files[layer.file(version)] for layer in self.layers)
        return 8 * sum(f.payload for f in files) / self.expert_weights


def variant(
    bundle: Bundle, versions: tuple[Version, ...] | None = None, routed: Sequence[Array] | None = None
) -> Bundle:
    """The same bundle with these versions alone, or for other traffic.

    `calibration` then has the counts `routed`, [layers] of [experts], in the place of its own, which keep the weight of
    FEW_TOKENS choices a layer, so that no expert is taken as unused.
    """
    here = bundle.versions if versions is None else versions
    made = Bundle(bundle.path, bundle.manifest, here, bundle.dense_versions)
    made.routed = bundle.routed if routed is None else tuple(routed)
    return made


def open_bundle(path: str | Path, skip_partial: bool = False) -> Bundle:
    """Open the bundle at `path`; raises BundleError with every problem of its manifest and of the files it lists.

    With `skip_partial`, a version with missing files counts as absent, as after an unfinished download. Otherwise a
    missing file is a problem.
    """
    root = Path(path)
    if not root.is_dir():
        what = "not a bundle: a file" if root.exists() else "no such directory"
        raise BundleError.single(str(root), "missing", what)
    try:
        data = read_file(root, MANIFEST, MAX_BYTES)
    except BundleError as error:
        if error.problems[0].kind != "missing":
            raise
        raise BundleError.single(str(root), "missing", f"not a bundle: it has no {MANIFEST}") from None
    try:
        manifest = parse_manifest(data)
    except BundleError as error:
        raise BundleError([Problem(f"{root}/{p.location}", p.kind, p.message) for p in error.problems]) from None
    enough, is_there = (all, os.path.exists) if skip_partial else (any, os.path.lexists)

    def here(version: Version, layers: Sequence[Layer]) -> bool:
        return enough(is_there(root / layer.file(version.name)) for layer in layers)

    present = tuple(v for v in manifest.versions if here(v, manifest.layers))
    dense = tuple(v for v in manifest.dense_versions if here(v, manifest.dense_layers))
    names = (*manifest.layer_files((), dense), *manifest.layer_files(present, ()))
    bundle = Bundle(root, manifest, present, dense)
    sizes = bundle.files
    sizes |= {name: manifest.expert_files[name].size for name in names}
    problems: list[Problem] = []
    for name, listed in sizes.items():
        try:
            size = size_of(root, name)
        except BundleError as error:
            problems += error.problems
            continue
        if size != listed:
            problems.append(Problem(f"{root}/{name}", "size", f"{size} bytes, the manifest says {listed}"))
    if not present:
        problems.append(Problem(str(root), "missing", "no version of the experts is here"))
    if manifest.dense and not dense:
        problems.append(Problem(str(root), "missing", "no version of the dense matrices is here"))
    if problems:
        raise BundleError(problems)
    return bundle


def unlisted(bundle: Bundle) -> list[str]:
    """Files in a bundle's directory that its manifest does not list, except the model card and hidden files."""
    listed = {MANIFEST, *CARD, *bundle.manifest.files, *bundle.manifest.expert_files}
    out = []
    for folder, folders, names in os.walk(bundle.path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(folder).relative_to(bundle.path)
        out += [name for n in sorted(names) if not n.startswith(".") and (name := (here / n).as_posix()) not in listed]
    return out


def verify(bundle: Bundle, only: Container[str] | None = None) -> Iterator[tuple[str, list[Problem]]]:
    """Check every digest and rule of FORMAT.md, in all files or `only` these; yields each file's name and problems."""
    for name in bundle.files:
        if only is None or name in only:
            skipped = only is not None and name == DENSE_INDEX  # the files that it names may be elsewhere
            yield name, _check_digest(bundle, name) or ([] if skipped else _check_file(bundle, name))
    for name, (version, layer) in bundle.manifest.layer_files(bundle.versions, bundle.dense_versions).items():
        if only is None or name in only:
            yield name, _verify_layer(bundle, version, layer)


def _check_digest(bundle: Bundle, name: str) -> list[Problem]:
    try:
        good = digest_of(bundle.path, name) == bundle.manifest.files[name].sha256
    except BundleError as error:
        return list(error.problems)
    return [] if good else [Problem(f"{bundle.path}/{name}", "digest", "its bytes do not match their digest")]


def _check_file(bundle: Bundle, name: str) -> list[Problem]:
    """Check the format's rules for a file whose digest is right."""
    where = f"{bundle.path}/{name}"
    try:
        if name == TABLES:
            bundle.calibration().check()
        elif name == CONFIG:
            data = read_file(bundle.path, CONFIG, _CONFIG_BYTES)
            try:
                config = json.loads(data)
            except (ValueError, RecursionError) as error:
                return [Problem(where, "json", f"cannot be parsed: {error}")]
            if not isinstance(config, dict) or config.get("quantization_config") != {"quant_method": "moepack"}:
                return [Problem(where, "value", "its quantization_config does not say moepack")]
        elif name in (DENSE, DENSE_INDEX):
            bundle.dense()
    except BundleError as error:
        return list(error.problems)
    return []


def _verify_layer(bundle: Bundle, version: Version, layer: Layer) -> list[Problem]:
    problems: list[Problem] = []
    try:
        file = bundle._file(version.name, layer)
    except BundleError as error:
        return list(error.problems)
    payload = 0
    for number in range(layer.extents):
        where = file.place(number)
        matrices = layer.extent_matrices(number)
        try:
            extent = file.extent(number)
            problems.extend(Problem(where, kind, message) for kind, message in version.check(matrices, extent))
            payload += version.payload(matrices, extent)
        except BundleError as error:
            problems.extend(error.problems)
        except CodecError as error:
            problems.append(Problem(where, "codec", str(error)))
    listed = bundle.manifest.expert_files[layer.file(version.name)].payload
    if not problems and payload != listed:
        problems.append(Problem(file.location, "size", f"a payload of {payload} bytes, the manifest says {listed}"))
    return problems
