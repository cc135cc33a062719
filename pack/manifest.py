"""The manifest: the one document that makes a directory a bundle. Parsed strictly, written canonically.

Canonical form (sorted keys, one-space indent, no floats) is part of the format: any changed byte changes either the
form or the digest, so a damaged manifest is found before anything it says is believed. Reports every problem at once.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import strict_json
from .errors import BundleError, Kind, Problem
from .spec import (
    DENSE_SINCE,
    EXPERT_DTYPES,
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_DENSE,
    MAX_DIM,
    MAX_EXPERTS,
    MAX_EXTENT,
    MAX_LAYERS,
    PAGE,
    READABLE,
    DenseLayer,
    DenseMatrix,
    ExpertLayer,
    Matrix,
    Version,
    affine_extent_size,
    affine_payload,
    dense_file,
    dense_layers,
    encoding_of,
    expert_file,
    version_names,
)

MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20
MAX_SIZE = 1 << 48  # of any file
MAX_FILE_HEADER = 100_000_000  # bytes of a layer file before its first extent
MAX_NAME = 255  # bytes of one part of a path, as file systems have it
MAX_PATH = 1024  # bytes of a path
# What every bundle has; the dense tensors are one file, or several with an index.
CONFIG, TABLES, DENSE, DENSE_INDEX = (
    "config.json", "calibration.safetensors", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
PACKED = ("experts/", "dense/")  # folders whose files' headers hold the digests of what is in them
CARD = ("README.md", "losses.png")  # what a page on the Hub shows; the manifest does not list it
_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the bundle: its size and the SHA-256 of all of it."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExpertFileEntry:
    """A layer file, of experts or of dense matrices. Its header's digest stands here, and the header holds those of the
    extents.

    `payload` is the bytes of its extents without alignment padding.
    """

    size: int
    header_size: int
    header_sha256: str
    payload: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A version for every expert: `versions[layer position][expert]`, and how it came about; and where dense matrices
    were chosen with them, a version for each of those, else None."""

    name: str
    versions: tuple[tuple[str, ...], ...]
    dense: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds. `provenance` is free-form: strings, integers, lists and objects of them.

    `format_version` is that of a manifest that was read; what is written anew has the latest. `dense` are the matrices
    outside the experts that have versions, in model order, and `dense_versions` these; both are empty without any.
    `expert_files` are the layer files, those of dense matrices as well.
    """

    model: Mapping[str, Any]
    layers: tuple[ExpertLayer, ...]
    versions: tuple[Version, ...]
    files: Mapping[str, FileEntry]
    expert_files: Mapping[str, ExpertFileEntry]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    allocation: Allocation | None = None
    format_version: int = FORMAT_VERSION
    dense: tuple[DenseMatrix, ...] = ()
    dense_versions: tuple[Version, ...] = ()

    @property
    def dense_layers(self) -> tuple[DenseLayer, ...]:
        """`dense` by layer, in its order."""
        return dense_layers(self.dense)

    @property
    def calibration_tokens(self) -> int:
        """Tokens of calibration text by the provenance; 0 where it does not say, or nothing that can be."""
        found = self.provenance.get("calibration")
        parts = [found.get(k) if isinstance(found, Mapping) else 0 for k in ("samples", "length")]
        sizes = [n if isinstance(n, int) and 0 <= n < 1 << 48 else 0 for n in parts]
        return sizes[0] * sizes[1]

    def dense_files(self, version: str) -> tuple[str, ...]:
        """The files of a version of the dense matrices."""
        return tuple(dense_file(version, layer.index) for layer in self.dense_layers)

    def dense_version(self, name: str) -> Version:
        """The version of the dense matrices of that name; KeyError where there is none."""
        for v in self.dense_versions:
            if v.name == name:
                return v
        raise KeyError(name)

    def version(self, name: str) -> Version:
        """The version of that name; KeyError where the bundle does not describe it."""
        for v in self.versions:
            if v.name == name:
                return v
        raise KeyError(name)

    def to_json(self) -> bytes:
        """The canonical bytes of manifest.json."""
        files = {k: asdict(v) for k, v in self.files.items()} | {k: asdict(v) for k, v in self.expert_files.items()}
        document = {
            "format": FORMAT_NAME,
            "format_version": self.format_version,
            "model": dict(self.model),
            "layers": [asdict(layer) for layer in self.layers],
            "versions": [asdict(v) for v in self.versions],
            "files": files,
            "provenance": dict(self.provenance),
            "allocation": _document(self.allocation) if self.allocation else None,
        }
        if self.dense:
            matrices = [{"layer": d.layer, "module": d.module, **_shape(d.matrix)} for d in self.dense]
            document["dense"] = {"matrices": matrices, "versions": [asdict(v) for v in self.dense_versions]}
        document["sha256"] = hashlib.sha256(_canonical(document)).hexdigest()
        return _canonical(document)


def _document(allocation: Allocation) -> dict[str, Any]:
    return {k: v for k, v in asdict(allocation).items() if k != "dense" or v is not None}


def _shape(matrix: Matrix) -> dict[str, Any]:
    return {"rows": matrix.rows, "cols": matrix.cols, "bias": matrix.bias}


def _canonical(document: Any) -> bytes:
    return (json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


class _Checker:
    """Collects problems while fields are read; a wrong field gives a default so that the rest is still checked."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def wrong(self, where: str, kind: Kind, message: str) -> None:
        self.problems.append(Problem(f"{MANIFEST}: {where}", kind, message))

    def integer(self, where: str, value: Any, low: int, high: int) -> int:
        if type(value) is int and low <= value <= high:
            return value
        self.wrong(where, "range", f"not an integer from {low} to {high}: {_show(value)}")
        return low

    def text(self, where: str, value: Any, allowed: Sequence[str] | None = None) -> str:
        if isinstance(value, str) and (allowed is None or value in allowed):
            return value
        self.wrong(where, "value", f"not {'one of ' + ', '.join(allowed) if allowed else 'a string'}: {_show(value)}")
        return allowed[0] if allowed else ""

    def matching(self, where: str, value: Any, pattern: re.Pattern[str], what: str) -> str:
        if isinstance(value, str) and len(value) <= MAX_PATH and pattern.fullmatch(value):
            return value
        self.wrong(where, "text", f"not {what}: {_show(value)}")
        return ""

    def line(self, where: str, value: Any) -> str:
        """Words that a report shows."""
        if isinstance(value, str) and 0 < len(value) <= MAX_PATH and value.isprintable():
            return value
        self.wrong(where, "text", f"not a line of 1 to {MAX_PATH} characters that are printed: {_show(value)}")
        return ""

    def items(self, where: str, value: Any, most: int) -> list[Any]:
        if isinstance(value, list) and len(value) <= most:
            return value
        self.wrong(where, "type", f"not a list of at most {most}: {_show(value)}")
        return []

    def object(self, where: str, value: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.wrong(where, "type", f"not an object: {_show(value)}")
            return {}
        if keys is not None and set(value) != set(keys):
            self.wrong(where, "keys", f"has keys {_show(sorted(value))}, not {_show(sorted(keys))}")
        return value


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:197] + "..."


def parse_manifest(data: bytes) -> Manifest:
    """Read manifest.json.

    Raises:
        BundleError: with every problem found.
    """
    if len(data) > MAX_BYTES:
        raise BundleError.single(MANIFEST, "size", f"{len(data)} bytes, more than {MAX_BYTES}")
    try:
        document = strict_json.loads(data)
    except ValueError as error:
        raise BundleError.single(MANIFEST, "json", f"cannot be parsed: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
        raise BundleError.single(MANIFEST, "format", "not a moepack manifest")
    number = document.get("format_version")
    if type(number) is not int or number not in READABLE:
        raise BundleError.single(
            MANIFEST,
            "format-version",
            f"format version {_show(number)}; this moepack reads {' and '.join(map(str, READABLE))}",
        )
    try:
        canonical = _canonical(document)
    except RecursionError:
        raise BundleError.single(MANIFEST, "json", "cannot be parsed: nested too deeply") from None
    if canonical != data:
        raise BundleError.single(MANIFEST, "canonical", "not in canonical form: damaged or edited")
    digest = document.pop("sha256", None)  # on a line of its own: writing megabytes a second time would take as long
    without = data.replace(b'\n "sha256": "%s",' % str(digest).encode(), b"", 1)
    if digest != hashlib.sha256(without).hexdigest():
        raise BundleError.single(MANIFEST, "digest", "its digest does not match: damaged or edited")
    check = _Checker()
    keys = ["format", "format_version", "model", "layers", "versions", "files", "provenance", "allocation"]
    has_dense = number >= DENSE_SINCE and "dense" in document
    check.object("top level", document, [*keys, "dense"] if has_dense else keys)
    layers = _layers(check, document.get("layers"))
    versions = _versions(check, "versions", document.get("versions"), version_names(number))
    dense, dense_versions = _dense(check, document["dense"]) if has_dense else ((), ())
    files, expert_files = _files(check, document.get("files"), PACKED if number >= DENSE_SINCE else PACKED[:1])
    if not check.problems:
        _layer_files(check, layers, versions, dense_layers(dense), dense_versions, expert_files)
    model = _model(check, document.get("model"), layers, dense)
    manifest = Manifest(
        model,
        layers,
        versions,
        files,
        expert_files,
        check.object("provenance", document.get("provenance")),
        _allocation(check, document.get("allocation"), layers, versions, dense, dense_versions),
        number,
        dense,
        dense_versions,
    )
    if check.problems:
        raise BundleError(check.problems)
    return manifest


def _model(check: _Checker, value: Any, layers: Sequence[ExpertLayer], dense: Sequence[DenseMatrix]) -> dict[str, Any]:
    model = check.object("model", value)
    for key in ("model_type", "architecture"):
        check.matching(f"model.{key}", model.get(key), _NAME, "a name of letters, digits, '.', '_' and '-'")
    check.text("model.expert_dtype", model.get("expert_dtype"), list(EXPERT_DTYPES))
    count = check.integer("model.decoder_layers", model.get("decoder_layers"), 1, MAX_LAYERS)
    if layers and layers[-1].index >= count and not check.problems:
        check.wrong("model.decoder_layers", "count", f"{count}, and layer {layers[-1].index} has experts")
    last = max((d.layer for d in dense if d.layer is not None), default=0)
    if last >= count and not check.problems:
        check.wrong("model.decoder_layers", "count", f"{count}, and layer {last} has dense matrices")
    return model


def _layers(check: _Checker, value: Any) -> tuple[ExpertLayer, ...]:
    out: list[ExpertLayer] = []
    modules: set[str] = set()
    for i, item in enumerate(check.items("layers", value, MAX_LAYERS)):
        at = f"layers[{i}]"
        item = check.object(at, item, ["index", "module", "experts", "matrices"])
        matrices = []
        for k, m in enumerate(check.items(f"{at}.matrices", item.get("matrices"), 2)):
            here = f"{at}.matrices[{k}]"
            m = check.object(here, m, ["name", "rows", "cols", "bias"])
            name = check.text(f"{here}.name", m.get("name"), ["down"] if k else ["gate_up", "up"])
            matrices.append(_matrix(check, here, m, name))
        if len(matrices) != 2:
            check.wrong(f"{at}.matrices", "count", f"{len(matrices)} matrices, not 2")
        elif wrong := _shapes(*matrices):
            check.wrong(f"{at}.matrices", "shape", wrong)
        if sum(m.weights * 2 for m in matrices) + 64 * PAGE > MAX_EXTENT:
            check.wrong(f"{at}.matrices", "overflow", f"an expert of this shape passes {MAX_EXTENT} bytes")
        index = check.integer(f"{at}.index", item.get("index"), 0, MAX_LAYERS - 1)
        if out and index <= out[-1].index:
            check.wrong(f"{at}.index", "order", f"{index} does not come after {out[-1].index}")
        experts = check.integer(f"{at}.experts", item.get("experts"), 1, MAX_EXPERTS)
        module = check.matching(f"{at}.module", item.get("module"), _MODULE, "a module's name")
        if module in modules:
            check.wrong(f"{at}.module", "value", f"{module} stands twice")
        modules.add(module)
        out.append(ExpertLayer(index, module, experts, tuple(matrices)))
    if not out:
        check.wrong("layers", "count", "no layer has experts")
    return tuple(out)


def _shapes(first: Matrix, down: Matrix) -> str:
    """What is wrong with an expert's two shapes; nothing where they fit one another."""
    of_one = 2 if first.name == "gate_up" else 1
    if first.rows != of_one * down.cols:
        return f"{first.name} has {first.rows} rows, not {of_one} for each of down's {down.cols} columns"
    if first.cols != down.rows:
        return f"down has {down.rows} rows, and {first.name} {first.cols} columns"
    return ""


def _dense(check: _Checker, value: Any) -> tuple[tuple[DenseMatrix, ...], tuple[Version, ...]]:
    document = check.object("dense", value, ["matrices", "versions"])
    out: list[DenseMatrix] = []
    modules: set[str] = set()
    for i, item in enumerate(check.items("dense.matrices", document.get("matrices"), MAX_DENSE)):
        at = f"dense.matrices[{i}]"
        item = check.object(at, item, ["layer", "module", "rows", "cols", "bias"])
        layer = item.get("layer")
        if layer is not None:
            layer = check.integer(f"{at}.layer", layer, 0, MAX_LAYERS - 1)
        if out and _order(layer) < _order(out[-1].layer):
            check.wrong(f"{at}.layer", "order", f"{_show(layer)} does not come after {_show(out[-1].layer)}")
        module = check.matching(f"{at}.module", item.get("module"), _MODULE, "a module's name")
        if module in modules:
            check.wrong(f"{at}.module", "value", f"{module} stands twice")
        modules.add(module)
        matrix = _matrix(check, at, item, "weight")
        if matrix.weights * 2 + 64 * PAGE > MAX_EXTENT:
            check.wrong(at, "overflow", f"a matrix of this shape passes {MAX_EXTENT} bytes")
        out.append(DenseMatrix(layer, module, matrix))
    if not out:
        check.wrong("dense.matrices", "count", "no matrix has versions")
    return tuple(out), _versions(check, "dense.versions", document.get("versions"), version_names())


def _order(layer: int | None) -> int:
    """By which dense matrices stand: what is outside the layers comes last."""
    return MAX_LAYERS if layer is None else layer


def _matrix(check: _Checker, at: str, item: Mapping[str, Any], name: str) -> Matrix:
    if not isinstance(item.get("bias"), bool):
        check.wrong(f"{at}.bias", "type", "not true or false")
    rows = check.integer(f"{at}.rows", item.get("rows"), 1, MAX_DIM)
    cols = check.integer(f"{at}.cols", item.get("cols"), 1, MAX_DIM)
    return Matrix(name, rows, cols, item.get("bias") is True)


def _versions(check: _Checker, where: str, value: Any, known: Sequence[str]) -> tuple[Version, ...]:
    out: list[Version] = []
    for i, item in enumerate(check.items(where, value, len(known))):
        at = f"{where}[{i}]"
        item = check.object(at, item, ["name", "encoding", "bits", "group_size", "zero"])
        name = check.text(f"{at}.name", item.get("name"), known)
        size, sizes = item.get("group_size"), encoding_of(name).group_sizes
        expected = Version.of(name, size if size in sizes else max(sizes, default=0))
        if _canonical(item) != _canonical(asdict(expected)):  # true is 1, and no integer
            check.wrong(at, "encoding", f"this moepack does not know this form of {name}: {_show(item)}")
        out.append(expected)
    names = [v.name for v in out]
    if names != [n for n in known if n in names] or not names:
        check.wrong(where, "order", f"not a list from most to least precise without repeats: {names}")
    return tuple(out)


def safe_path(path: str) -> bool:
    """Whether `path` is a relative POSIX path as FORMAT.md, "Paths", allows it."""
    return (
        len(path.encode(errors="replace")) <= MAX_PATH
        and path.isprintable()
        and unicodedata.is_normalized("NFC", path)
        and not set(path) & set('\\:*?"<>|')
        and all(_safe_part(part) for part in path.split("/"))
    )


def _safe_part(part: str) -> bool:
    return 0 < len(part.encode(errors="replace")) <= MAX_NAME and part[0] not in ". " and part[-1] not in ". "


def _files(
    check: _Checker, value: Any, packed: Sequence[str]
) -> tuple[dict[str, FileEntry], dict[str, ExpertFileEntry]]:
    files: dict[str, FileEntry] = {}
    expert_files: dict[str, ExpertFileEntry] = {}
    for path, item in check.object("files", value).items():
        at = f"files[{_show(path)}]"
        if not safe_path(path) or path.casefold() == MANIFEST:
            check.wrong(at, "path", "not a relative path as the format allows them")
        is_packed = path.startswith(tuple(packed))
        digest_key = "header_sha256" if is_packed else "sha256"
        item = check.object(at, item, ["size", digest_key, *(["header_size", "payload"] if is_packed else [])])
        found = len(check.problems)
        size = check.integer(f"{at}.size", item.get("size"), 0, MAX_SIZE)
        digest = check.text(f"{at}.{digest_key}", item.get(digest_key))
        if not _HEX.fullmatch(digest):
            check.wrong(at, "digest", "not a SHA-256 in lower-case hexadecimal")
        if is_packed:
            most = size if found == len(check.problems) else MAX_SIZE
            header = check.integer(f"{at}.header_size", item.get("header_size"), 8, min(most, MAX_FILE_HEADER))
            payload = check.integer(f"{at}.payload", item.get("payload"), 0, max(most - header, 0))
            if found == len(check.problems) and (header % PAGE or (size - header) % PAGE):
                check.wrong(at, "alignment", f"header or data are not whole pages of {PAGE} bytes")
            expert_files[path] = ExpertFileEntry(size, header, digest, payload)
        else:
            files[path] = FileEntry(size, digest)
    _together(check, (*files, *expert_files))
    for path in (CONFIG, TABLES):
        if path not in files:
            check.wrong("files", "missing", f"{path} is not listed")
    if (DENSE in files) == (DENSE_INDEX in files):
        check.wrong("files", "missing", f"either {DENSE} or {DENSE_INDEX} is listed, and not both")
    return files, expert_files


def _together(check: _Checker, paths: Sequence[str]) -> None:
    """Paths that name different files on every file system, and folders that are none of the files."""
    taken: dict[str, str] = {}
    for path in paths:
        if (other := taken.setdefault(path.casefold(), path)) != path:
            check.wrong(f"files[{_show(path)}]", "path", f"differs from {_show(other)} in capitals alone")
    for path in paths:
        parts = path.casefold().split("/")
        for i in range(1, len(parts)):
            if "/".join(parts[:i]) in taken:
                check.wrong(f"files[{_show(path)}]", "path", "lies below another file")


def _layer_files(
    check: _Checker,
    layers: Sequence[ExpertLayer],
    versions: Sequence[Version],
    dense: Sequence[DenseLayer],
    dense_versions: Sequence[Version],
    entries: Mapping[str, ExpertFileEntry],
) -> None:
    expected: dict[str, tuple[Version, ExpertLayer | DenseLayer]] = {}
    expected |= {expert_file(v.name, layer.index): (v, layer) for v in versions for layer in layers}
    expected |= {dense_file(v.name, layer.index): (v, layer) for v in dense_versions for layer in dense}
    for path in sorted(set(expected) - set(entries)):
        check.wrong("files", "missing", f"{path} is not listed")
    for path in sorted(set(entries) - set(expected)):
        check.wrong("files", "unexpected", f"{path} belongs to no version and layer")
    for path, (version, layer) in expected.items():
        entry = entries.get(path)
        if entry is None or version.is_lossless:
            continue
        extents, payload = _affine_bytes(layer, version)
        if entry.size - entry.header_size != extents or entry.payload != payload:
            check.wrong(f"files[{_show(path)}]", "size", f"not {layer.extents} extents of {extents} bytes in all")


def _affine_bytes(layer: ExpertLayer | DenseLayer, version: Version) -> tuple[int, ...]:
    """Bytes of a layer's affine extents, and what of them is no padding."""
    if isinstance(layer, ExpertLayer):  # of one shape
        return tuple(layer.experts * size(layer.matrices, version) for size in (affine_extent_size, affine_payload))
    each = [(m.matrix,) for m in layer.matrices]
    return tuple(sum(size(m, version) for m in each) for size in (affine_extent_size, affine_payload))


def _allocation(
    check: _Checker,
    value: Any,
    layers: Sequence[ExpertLayer],
    versions: Sequence[Version],
    dense: Sequence[DenseMatrix],
    dense_versions: Sequence[Version],
) -> Allocation | None:
    if value is None:
        return None
    item = check.object("allocation", value)
    has_dense = bool(dense) and "dense" in item
    item = check.object("allocation", value, ["name", "versions", *(["dense"] if has_dense else [])])
    names = [v.name for v in versions]
    table = check.items("allocation.versions", item.get("versions"), MAX_LAYERS)
    if len(table) != len(layers):
        check.wrong("allocation.versions", "count", f"{len(table)} layers, not {len(layers)}")
    out = []
    for i, (row, layer) in enumerate(zip(table, layers, strict=False)):
        out.append(_chosen(check, f"allocation.versions[{i}]", row, layer.experts, names))
    chosen = None
    if has_dense:
        chosen = _chosen(check, "allocation.dense", item["dense"], len(dense), [v.name for v in dense_versions])
    return Allocation(check.line("allocation.name", item.get("name")), tuple(out), chosen)


def _chosen(check: _Checker, at: str, value: Any, count: int, names: Sequence[str]) -> tuple[str, ...]:
    """One version's name for each of `count` experts or matrices."""
    row = check.items(at, value, count)
    if len(row) != count:
        check.wrong(at, "count", f"{len(row)} names, not {count}")
    for bad in sorted({_show(v) for v in row if v not in names}):
        check.wrong(at, "value", f"{bad} is not a version of this bundle")
    return tuple(str(v) for v in row)
